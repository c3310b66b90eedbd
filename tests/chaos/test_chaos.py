"""Everything at once: workers die, stop and start, Redis restarts, connections are cut, garbage floods the queue.

After it every task has exactly one result, equal token for token to an undisturbed run; every reader, whenever it
came, has read exactly that; no key stays without a time to live; nobody holds a message; all pages are free; and
the worker that is never ended, only stopped and cut off, is no bigger than a fresh one.
`PETIOLE_CHAOS_MINUTES` says for how long, `PETIOLE_CHAOS_SEED` repeats a run.

The same with a Redis that keeps nothing on disk, and so loses all when it restarts: then of all later tasks; with
a disk that is full now and then; with workers that get no more memory: then a task may fail, with an end in its
log; and with workers in containers whose limit of memory the kernel enforces: then none may.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from petiole.tasks.servers import connections, embedded
from petiole.tasks.servers.connections import LOST
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import AFFINITY_HEADER
from tests.support.fake_engine import expected
from tests.support.memory_group import MemoryGroup
from tests.support.proxy import Proxy
from tests.support.reader import Reader
from tests.support.site import PATIENCE_S, Site, Worker, eventually

MINUTES = float(os.environ.get("PETIOLE_CHAOS_MINUTES", "1"))
WORKERS = 3
LEASE_S = 2
GROWTH_MIB = 32
"""Of a worker through any number of tasks and accidents: buffers, Celery's list of what was revoked."""

OTHER_KEYS = 25
"""More than the keys that are neither some task's nor an owner's, which has a lease and a mark of its server:
queues, bindings, quarantine, the fleet view."""
OWNERS = 3
"""Of a worker: its consumer, and for each of its two queues the thread that counts tokens."""
BINARIES = {"embedded": embedded.server_binary(), "system": shutil.which("redis-server")}


@dataclass(frozen=True)
class Mode:
    """`redis`: its options. `more`: accidents beside the usual ones. `boxed`: each worker is in a container."""

    redis: tuple[str, ...] = ("--appendfsync", "always")
    more: tuple[str, ...] = ()
    loses: bool = False
    disk: bool = False
    boxed: bool = False
    may_fail: bool = False


MODES = {
    "usual": Mode(),
    "without AOF": Mode(("--appendonly", "no", "--save", ""), ("restart_redis",), loses=True),
    "full disk": Mode(("--appendfsync", "everysec"), ("fill_the_disk",), disk=True),
    "little memory": Mode(more=("end_its_memory",), may_fail=True),
    "a container's memory": Mode(more=("reach_the_limit",), boxed=True),
}
DISK = "48m"
MORE_BYTES = (0, 2**20, 2**23)
"""What a worker may allocate before its memory ends."""


@contextmanager
def box(name: str) -> Iterator[MemoryGroup]:
    try:
        group = MemoryGroup(f"petiole-chaos-{name}")
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        group.close()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of `DISK`."""
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


class Chaos:
    """A seeded schedule of accidents. `disk`: where Redis writes, if that is a small one. `tasks`: by their names,
    their lengths; `readers`: theirs; `groups`: closes the workers' containers, once the workers have ended."""

    def __init__(self, site: Site, proxy: Proxy, seed: int, mode: Mode, disk: Path, groups: ExitStack) -> None:
        self.groups = groups
        self.site, self.proxy, self.random, self.mode, self.disk = site, proxy, random.Random(seed), mode, disk
        self.tasks: dict[str, int] = {}
        self.readers: list[Reader] = []
        self.submitted = 0
        self.done: dict[str, int] = {}
        self.newest: list[str] = []
        self.revoked: set[str] = set()
        self.stopped: list[tuple[float, Worker]] = []
        self.boxes: dict[Worker, MemoryGroup] = {}

    def accident(self) -> None:
        accidents: list[tuple[Callable[[], None], int]] = [
            (self.kill, 8),
            (self.stop_for_longer_than_the_lease, 2),
            (self.shut_down, 2),
            (self.cut, 2),
            (self.flood, 2),
            (self.revoke, 2),
            (self.restart_redis, 1),
            *((getattr(self, name), 4) for name in self.mode.more),
        ]
        chosen = self.random.choices([one for one, _ in accidents], [weight for _, weight in accidents])[0]
        self.done[chosen.__name__] = self.done.get(chosen.__name__, 0) + 1
        chosen()
        self.tend()

    def tend(self) -> None:
        """What a supervisor does: let the stopped go on, and replace the dead."""
        now = time.monotonic()
        for since, worker in list(self.stopped):
            if now - since > 1.5 * LEASE_S:
                worker.signal(signal.SIGCONT)
                self.stopped.remove((since, worker))
        for _ in range(WORKERS - len(self.alive())):
            worker = self.site.start_worker(PETIOLE_BROKER_URL=self.proxy.url)
            if self.mode.boxed:
                self.boxes[worker] = self.groups.enter_context(box(f"{os.getpid()}-{worker.name}"))
                self.boxes[worker].add(worker.process.pid)

    def alive(self) -> list[Worker]:
        return [worker for worker in self.site.workers if worker.alive()]

    def victim(self) -> Worker:
        """Anybody but the one whose memory is looked at in the end."""
        self.tend()
        return self.random.choice([worker for worker in self.alive() if worker is not self.site.workers[0]])

    def kill(self) -> None:
        self.victim().kill()

    def stop_for_longer_than_the_lease(self) -> None:
        worker = self.random.choice(self.alive())
        if worker not in [stopped for _, stopped in self.stopped]:
            worker.signal(signal.SIGSTOP)
            self.stopped.append((time.monotonic(), worker))

    def shut_down(self) -> None:
        self.victim().signal(signal.SIGTERM)

    def cut(self) -> None:
        self.proxy.cut()

    def flood(self) -> None:
        garbage = [b"", b"5", b"null", b"{broken", b"[1,2]", b'{"headers": 1}', b"\xff\xfe"]
        with_retries(lambda: self.site.redis.lpush("petiole", *self.random.choices(garbage, k=20)))

    def revoke(self) -> None:
        """Somebody changes his mind about the newest tasks, wherever they are."""
        for name in self.newest:
            self.revoked.add(name)
            with_retries(lambda name=name: self.site.app.control.revoke(name, terminate=True))

    def restart_redis(self) -> None:
        self.site.server.restart()
        if self.mode.loses:
            self.tasks.clear()
            self.readers.clear()

    def fill_the_disk(self) -> None:
        """For longer than Redis waits before it writes."""
        filler = self.disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**16))
        time.sleep(1 + self.random.random())
        filler.unlink()
        with_retries(lambda: self.site.redis.set("chaos", "", ex=1))

    def end_its_memory(self) -> None:
        worker = self.victim()
        with suppress(ProcessLookupError, FileNotFoundError):
            most = worker.memory_bytes("VmSize") + self.random.choice(MORE_BYTES)
            _, hard = resource.prlimit(worker.process.pid, resource.RLIMIT_AS)
            resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (most, hard))

    def reach_the_limit(self) -> None:
        """What the worker takes next is more than its container has, so the kernel kills it."""
        group = self.boxes[self.victim()]
        with suppress(OSError):  # it uses more already
            group.limit(group.used + self.random.choice(MORE_BYTES))

    def reaches_a_limit(self) -> bool:
        """Whether the kernel has killed a worker. Otherwise the next one reaches its limit."""
        if not self.kills:
            self.reach_the_limit()
        return self.kills > 0

    @property
    def kills(self) -> int:
        return sum(group.kills for group in self.boxes.values())


def with_retries(work: Callable[[], Any]) -> Any:
    def attempt() -> Any:
        try:
            return work(), True
        except (*LOST, OSError, redis.ResponseError, OperationalError):
            return None

    return eventually(attempt, "Redis answers")[0]


KINDS = [("usual", name) for name, path in BINARIES.items() if path]
KINDS += [(mode, KINDS[0][1]) for mode in MODES if mode != "usual"]


@pytest.mark.parametrize(("mode", "binary"), KINDS)
def test_chaos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, binary: str) -> None:
    seed = int(os.environ.get("PETIOLE_CHAOS_SEED", str(random.randrange(10**6))))
    print(f"\nPETIOLE_CHAOS_SEED={seed} ({binary} Redis, {mode})")
    if MODES[mode].disk:
        with small_disk(tmp_path / "disk") as disk:
            whole_trial(tmp_path, monkeypatch, seed, MODES[mode], binary, disk)
    else:
        whole_trial(tmp_path, monkeypatch, seed, MODES[mode], binary, tmp_path)


def whole_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int, mode: Mode, binary: str, disk: Path
) -> None:
    settled = {
        "PETIOLE_VISIBILITY_TIMEOUT_S": LEASE_S,
        "PETIOLE_DRAIN_SECONDS": 0.2,
        "PETIOLE_MAX_ATTEMPTS": 1000,
        "PETIOLE_MAX_NUM_SEQS": 16,
    }
    options = ("--dir", str(disk), *mode.redis)
    with ExitStack() as groups, Site(folder, binary=BINARIES[binary], options=options, **settled) as site:
        monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
        settings.cache_clear()
        proxy = Proxy(folder / "p.sock", site.server.socket)
        chaos = Chaos(site, proxy, seed, mode, disk, groups)
        chaos.tend()
        for worker in list(site.workers):
            worker.ready()
        run(site, chaos, MINUTES * 60 / len(KINDS))
        if mode.boxed:
            eventually(chaos.reaches_a_limit, "the kernel kills a worker for its memory")
        settle(site, chaos)
        verify(site, chaos)
        verify_rest(site, chaos)
        print(f"{chaos.submitted} tasks, {len(chaos.readers)} readers; {chaos.done}, {chaos.kills} by the kernel")
        proxy.close()
    connections._streams.cache_clear()
    settings.cache_clear()


def run(site: Site, chaos: Chaos, seconds: float) -> None:
    """Tasks and readers come all the time; accidents come between them."""
    ends_at = time.monotonic() + seconds
    next_accident = time.monotonic() + 1
    while time.monotonic() < ends_at:
        if site.unfinished() < 300 if answers(site) else False:
            for _ in range(20):
                name = f"chaos-{chaos.submitted}"
                length = chaos.random.choice([1, 3, 10, 50, 200, 400])
                submit(site, name, length)
                chaos.submitted += 1
                chaos.tasks[name] = length
                chaos.newest = [*chaos.newest[-4:], name]
                if len(chaos.readers) < 200 and chaos.random.random() < 0.1:
                    chaos.readers += [Reader(site, name, delay) for delay in (0.0, chaos.random.random() * 5)]
        if time.monotonic() >= next_accident:
            chaos.accident()
            next_accident = time.monotonic() + 0.3 + 0.6 * chaos.random.random()
        time.sleep(0.05)


def answers(site: Site) -> bool:
    try:
        return bool(site.redis.ping())
    except (*LOST, OSError):
        return False


def submit(site: Site, name: str, length: int) -> None:
    headers = {AFFINITY_HEADER: f"{length}"} if length in (1, 10, 200) else {}
    submission = {"task_id": name, "retry": True, "priority": 0, "headers": headers}
    with_retries(lambda: site.generate(name, max_tokens=length, seed=length, submission=submission))


def settle(site: Site, chaos: Chaos) -> None:
    """No more accidents: wait until the queue is empty and nobody holds anything."""
    for _, worker in chaos.stopped:
        worker.signal(signal.SIGCONT)
    chaos.stopped.clear()

    def idle() -> bool:
        chaos.tend()
        return with_retries(site.unfinished) == 0

    eventually(idle, "all work is done", 4 * PATIENCE_S)


def story(site: Site, name: str, revoked: bool) -> str:
    """What Redis and the workers know of a task."""
    lines = [
        f"{worker.name} {line}"
        for worker in site.workers
        for line in worker.output.splitlines()
        if f"{name}]" in line or f"{name}," in line or line.endswith(name)
    ]
    state, result = site.state(name), AsyncResult(name, app=site.app)
    told = (
        f"{name}: revoked {revoked}, log {site.log(name)}, state {state}, result {result.state} {result.result!r}"
    )
    return "\n".join([told, *sorted(lines, key=lambda line: line[line.find("[") :])])


def verify(site: Site, chaos: Chaos) -> None:
    revoked, failed = chaos.revoked, 0
    for name, length in chaos.tasks.items():
        result = AsyncResult(name, app=site.app)
        truth, written = expected(name, length, length), site.tokens(name)
        ends = [delta["finish_reason"] for delta in site.log(name) if delta["finish_reason"] is not None]
        if name in revoked and ends == ["cancelled"]:
            assert result.state == "REVOKED", name
            assert written == truth[: len(written)], name
        elif chaos.mode.may_fail and ends == ["error"]:
            assert result.state == "FAILURE", story(site, name, name in revoked)
            assert written == truth[: len(written)], name
            failed += 1
        else:
            assert ends == ["length"], story(site, name, name in revoked)
            assert result.state == "SUCCESS", f"{name} is {result.state}: {result.result!r}"
            assert result.result["token_ids"] == written == truth, name
    print(f"{failed} tasks failed")
    for reader in chaos.readers:
        reader.join(PATIENCE_S)
        assert reader.error is None, f"{reader.task_id}: {reader.error!r}"
        seen = (
            f"{reader.task_id}: {len(reader.tokens)} tokens, {reader.reason}, revoked: {reader.task_id in revoked}"
        )
        assert not reader.is_alive(), seen
        assert reader.tokens == site.tokens(reader.task_id), seen
        assert reader.text == "".join(f"w{token} " for token in reader.tokens)
        assert reader.reason == site.log(reader.task_id)[-1]["finish_reason"], seen
    assert site.without_ttl() <= {"petiole:owners"}


def verify_rest(site: Site, chaos: Chaos) -> None:
    """Nothing is left of all that: no page, no job, no owner, no key, no memory."""
    survivor, fresh = site.workers[0], site.start_worker().ready()
    assert survivor.alive()

    def at_rest() -> bool:
        stats = site.app.control.inspect(timeout=3).stats() or {}
        pools = [worker["pool"] for worker in stats.values()]
        return len(pools) == len(chaos.alive()) and all(
            pool["jobs"] == pool["engine"]["running"] == pool["engine"]["waiting"] == 0
            and pool["engine"]["pages_free"] == pool["engine"]["pages_total"]
            for pool in pools
        )

    eventually(at_rest, "all pages are free")
    most = OWNERS * len(chaos.alive())
    eventually(lambda: site.redis.scard("petiole:owners") <= most, "the dead own nothing")
    of_tasks = ("petiole:{", "celery-task-meta-")
    others = [key.decode() for key in site.redis.keys("*") if not key.decode().startswith(of_tasks)]
    assert len(others) <= OTHER_KEYS + 2 * most, others
    print(f"survivor {resident_mib(survivor):.0f} MiB, fresh {resident_mib(fresh):.0f} MiB, {len(others)} keys")
    assert resident_mib(survivor) - resident_mib(fresh) <= GROWTH_MIB


def resident_mib(worker: Worker) -> float:
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024

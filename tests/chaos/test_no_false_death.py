"""No living worker is taken for dead, whatever befalls Redis, connections and engines.

Workers generate without end; none is ever killed. Redis restarts and fails over, by a change of its address and by
sentinels, with one worker slower to return; subscriptions are cut, also while an engine stalls; processes fork
without exec, and are stopped for less than the lease; other workers start and stop. A worker that was taken for
dead would say that it has lost its lease.

`PETIOLE_CHAOS_MINUTES` says for how long, `PETIOLE_CHAOS_SEED` repeats a run. `PETIOLE_PREVIOUS` is a folder with
the version before: with it, one worker has that version.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from celery.result import AsyncResult

from petiole.tasks.app.application import BACKENDS
from petiole.tasks.errors import Unavailable
from petiole.tasks.servers.connections import LOST
from petiole.tasks.settings import settings
from tests.support.fake_engine import expected
from tests.support.proxy import Proxy
from tests.support.site import RedisServer, Site, Worker, eventually
from tests.support.watched import SENTINEL_PASSWORD, Watched

MINUTES = float(os.environ.get("PETIOLE_CHAOS_MINUTES", "1"))
PREVIOUS = os.environ.get("PETIOLE_PREVIOUS", "")
WORKERS = 3
LEASE_S = 15
STOPPED_S = LEASE_S - 7.0
LOOKED_S = 3.0
"""After so long, a worker that starts has looked for its predecessors."""

LENGTH = 400
STEP_MS = 20
FALSE_DEATH = ("a lease was lost", "the lease on")
FALSE_DEATH_PREVIOUS = ("the lease on",)
"""The version before also says that a lease was lost when it renews one that it has just given up."""

TASKS_AT_ONCE = 6


class Fleet:
    """Workers that always generate, each reaching Redis by its own URL. The first may have another version."""

    def __init__(self, site: Site, urls: Sequence[str], seed: int) -> None:
        self.site, self.random = site, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.tasks: dict[str, tuple[str, AsyncResult]] = {}
        self.workers = [self._start(url, previous=bool(PREVIOUS) and not i) for i, url in enumerate(urls)]
        for worker in self.workers:
            worker.ready()

    def _start(self, url: str, *, previous: bool) -> Worker:
        if not previous:
            return self.site.start_worker(PETIOLE_BROKER_URL=url)
        factory = "support.fake_engine:FakeEngine"  # its name in version 0.1
        return self.site.start_worker(
            repository=Path(PREVIOUS), PETIOLE_BROKER_URL=url, PETIOLE_ENGINE_FACTORY=factory
        )

    def feed(self) -> None:
        for name, (_, result) in list(self.tasks.items()):
            if asked(lambda result=result: result.state) in ("SUCCESS", "FAILURE"):
                self.verify(name)
        while len(self.tasks) < TASKS_AT_ONCE:
            self.submit("steady")

    def submit(self, prompt: str) -> None:
        name = f"t{sum(self.done.values())}-{self.random.getrandbits(40):x}"
        submission = {"task_id": name}
        result = asked(lambda: self.site.generate(prompt, max_tokens=LENGTH, seed=1, submission=submission))
        self.tasks[name] = (prompt, result)

    def verify(self, name: str) -> None:
        prompt, result = self.tasks.pop(name)
        assert asked(lambda: self.site.get(result))["token_ids"] == expected(prompt, 1, LENGTH), name

    def stop_for_less_than_the_lease(self) -> None:
        with self.stopped():
            pass

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """One worker is stopped from before until after what happens meanwhile."""
        worker, over_at = self.random.choice(self.workers), time.monotonic() + self.random.uniform(0.1, STOPPED_S)
        worker.signal(signal.SIGSTOP)
        try:
            yield
            time.sleep(max(0.0, over_at - time.monotonic()))
        finally:
            worker.signal(signal.SIGCONT)
        time.sleep(LEASE_S / 5)  # the version before renews its lease so often; the next stop comes behind that

    def nobody_was_taken_for_dead(self) -> None:
        for worker in self.workers:
            assert worker.alive(), worker.output[-3000:]
            telling = FALSE_DEATH_PREVIOUS if PREVIOUS and worker is self.workers[0] else FALSE_DEATH
            said = [line for line in worker.output.splitlines() if any(words in line for words in telling)]
            assert not said, f"{worker.name}: {said}, after {dict(self.done)}"

    def befall(self, minutes: float, accident: Callable[[], str]) -> None:
        """Have accidents for so long, and see that all tasks end as they should."""
        over_at = time.monotonic() + 60 * minutes
        while time.monotonic() < over_at:
            self.feed()
            self.done[accident()] += 1
            self.nobody_was_taken_for_dead()
            time.sleep(2 * self.random.random())
        for name in list(self.tasks):
            self.verify(name)
        self.nobody_was_taken_for_dead()
        print(dict(self.done))


def asked(ask: Callable[[], Any]) -> Any:
    """The answer, as soon as Redis gives one."""

    def attempt() -> list[Any]:
        with suppress(Unavailable, *LOST):
            return [ask()]
        return []

    return eventually(attempt, "Redis answers", 300.0)[0]


class Trials(Fleet):
    """Each worker reaches one Redis through a proxy of its own."""

    def __init__(self, site: Site, folder: Path, seed: int) -> None:
        self.master, self.folder = site.server, folder
        self.proxies = [Proxy(folder / f"p{i}.sock", self.master.socket) for i in range(WORKERS + 1)]
        site.use(self.proxies[-1].url)
        self.failovers = 0
        super().__init__(site, [proxy.url for proxy in self.proxies[:WORKERS]], seed)

    def accident(self) -> str:
        accidents: list[tuple[Callable[[], None], int]] = [
            (self.cut_subscriptions, 4),
            (self.cut_subscriptions_while_engines_stall, 3),
            (self.fork_without_exec, 2),
            (self.restart_redis, 2),
            (self.fail_over, 1),
            (self.another_starts, 2),
        ]
        if not any(prompt.startswith("stall:") for prompt, _ in self.tasks.values()):
            accidents.append((self.stop_for_less_than_the_lease, 3))  # a stop and a stall may be too long together
        chosen = self.random.choices([one for one, _ in accidents], [weight for _, weight in accidents])[0]
        chosen()
        return chosen.__name__

    def cut_subscriptions(self) -> None:
        with redis.Redis(unix_socket_path=str(self.master.socket)) as client:
            for _ in range(self.random.randint(1, 10)):
                client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                time.sleep(self.random.random() / 5)

    def cut_subscriptions_while_engines_stall(self) -> None:
        for i in range(WORKERS):  # never two in one step
            self.submit(f"stall:{20 * i + self.random.randint(1, 20)} {self.random.uniform(1, LEASE_S - 5):.1f}")
        for _ in range(4):
            self.cut_subscriptions()
            time.sleep(self.random.random())

    def fork_without_exec(self) -> None:
        for _ in range(WORKERS):
            self.submit(f"fork:{self.random.randint(1, 20)} {self.random.uniform(0, 5):.1f}")

    def restart_redis(self) -> None:
        self.master.restart()

    def another_starts(self) -> None:
        """A worker starts while something else happens. It looks for those that died before it, and stops."""
        newcomer = self.site.start_worker(PETIOLE_BROKER_URL=self.random.choice(self.proxies).url)
        time.sleep(self.random.uniform(2, 5))
        self.random.choice([self.cut_subscriptions, self.restart_redis, self.fail_over])()
        newcomer.ready()
        time.sleep(LOOKED_S)
        assert newcomer.stop() == 0

    def fail_over(self) -> None:
        """The master dies; the addresses lead to its replica, that of one worker a few seconds later."""
        self.failovers += 1
        master = redis.Redis(unix_socket_path=str(self.master.socket))
        folder = self.folder / f"replica{self.failovers}"
        folder.mkdir()
        port = str(master.config_get("port")["port"])
        replica = RedisServer(folder, "--port", free_port(), "--replicaof", "127.0.0.1", port)
        with redis.Redis(unix_socket_path=str(replica.socket)) as promoted:
            eventually(lambda: promoted.info("replication")["master_link_status"] == "up", "replicated")
            sent = master.info("replication")["master_repl_offset"]
            eventually(lambda: promoted.info("replication")["slave_repl_offset"] >= sent, "in step")
            self.master.kill()
            promoted.execute_command("REPLICAOF", "NO", "ONE")
        master.close()
        replica.options = ("--port", replica.options[1])
        self.master = self.site.server = replica
        slow = self.random.choice(self.proxies[:WORKERS])
        for proxy in self.proxies:
            if proxy is not slow:
                proxy.lead_to(replica.socket)
        time.sleep(self.random.uniform(0.5, 6))
        slow.lead_to(replica.socket)


def free_port() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return str(free.getsockname()[1])


class SentinelTrials(Fleet):
    """Workers ask sentinels for the master of three servers."""

    def __init__(self, site: Site, seed: int) -> None:
        self.watched: Watched = site.server
        super().__init__(site, [site.url] * WORKERS, seed)

    def accident(self) -> str:
        chosen = self.random.choice([self.planned, self.master_dies, self.stop_for_less_than_the_lease])
        chosen()
        return chosen.__name__

    def planned(self) -> None:
        with self.stopped():
            old = self.watched.master()
            self.watched.fail_over()
            eventually(lambda: self.watched.role(old) == "slave", "the old master follows")
        self._settle()

    def master_dies(self) -> None:
        with self.stopped():
            old = self.watched.master()
            old.kill()
            eventually(lambda: self.watched.master() is not old, "another is master")
        self.watched.bring_back(old)
        self._settle()

    def _settle(self) -> None:
        eventually(self.watched.in_step, "all follow the master")


SETTINGS = {
    "PETIOLE_VISIBILITY_TIMEOUT_S": LEASE_S,
    "PETIOLE_FAKE_STEP_MS": STEP_MS,
    "PETIOLE_MAX_ATTEMPTS": 1000,  # a worker that reconnects takes its messages anew
}


@pytest.fixture
def seed() -> int:
    seed = int(os.environ.get("PETIOLE_CHAOS_SEED", "1"))
    print(f"PETIOLE_CHAOS_SEED={seed}")
    return seed


def test_no_living_worker_is_taken_for_dead(tmp_path: Path, seed: int) -> None:
    with Site(tmp_path, options=("--port", free_port()), **SETTINGS) as site:
        trials = Trials(site, tmp_path, seed)
        trials.befall(MINUTES, trials.accident)
        for proxy in trials.proxies:
            proxy.close()


def test_no_living_worker_is_taken_for_dead_when_sentinels_change_the_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One worker at a time is slower to return, because it is stopped meanwhile."""
    monkeypatch.setenv("PETIOLE_SENTINEL_PASSWORD", SENTINEL_PASSWORD)
    settings.cache_clear()
    watched = Watched(tmp_path / "redis", "--min-replicas-to-write", "1", replicas=2)
    monkeypatch.setenv("PETIOLE_BROKER_URL", watched.url)
    settings.cache_clear()
    try:
        with Site(tmp_path, server=watched, **SETTINGS) as site:
            site.app.loader.override_backends = BACKENDS
            trials = SentinelTrials(site, seed)
            trials.befall(MINUTES, trials.accident)
    finally:
        monkeypatch.undo()
        settings.cache_clear()

"""No living worker is taken for dead, whatever befalls Redis, connections and engines.

Workers generate without end; none is ever killed. Redis restarts and fails over, with one worker slower to return;
subscriptions are cut, also while an engine stalls; processes fork without exec, and are stopped for less than the
lease. A worker that was taken for dead would say that it has lost its lease.

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
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import redis
from celery.result import AsyncResult

from tests.support.fake_engine import expected
from tests.support.proxy import Proxy
from tests.support.site import RedisServer, Site, Worker, eventually

MINUTES = float(os.environ.get("PETIOLE_CHAOS_MINUTES", "1"))
PREVIOUS = os.environ.get("PETIOLE_PREVIOUS", "")
WORKERS = 3
LEASE_S = 15
LENGTH = 400
STEP_MS = 20
FALSE_DEATH = ("a lease was lost", "the lease on")
FALSE_DEATH_PREVIOUS = ("the lease on",)
"""The version before also says that a lease was lost when it renews one that it has just given up."""

TASKS_AT_ONCE = 6


class Trials:
    def __init__(self, site: Site, master: RedisServer, folder: Path, seed: int) -> None:
        self.site, self.master, self.folder, self.random = site, master, folder, random.Random(seed)
        self.done: Counter[str] = Counter()
        self.tasks: dict[str, tuple[str, AsyncResult]] = {}
        self.proxies = [Proxy(folder / f"p{i}.sock", master.socket) for i in range(WORKERS + 1)]
        site.use(self.proxies[-1].url)
        self.workers = [self._start(proxy) for proxy in self.proxies[:WORKERS]]
        self.failovers = 0
        for worker in self.workers:
            worker.ready()

    def is_previous(self, proxy: Proxy) -> bool:
        """Whether its worker has the version before."""
        return bool(PREVIOUS) and proxy is self.proxies[0]

    def _start(self, proxy: Proxy) -> Worker:
        if not self.is_previous(proxy):
            return self.site.start_worker(PETIOLE_BROKER_URL=proxy.url)
        factory = "support.fake_engine:FakeEngine"  # its name in version 0.1
        return self.site.start_worker(
            repository=Path(PREVIOUS), PETIOLE_BROKER_URL=proxy.url, PETIOLE_ENGINE_FACTORY=factory
        )

    # ------------------------------------------------------------ work

    def feed(self) -> None:
        for name, (_, result) in list(self.tasks.items()):
            if result.state in ("SUCCESS", "FAILURE"):
                self.verify(name)
        while len(self.tasks) < TASKS_AT_ONCE:
            self.submit("steady")

    def submit(self, prompt: str) -> None:
        name = f"t{sum(self.done.values())}-{self.random.getrandbits(40):x}"
        submission = {"task_id": name}
        result = self.site.generate(prompt, max_tokens=LENGTH, seed=1, submission=submission)
        self.tasks[name] = (prompt, result)

    def verify(self, name: str) -> None:
        prompt, result = self.tasks.pop(name)
        assert self.site.get(result, 300.0)["token_ids"] == expected(prompt, 1, LENGTH), name

    # ------------------------------------------------------------ what befalls them

    def accident(self) -> None:
        accidents: list[tuple[Callable[[], None], int]] = [
            (self.cut_subscriptions, 4),
            (self.cut_subscriptions_while_engines_stall, 3),
            (self.fork_without_exec, 2),
            (self.stop_for_less_than_the_lease, 3),
            (self.restart_redis, 2),
            (self.fail_over, 1),
        ]
        chosen = self.random.choices([one for one, _ in accidents], [weight for _, weight in accidents])[0]
        chosen()
        self.done[chosen.__name__] += 1

    def cut_subscriptions(self) -> None:
        with redis.Redis(unix_socket_path=str(self.master.socket)) as client:
            for _ in range(self.random.randint(1, 10)):
                client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                time.sleep(self.random.random() / 5)

    def cut_subscriptions_while_engines_stall(self) -> None:
        for _ in range(WORKERS):
            self.submit(f"stall:{self.random.randint(1, 20)} {self.random.uniform(1, LEASE_S - 5):.1f}")
        for _ in range(4):
            self.cut_subscriptions()
            time.sleep(self.random.random())

    def fork_without_exec(self) -> None:
        for _ in range(WORKERS):
            self.submit(f"fork:{self.random.randint(1, 20)} {self.random.uniform(0, 5):.1f}")

    def stop_for_less_than_the_lease(self) -> None:
        worker = self.random.choice(self.workers)
        worker.signal(signal.SIGSTOP)
        time.sleep(self.random.uniform(0.1, LEASE_S - 7))
        worker.signal(signal.SIGCONT)

    def restart_redis(self) -> None:
        self.master.restart()

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

    # ------------------------------------------------------------ what must hold

    def nobody_was_taken_for_dead(self) -> None:
        for worker, proxy in zip(self.workers, self.proxies, strict=False):
            assert worker.alive(), worker.output[-3000:]
            telling = FALSE_DEATH_PREVIOUS if self.is_previous(proxy) else FALSE_DEATH
            said = [line for line in worker.output.splitlines() if any(words in line for words in telling)]
            assert not said, f"{worker.name}: {said}, after {dict(self.done)}"


def free_port() -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return str(free.getsockname()[1])


def test_no_living_worker_is_taken_for_dead(tmp_path: Path) -> None:
    seed = int(os.environ.get("PETIOLE_CHAOS_SEED", "1"))
    print(f"PETIOLE_CHAOS_SEED={seed}")
    settings = {
        "PETIOLE_VISIBILITY_TIMEOUT_S": LEASE_S,
        "PETIOLE_FAKE_STEP_MS": STEP_MS,
        "PETIOLE_MAX_ATTEMPTS": 1000,  # a worker that reconnects takes its messages anew
    }
    with Site(tmp_path, options=("--port", free_port()), **settings) as site:
        trials = Trials(site, site.server, tmp_path, seed)
        over_at = time.monotonic() + 60 * MINUTES
        while time.monotonic() < over_at:
            trials.feed()
            trials.accident()
            trials.nobody_was_taken_for_dead()
            time.sleep(2 * trials.random.random())
        for name in list(trials.tasks):
            trials.verify(name)
        trials.nobody_was_taken_for_dead()
        print(dict(trials.done))
        for proxy in trials.proxies:
            proxy.close()

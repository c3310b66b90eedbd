"""Twenty thousand rows, each once, whoever dies and whatever fills up: the output is that of an undisturbed run.

client    the process that runs the batch is killed; the same command goes on
worker    a worker is killed, with its runner if it has one; another one starts
runner    the process that runs a detached batch is killed; a worker starts the next one
redis     Redis is stopped and started
failover  a replica becomes the master: as planned, or because the master was killed
disk      whoever writes the journal may write no more: EFBIG, as ENOSPC an error of the system
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import WatchedSite
from tests.e2e.test_batch import check, journaled, rows_in, start
from tests.e2e.test_detached_batch import detached, ended, record, written
from tests.support.site import Site, Worker, eventually

COUNT, TOKENS = int(os.environ.get("PETIOLE_TRIAL_ROWS") or 20_000), 4
KINDS = max(6, COUNT // 1000)
"""How many disturbances there are."""
LONG_S = 1800.0
LEASE: dict[str, Any] = {"PETIOLE_VISIBILITY_TIMEOUT_S": 4, "PETIOLE_DRAIN_SECONDS": 0}

pytestmark = pytest.mark.slow


class Trial:
    """What may happen to rows that run. The disturbances are the methods `_KIND`."""

    def __init__(self, site: Site, folder: Path, *kinds: str) -> None:
        seed = int(os.environ.get("PETIOLE_TRIAL_SEED") or random.randrange(10**6))
        print(f"PETIOLE_TRIAL_SEED={seed}")
        self.site, self.folder, self.random = site, folder, random.Random(seed)
        folder.mkdir()
        self.rows = rows_in(folder, COUNT, TOKENS)
        self.kinds = [*kinds, *self.random.choices(kinds, k=KINDS - len(kinds))]
        self.random.shuffle(self.kinds)
        for _ in range(2):
            self._start_worker()
        for worker in site.workers:
            worker.ready()

    def _start_worker(self) -> Worker:
        return self.site.start_worker(**LEASE, PETIOLE_FAKE_STEP_MS=5)

    def disturb(self, done: Callable[[], int], over: Callable[[], bool]) -> None:
        """`done`: how many rows have ended; `over`: the batch is."""
        for kind in self.kinds:
            goal = done() + self.random.randrange(1, COUNT // KINDS)
            eventually(lambda goal=goal: done() >= goal or over(), f"{goal} rows have ended", LONG_S)
            if over():
                return
            print(kind, done(), flush=True)
            getattr(self, f"_{kind}")()

    def _worker(self) -> None:
        self.random.choice([worker for worker in self.site.workers if worker.alive()]).kill()
        self._start_worker()

    def _redis(self) -> None:
        self.site.server.restart()

    def _failover(self) -> None:
        watched = self.site.server
        eventually(watched.in_step, "replicated")
        old = watched.master()
        if planned := self.random.random() < 0.5:
            watched.fail_over()
        else:
            old.kill()
        eventually(
            lambda: watched.master() is not old and watched.role(watched.master()) == "master", "it is over"
        )
        if not planned:
            watched.bring_back(old)

    def check(self) -> None:
        check(self.folder, COUNT, TOKENS)
        eventually(lambda: self.site.unfinished() == 0, "no message is left")


class InItsClient(Trial):
    def __init__(self, site: Site, folder: Path, *kinds: str) -> None:
        super().__init__(site, folder, "client", "worker", "disk", *kinds)
        self.ran = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return start(self.site, self.rows, "-o", self.folder / "out.jsonl")

    def _client(self) -> None:
        self.ran.kill()
        self.ran.communicate()
        self.ran = self._start()

    def _disk(self) -> None:
        journal = self.folder / "out.jsonl.journal"
        eventually(lambda: journal.exists() or self.ran.poll() is not None, "it is open")
        full(self.ran.pid, journal.stat().st_size)
        _, said = self.ran.communicate(timeout=LONG_S)
        assert self.ran.returncode == 0 or "File too large" in said, said
        self.ran = self._start()

    def run(self) -> None:
        self.disturb(lambda: journaled(self.folder), lambda: self.ran.poll() is not None)
        _, said = self.ran.communicate(timeout=LONG_S)
        assert self.ran.returncode == 0, said
        self.check()


class Detached(Trial):
    def __init__(self, site: Site, folder: Path, *kinds: str) -> None:
        super().__init__(site, folder, "worker", "runner", "disk", *kinds)
        self.name = detached(site, folder)["id"]

    def _runner(self) -> None:
        for process in runners(self.name):
            os.kill(process, signal.SIGKILL)

    def _disk(self) -> None:
        """The next page is refused; the next runner may write."""
        for process in runners(self.name):
            full(process, 0)

    def run(self) -> None:
        over = ended(self.site, self.name)
        self.disturb(lambda: written(self.folder), lambda: (self.folder / "out.jsonl").exists())
        eventually(lambda: gone(over), "the batch has ended", LONG_S)
        found = record(self.site, self.name)
        assert found["status"] == "completed", found
        self.check()
        eventually(lambda: not runners(self.name), "no runner is left")


def runners(name: str) -> list[int]:
    """The processes that run this batch."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if {b"run", name.encode(), b"--leased"} <= {*command}:
                found.append(int(folder.name))
    return found


def full(process: int, size: int) -> None:
    """From now on this process can make no file longer."""
    with suppress(ProcessLookupError):
        resource.prlimit(process, resource.RLIMIT_FSIZE, (size, size))


def gone(over: Callable[[], bool]) -> bool:
    with suppress(Exception):  # a failover
        return over()
    return False


@pytest.mark.parametrize("kind", [InItsClient, Detached])
def test_one_redis(own_site: Site, tmp_path: Path, kind: Any) -> None:
    kind(own_site, tmp_path / "batch", "redis").run()


@pytest.mark.parametrize("kind", [InItsClient, Detached])
def test_a_redis_that_fails_over(watched_site: WatchedSite, tmp_path: Path, kind: Any) -> None:
    kind(watched_site(), tmp_path / "batch", "failover").run()

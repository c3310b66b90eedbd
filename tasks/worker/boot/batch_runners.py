"""A worker is a host of batches: it claims open ones, and starts a runner for each, a process beside it.

    claimed ──► the process starts; its host renews the lease ──► it says "begun", and renews the lease itself

A runner stops when its host has gone, and ends when it no longer has its lease (`durable.leash`). So it outlives
neither its worker nor Redis, wherever it is. Its host sees how it ended, and which row it handled then."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import redis

from petiole.tasks.errors import PetioleError
from petiole.tasks.servers import connections
from petiole.tasks.submission.batches.durable import claims, current_row, records
from petiole.tasks.submission.batches.durable.current_row import CurrentRow
from petiole.tasks.submission.batches.durable.records import Lease
from petiole.tasks.worker.periodic import Periodic

logger = logging.getLogger(__name__)

LOOK_S = 2.0
MOST_RUNNERS = 4
"""The most runners of one worker. Other batches wait for a host, or for the end of one of these."""
RENEWALS_A_LEASE = 4
BEGIN_WITHIN_S = 120.0


class _Runner:
    """A process that runs a batch, or will."""

    def __init__(self, lease: Lease) -> None:
        self.lease, self._begun, self.stopping = lease, False, False
        self._began_at = time.monotonic()
        shared = current_row.shared()
        self._hand = CurrentRow(shared)
        command = [sys.executable, "-m", "petiole.tasks.commands.cli", "batch", "run", lease.name, "--leased"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(shared,)
            )
        finally:
            os.close(shared)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        of_lease = {"token": lease.token, "generation": lease.generation, "ttl_s": lease.ttl_s}
        told = {**of_lease, "host": os.getpid(), "hand": shared}
        with suppress(BrokenPipeError):  # it has died: that is seen soon
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()  # and it stays open

    def stop(self) -> None:
        """Let it end soon; its batch goes on when it is its turn."""
        self._process.terminate()
        self.stopping = True

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def late(self) -> bool:
        """Whether it should have begun."""
        return not self.begun and time.monotonic() > self._began_at + BEGIN_WITHIN_S

    def kill(self) -> None:
        self._process.kill()

    def tell_death(self) -> None:
        """Notes that the runner's process has ended, unless it ended by itself."""
        if (status := self._process.returncode) == 0:
            return
        row = self._hand.row
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        why = f"a runner has ended {how}" + ("" if row is None else f", at row {row}")
        records.tell_death(self.lease.name, why, row)
        logger.warning("batch %s: %s", self.lease.name, why)

    @property
    def begun(self) -> bool:
        """Whether it renews the lease itself."""
        if not self._begun:
            assert self._process.stdout is not None
            with suppress(BlockingIOError):
                self._begun = bool(os.read(self._process.stdout.fileno(), 1))
        return self._begun

    def close(self) -> None:
        """Closes the pipes of a process that has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class BatchHost:
    def __init__(self, worker: str, ttl_s: float) -> None:
        self._worker, self._ttl_s = worker, ttl_s
        self._runners: list[_Runner] = []
        self._figures: dict[str, int] = {}
        self._thread = Periodic("petiole-batches", self._look)

    def start(self) -> None:
        self._thread.start()

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`."""
        return self._figures

    def _count(self) -> None:
        hosted = records.several([one.lease.name for one in self._runners])
        self._figures = {
            "open_batches": len(records.open_ids()),
            "batch_runners": len(hosted),
            "batch_rows_left": sum(one.rows_left for one in hosted),
            "batch_rows_failed": sum(one.number("failed") for one in hosted),
        }

    def _look(self) -> float:
        try:
            for gone in [one for one in self._runners if not one.alive]:
                gone.tell_death()
                gone.close()
                self._runners.remove(gone)
            starting = [one for one in self._runners if not one.begun]
            for one in starting:
                if one.late:
                    one.kill()
            for one in starting:
                one.lease.hold()
            if not starting and len(self._runners) < MOST_RUNNERS:
                self._start()
            elif not starting and not any(one.stopping for one in self._runners):
                self._make_room()
            self._count()
        except (*connections.LOST, redis.RedisError, PetioleError):
            logger.debug("open batches cannot be looked for", exc_info=True)
        except Exception:  # the thread must not end: nobody else here hosts batches
            logger.warning("open batches cannot be looked for", exc_info=True)
        begins = any(not one.begun for one in self._runners)
        return min(LOOK_S, self._ttl_s / RENEWALS_A_LEASE) if begins else LOOK_S

    def _make_room(self) -> None:
        runners = {one.lease.name: one for one in self._runners if one.begun}  # in the order in which they began
        if (name := claims.makes_room(self._worker, runners)) is not None:
            logger.info("batch %s: makes room for another tenant's", name)
            runners[name].stop()

    def _start(self) -> None:
        """The next runner. One at a time: several would start more slowly than one by one."""
        for lease in claims.claimed(self._worker, self._ttl_s):
            logger.info("batch %s: a runner starts", lease.name)
            self._runners.append(_Runner(lease))
            return

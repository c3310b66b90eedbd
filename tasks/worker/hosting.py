"""A worker is a host of batches: it claims open ones, and starts a runner for each, a process beside it.

A runner stops when its standard input ends. So it does not outlive its worker, however that ends."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import redis

from petiole.tasks.errors import PetioleError
from petiole.tasks.servers import connections
from petiole.tasks.submission.batches.durable import hosting
from petiole.tasks.submission.batches.durable.records import Lease
from petiole.tasks.worker.periodic import Periodic

logger = logging.getLogger(__name__)

LOOK_S = 2.0
MOST_RUNNERS = 4
"""Of one worker. Other batches wait for a host, or for the end of one of these."""


class BatchHost:
    def __init__(self, worker: str, ttl_s: float) -> None:
        self._worker, self._ttl_s = worker, ttl_s
        self._runners: list[subprocess.Popen[bytes]] = []
        self._thread = Periodic("petiole-batches", self._look)

    def start(self) -> None:
        self._thread.start()

    def _look(self) -> float:
        self._runners = [one for one in self._runners if one.poll() is None]
        if len(self._runners) < MOST_RUNNERS:
            try:
                for lease in hosting.claimed(self._worker, self._ttl_s):
                    self._start(lease)
                    if len(self._runners) == MOST_RUNNERS:
                        break
            except (*connections.LOST, redis.RedisError, PetioleError):
                logger.debug("open batches cannot be looked for", exc_info=True)
        return LOOK_S

    def _start(self, lease: Lease) -> None:
        logger.info("batch %s: a runner starts", lease.name)
        command = [sys.executable, "-m", "petiole.tasks.commands.cli", "batch", "run", lease.name, "--leased"]
        runner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        assert runner.stdin is not None
        told = {"token": lease.token, "generation": lease.generation, "ttl_s": lease.ttl_s}
        runner.stdin.write(json.dumps(told).encode() + b"\n")
        runner.stdin.flush()  # and it stays open
        self._runners.append(runner)

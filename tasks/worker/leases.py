"""Lease renewal: a live worker keeps its messages, and those of a dead one return to their queues within seconds.

Leases are renewed on a separate thread and connection, so that they do not expire while the event loop is busy or
the worker is draining. They are renewed only while the engine makes progress: if the engine hangs, other workers
get its tasks. Every worker also sweeps: it gives back the messages of owners whose lease has expired.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import redis

from tasks.connections import LOST
from tasks.worker.ledger import Ledger, Names, restore

logger = logging.getLogger(__name__)

SWEEP_S = 2.0
"""Longest interval between sweeps. With short leases it is their renewal interval."""

CONNECT_S = 0.5
"""Pause between two attempts to connect."""


class LeaseKeeper:
    """Renews the leases of `ledgers()` and sweeps those of dead owners.

    `connect` is called on the keeper's thread until it returns a client; `heartbeat_age_s` is that of the engine.
    """

    def __init__(
        self,
        *,
        ledgers: Callable[[], list[Ledger]],
        connect: Callable[[], redis.Redis | None],
        heartbeat_age_s: Callable[[], float],
        visibility_timeout_s: float,
    ) -> None:
        self._ledgers, self._connect, self._heartbeat_age_s = ledgers, connect, heartbeat_age_s
        self.visibility_timeout_s = visibility_timeout_s
        self.renew_s = visibility_timeout_s / 5
        self.sweep_s = min(SWEEP_S, self.renew_s)
        self.renewed_at = time.monotonic()
        self._stopped = threading.Event()
        self._hanging = self._failing = False
        self._client: redis.Redis | None = None
        self._thread = threading.Thread(target=self._run, name="petiole-leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(2.0)

    @property
    def lease_age_s(self) -> float:
        return time.monotonic() - self.renewed_at

    def _run(self) -> None:
        renew_at = sweep_at = time.monotonic()
        while not self._stopped.wait(min(renew_at, sweep_at) - time.monotonic()):
            now = time.monotonic()
            try:
                if self._client is None:
                    self._client = self._connect()
                if self._client is not None:
                    if now >= renew_at:
                        self._renew(self._client)
                        renew_at = now + self.renew_s
                    if now >= sweep_at:
                        self._sweep(self._client)
                        sweep_at = now + self.sweep_s
                    self._log_changes(None)
            except Exception as error:  # of any kind: without this thread the worker would lose all its tasks
                self._log_changes(error)
                self._client = None
            if self._client is None:
                renew_at = sweep_at = now + CONNECT_S

    def _log_changes(self, error: Exception | None) -> None:
        """Log the first of consecutive failures, and the recovery."""
        if error is not None and not self._failing:
            if isinstance(error, (*LOST, redis.RedisError)):
                logger.warning("leases: Redis does not renew them: %s", error)
            else:
                logger.error("leases: they cannot be renewed", exc_info=error)
        elif error is None and self._failing:
            logger.warning("leases: Redis renews them again")
        self._failing = error is not None

    def _renew(self, client: redis.Redis) -> None:
        hanging = self._heartbeat_age_s() > self.visibility_timeout_s / 2
        if hanging != self._hanging:
            self._hanging = hanging
            if hanging:
                logger.error("the engine hangs: its tasks go to others")
            else:
                logger.warning("the engine goes on")
        if hanging:
            return
        for ledger in self._ledgers():
            if not ledger.renew(client):
                logger.warning("a lease was lost: it was not renewed in time")
        self.renewed_at = time.monotonic()

    def _sweep(self, client: redis.Redis) -> None:
        for names in {ledger.names for ledger in self._ledgers()}:
            restored = restore(client, Names(*names))
            if restored:
                logger.warning("gave back %d messages of dead workers", restored)

"""Lease renewal: a live worker keeps its messages, and those of a dead one return to their queues within seconds.

Leases are renewed on a separate thread and connection, so that they do not expire while the event loop is busy or
the worker is draining. They are renewed only while the engine makes progress: if the engine hangs, other workers
get its tasks. Every worker also sweeps: it gives back the messages of owners whose lease has expired. Between two
sweeps it checks which owners are present. If an owner is missing, it sweeps at once (see `presence`)."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import redis

from petiole.tasks.servers.connections import LOST
from petiole.tasks.wire.keys import LedgerKeys
from petiole.tasks.worker.broker.ledger import Ledger, is_second, sweep
from petiole.tasks.worker.broker.liveness import MissingOwners
from petiole.tasks.worker.outage import Outage
from petiole.tasks.worker.periodic import Periodic
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

RENEW_S = SWEEP_S = 1.0
LOOK_S = 0.5
"""The longest intervals between renewals, sweeps and looks. With short leases the intervals are a fifth of a
lease."""

SOON_S = 0.1
"""Pause before a keeper that starts looks again whether the worker is connected to the broker."""

CONNECT_S = 0.5
"""Pause between two attempts to connect."""

NONE_ABSENT: Mapping[LedgerKeys, Sequence[str]] = {}


class LeaseKeeper:
    """Renews the leases of `ledgers()`, and gives back the messages of dead owners.

    `connect` is called on the keeper's thread until it returns a client. `heartbeat_age_s`: how long ago the
    engine made progress."""

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
        self.renew_s, self.sweep_s, self.look_s = (
            min(most_s, visibility_timeout_s / 5) for most_s in (RENEW_S, SWEEP_S, LOOK_S)
        )
        self._absences: defaultdict[LedgerKeys, MissingOwners] = defaultdict(MissingOwners)
        self.renewed_at = time.monotonic()
        self._renew_at = self._sweep_at = self._look_at = 0.0
        failing, recovered = "leases are not renewed: %s", "leases are renewed again"
        self._outage = Outage(logger, failing, recovered, level=logging.WARNING)
        self._hang = Outage(logger, "the engine hangs: its tasks go to others", "the engine goes on")
        self._may_look = self._starting = True
        self._client: redis.Redis | None = None
        self._thread = Periodic("petiole-leases", self._turn)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    @property
    def lease_age_s(self) -> float:
        return time.monotonic() - self.renewed_at

    def _turn(self) -> float:
        """Do what is due. Returns the seconds until something is."""
        now = time.monotonic()
        try:
            if self._client is None:
                self._absences.clear()  # looks on another connection do not count
                self._client = self._connect()
            if self._client is not None:
                if now >= self._renew_at:
                    self._renew(self._client)
                    self._renew_at = now + self.renew_s
                if now >= self._sweep_at:
                    self._sweep(self._client)
                    self._sweep_at = now + (SOON_S if self._starting else self.sweep_s)
                if now >= self._look_at:
                    self._look(self._client)
                    self._look_at = (
                        time.monotonic() + self.look_s
                    )  # after a slow answer, do not look twice in a row
                self._outage.ended()
        except Exception as error:  # any exception: without this thread the worker would lose all its tasks
            expected = isinstance(error, (*LOST, redis.RedisError))
            self._outage.began(error, unexpected=None if expected else error)
            self._client, self._starting = None, False
        if self._client is None:
            self._renew_at = self._sweep_at = self._look_at = now + (SOON_S if self._starting else CONNECT_S)
        return max(0.0, min(self._renew_at, self._sweep_at, self._look_at) - time.monotonic())

    def _renew(self, client: redis.Redis) -> None:
        hanging = self._heartbeat_age_s() > self.visibility_timeout_s / 2
        if hanging:
            self._hang.began()
        else:
            self._hang.ended()
        for ledger in self._ledgers():
            if not ledger.renew(client, hanging=hanging):
                logger.warning("a lease was lost: it was not renewed in time")
        if not hanging:
            self.renewed_at = time.monotonic()

    def _sweep(self, client: redis.Redis, absent: Mapping[LedgerKeys, Sequence[str]] = NONE_ABSENT) -> None:
        for names in {ledger.names for ledger in self._ledgers()}:
            swept = sweep(client, names, absent.get(names, ()))
            self._absences[names].know(swept.alive)
            if self._starting:
                self._absences[names].trust(present_before(client, names, swept.alive))
                self._look_at = 0.0
            incidents.count("deaths", sum(not is_second(owner) for owner in swept.dead))
            if swept.restored:
                plural = "s" * (swept.restored != 1)
                logger.warning("gave back %d message%s of dead workers", swept.restored, plural)
        self._starting = self._starting and not self._absences

    def _look(self, client: redis.Redis) -> None:
        """See which owners are present, and sweep at once if one is missing."""
        absent: dict[LedgerKeys, list[str]] = {}
        for names, absences in self._absences.items():
            if absences.owners and self._may_look:
                channels = [names.present + owner for owner in absences.owners]
                try:
                    counts = dict(client.pubsub_numsub(*channels))
                except redis.exceptions.NoPermissionError as error:
                    logger.warning("deaths of other workers will be noticed by their leases alone: %s", error)
                    self._may_look = False
                    return
                found = {owner: counts[names.present.encode() + owner.encode()] for owner in absences.owners}
                absent[names] = absences.look(found)
        if any(absent.values()):
            self._sweep(client, absent)


def present_before(client: redis.Redis, names: LedgerKeys, owners: Sequence[str]) -> list[str]:
    """The owners that were present on this run of the server, before this worker looked."""
    if not owners:
        return []
    try:
        run = str(client.info("server").get("run_id", ""))
    except redis.ResponseError as error:
        logger.info("a death before this worker's start will be noticed by the lease alone: %s", error)
        return []
    noted = client.mget([names.server + owner for owner in owners])
    return [owner for owner, on in zip(owners, noted, strict=True) if on == run.encode()]

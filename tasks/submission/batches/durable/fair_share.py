"""With whom a batch shares the workers of its queue: each tenant has an equal part of them, and its batches equal
parts of that. A batch without rows on their way takes no part.

Whoever runs a batch, a runner or a client's process, notes it under a key that expires soon, which every producer
may read."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import redis

from petiole.tasks.servers import connections
from petiole.tasks.submission.batches.in_flight import ALONE, FairShare, Sharing
from petiole.tasks.submission.batches.progress import Progress
from petiole.tasks.wire.keys import RUNNING_BATCHES_KEY, running_batch_key

FORGOTTEN_S = 10
"""Who has said nothing for so long runs no batch any more. It says something every two seconds."""


class RunningBatch(NamedTuple):
    """A batch with rows on their way. `queue`: where these go."""

    id: str
    tenant: str
    queue: str
    rows_per_s: float = 0.0


def part(mine: RunningBatch, running: Iterable[RunningBatch]) -> FairShare:
    others = [one for one in running if one.id != mine.id and one.queue == mine.queue]
    tenants = {mine.tenant, *(one.tenant for one in others)}
    of_mine = 1 + sum(one.tenant == mine.tenant for one in others)
    return FairShare(1 / (len(tenants) * of_mine), sum(one.rows_per_s for one in others))


def running() -> Iterator[RunningBatch]:
    """What cannot be read, which every producer may write, is none."""
    [raw] = connections.perform([("SMEMBERS", RUNNING_BATCHES_KEY)])
    names = sorted(name.decode(errors="replace") for name in raw)
    said = connections.perform([("GET", running_batch_key(name)) for name in names]) if names else []
    for name, one in zip(names, said, strict=True):
        if one is None:
            connections.perform([("SREM", RUNNING_BATCHES_KEY, name)])
        elif (found := _read(name, one)) is not None:
            yield found


def _read(name: str, said: bytes) -> RunningBatch | None:
    try:
        known = json.loads(said)
        tenant, queue, rows_per_s = known["tenant"], known["queue"], float(known["rows_per_s"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    right = isinstance(tenant, str) and isinstance(queue, str) and 0 <= rows_per_s < math.inf
    return RunningBatch(name, tenant, queue, rows_per_s) if right else None


class SharingWithOthers(Sharing):
    """The share of the batch `name`. Without a name it is a batch that a client's process runs."""

    def __init__(self, name: str = "", tenant: str = "") -> None:
        self._name, self._tenant = name or f"process_{os.urandom(8).hex()}", tenant
        self._told, self._allowed = False, True

    def look(self, queue: str, progress: Progress) -> FairShare:
        if not self._allowed:
            return ALONE
        mine = RunningBatch(self._name, self._tenant, queue, round(progress.rows_per_s, 2))
        try:
            if progress.on_their_way:
                _tell(mine)
                self._told = True
            return part(mine, running())
        except redis.exceptions.NoPermissionError:  # a user with other rights than the documented ones
            self._allowed = False
            return ALONE

    def leave(self) -> None:
        """Else the next batch of a script would share with those before it."""
        if not self._told:
            return
        with contextlib.suppress(redis.exceptions.NoPermissionError):
            connections.perform(
                [("DEL", running_batch_key(self._name)), ("SREM", RUNNING_BATCHES_KEY, self._name)]
            )


def _tell(mine: RunningBatch) -> None:
    said = json.dumps({"tenant": mine.tenant, "queue": mine.queue, "rows_per_s": mine.rows_per_s})
    connections.perform(
        [
            ("SET", running_batch_key(mine.id), said, "EX", FORGOTTEN_S),
            ("SADD", RUNNING_BATCHES_KEY, mine.id),
            ("EXPIRE", RUNNING_BATCHES_KEY, 10 * FORGOTTEN_S),
        ]
    )

"""With whom a batch shares the workers of its queue: each tenant has an equal part of them, and its batches equal
parts of that. A batch without rows on their way takes no part.

A runner notes in its batch's record what is on its way. A process that runs a batch of its own, which has no
record, notes it under a key that expires soon."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import redis

from petiole.tasks.keys import RUNNING_BATCHES_KEY, running_batch_key
from petiole.tasks.servers import connections
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.durable import records
from petiole.tasks.submission.batches.flight import ALONE, Sharing

FORGOTTEN_S = 10
"""A process that has said nothing for so long runs no batch any more. It says something every two seconds."""


class Running(NamedTuple):
    """A batch with rows on their way. `queue`: where these go; None: a runner of an earlier version says not."""

    id: str
    tenant: str
    queue: str | None
    rows_per_s: float = 0.0


def sharing(name: str, tenant: str, queue: str) -> Sharing:
    """Of this batch, whose rows go to this queue. Reads Redis."""
    return part(Running(name, tenant, queue), [*_with_runners(), *_of_processes()])


def part(mine: Running, running: Iterable[Running]) -> Sharing:
    others = [one for one in running if one.id != mine.id and one.queue in (None, mine.queue)]
    tenants = {mine.tenant, *(one.tenant for one in others)}
    of_mine = 1 + sum(one.tenant == mine.tenant for one in others)
    return Sharing(1 / (len(tenants) * of_mine), sum(one.rows_per_s for one in others))


def _with_runners() -> Iterator[Running]:
    for one in records.several(records.open_ids()):
        if one.has_runner and one.number("on_their_way"):
            rate = float(one.facts.get("rows_per_s") or 0)
            yield Running(one.id, one.spec.tenant, one.facts.get("queue"), rate)


def _of_processes() -> Iterator[Running]:
    [raw] = connections.perform([("SMEMBERS", RUNNING_BATCHES_KEY)])
    names = sorted(name.decode() for name in raw)
    said = connections.perform([("GET", running_batch_key(name)) for name in names]) if names else []
    for name, one in zip(names, said, strict=True):
        if one is None:
            connections.perform([("SREM", RUNNING_BATCHES_KEY, name)])
        else:
            known = json.loads(one)
            yield Running(name, "", known["queue"], known["rows_per_s"])


def of_a_process(batch: Batch) -> tuple[Callable[[], Sharing], Callable[[], None]]:
    """With whom a batch without a record shares, whenever that is called; others hear of it then. And what to call
    at its end: else the next batch of a script would share with those before it."""
    name, told, allowed = f"process_{os.urandom(8).hex()}", False, True

    def look() -> Sharing:
        nonlocal told, allowed
        if not allowed:
            return ALONE
        try:
            told = _tell(name, batch) or told
            return sharing(name, "", batch.queue)
        except redis.exceptions.NoPermissionError:  # a producer need not be allowed to see batches
            allowed = False
            return ALONE

    def leave() -> None:
        if not told:
            return
        with contextlib.suppress(redis.exceptions.NoPermissionError):
            connections.perform([("DEL", running_batch_key(name)), ("SREM", RUNNING_BATCHES_KEY, name)])

    return look, leave


def _tell(name: str, batch: Batch) -> bool:
    shown = batch.progress
    if not shown.on_their_way:
        return False
    said = json.dumps({"queue": batch.queue, "rows_per_s": round(shown.rows_per_s, 2)})
    connections.perform(
        [
            ("SET", running_batch_key(name), said, "EX", FORGOTTEN_S),
            ("SADD", RUNNING_BATCHES_KEY, name),
            ("EXPIRE", RUNNING_BATCHES_KEY, 10 * FORGOTTEN_S),
        ]
    )
    return True

"""The ledger, read: what each tenant has used, by day, and each task's entry. See `tasks.record.ledger`."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import redis

from petiole.tasks.keys import usage_keys
from petiole.tasks.record.ledger import SECONDS_A_DAY, SUMS
from petiole.tasks.servers import connections


class TenantUsage(NamedTuple):
    """What a tenant has used of a model on a day. `sums`: by what is in `SUMS`. `ends`: tasks, by how they
    ended."""

    day: str
    tenant: str
    model: str
    sums: Mapping[str, int]
    ends: Mapping[str, int]


def days(number: int, at: float | None = None) -> list[str]:
    """The last days, today's first."""
    now = time.time() if at is None else at
    return [time.strftime("%Y-%m-%d", time.gmtime(now - ago * SECONDS_A_DAY)) for ago in range(number)]


def command(day: str) -> tuple[str, str]:
    """The command whose reply `read` takes."""
    return "HGETALL", usage_keys(day)[1]


def read(day: str, reply: Any, tenant: str | None = None) -> list[TenantUsage]:
    """`tenant`: None: all. What cannot be read is left out."""
    sums: dict[bytes, Counter[bytes]] = {}
    # The reply is a list where the client has not made a dictionary of it.
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    for name, value in pairs:
        whose, _, what = name.rpartition(b"] ")
        with contextlib.suppress(ValueError):
            sums.setdefault(whose, Counter())[what] += int(value)
    found = []
    for whose, counted in sums.items():
        try:
            owner, model = map(str, json.loads(whose + b"]"))
        except (ValueError, TypeError, RecursionError):
            continue
        if tenant is None or owner == tenant:
            numbers = {what: counted[what.encode()] for what in SUMS}
            ends = {what[4:].decode(errors="replace"): n for what, n in counted.items() if what[:4] == b"end "}
            found.append(TenantUsage(day, owner, model, numbers, ends))
    return sorted(found, key=lambda one: (one.tenant, one.model))


def usage(number: int = 1, tenant: str | None = None) -> list[TenantUsage]:
    """The sums of the last days, the newest first."""
    of = days(number)
    replies = connections.perform([command(day) for day in of])
    return [one for day, reply in zip(of, replies, strict=True) for one in read(day, reply, tenant)]


def entries(number: int = 1, tenant: str | None = None, client: redis.Redis | None = None) -> Iterator[bytes]:
    """Each task's entry of the last days, as JSON, the oldest day first."""
    client = client or connections.streams()
    for day in reversed(days(number)):
        for _, raw in client.hscan_iter(usage_keys(day)[0], count=1000):
            if tenant is None or _tenant_of(raw) == tenant:
                yield bytes(raw)


def _tenant_of(raw: bytes) -> object:
    """The tenant in a task's entry; None: it cannot be read."""
    try:
        return json.loads(raw)["tenant"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None

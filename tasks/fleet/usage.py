"""The ledger, read: what each tenant has used, by day, and each task's entry. See `tasks.record.ledger`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import redis

from petiole.tasks.keys import usage_keys
from petiole.tasks.record.ledger import SECONDS_A_DAY, SUMS
from petiole.tasks.servers import connections
from petiole.tasks.servers.connections import Commands


class Usage(NamedTuple):
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


def commands(of: list[str]) -> Commands:
    """The commands whose replies `read` takes."""
    return [("HGETALL", usage_keys(day)[1]) for day in of]


def read(of: list[str], replies: list[Any], tenant: str | None = None) -> list[Usage]:
    """`tenant`: None: all. What cannot be read is left out."""
    found: list[Usage] = []
    for day, reply in zip(of, replies, strict=True):
        sums: dict[tuple[str, str], Counter[str]] = {}
        for name, value in _fields(reply):
            whose, _, what = name.rpartition("] ")
            try:
                owner, model = json.loads(f"{whose}]")
                sums.setdefault((str(owner), str(model)), Counter())[what] += int(value)
            except (ValueError, TypeError):
                continue
        for (owner, model), counted in sorted(sums.items()):
            if tenant is None or owner == tenant:
                ends = {what[4:]: number for what, number in counted.items() if what.startswith("end ")}
                found.append(Usage(day, owner, model, {what: counted[what] for what in SUMS}, ends))
    return found


def _fields(reply: Any) -> Iterator[tuple[str, str]]:
    """Of a reply to HGETALL, which is a list where the client has not made a dictionary of it."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    for name, value in pairs:
        yield name.decode(errors="replace"), value.decode(errors="replace")


def usage(number: int = 1, tenant: str | None = None) -> list[Usage]:
    """The sums of the last days, the newest first."""
    of = days(number)
    return read(of, connections.perform(commands(of)), tenant)


def entries(number: int = 1, tenant: str | None = None, client: redis.Redis | None = None) -> Iterator[bytes]:
    """Each task's entry of the last days, as JSON, the oldest day first."""
    client = client or connections.streams()
    for day in reversed(days(number)):
        for _, raw in client.hscan_iter(usage_keys(day)[0], count=1000):
            if tenant is None or json.loads(raw).get("tenant") == tenant:
                yield bytes(raw)

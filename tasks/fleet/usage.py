"""The ledger, read: what each tenant has used, by day, and each task's entry. See `tasks.record.ledger`. And what
is used of budgets: gateways, who know the budgets, tell it."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import redis
from pydantic import Field, TypeAdapter, ValidationError

from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import budgets_key, usage_keys
from petiole.tasks.wire.record.ledger import SECONDS_A_DAY, SUMS


class TenantUsage(NamedTuple):
    """What a tenant has used of a model on a day. `sums`: by what is in `SUMS`. `ends`: tasks, by how they
    ended."""

    day: str
    tenant: str
    model: str
    sums: Mapping[str, int]
    ends: Mapping[str, int]


class BudgetShare(NamedTuple):
    """`budget`: the limit's name, such as `day_tokens`. `used`, `most`: tokens. `at`: when a gateway told it, in
    seconds of Redis's clock."""

    tenant: str
    budget: str
    used: Annotated[int, Field(ge=0)]
    most: Annotated[int, Field(gt=0)]
    at: int = 0


_SHARES = TypeAdapter(list[BudgetShare])
SHARES_KEPT_S = 30
"""How long it is known what gateways have told."""

# KEYS[1] what was told; ARGV: what is told now, seconds for which it is known
_TELL = """
local now = tonumber(redis.call('TIME')[1])
local read, before = pcall(cjson.decode, redis.pcall('GET', KEYS[1]))
local told, again = cjson.decode(ARGV[1]), {}
for _, one in ipairs(told) do
  one[5] = now
  again[cjson.encode({one[1], one[2]})] = true
end
for _, one in ipairs(read and type(before) == 'table' and before or {}) do
  if type(one) == 'table' and type(one[5]) == 'number' and one[5] > now - ARGV[2]
      and not again[cjson.encode({one[1], one[2]})] then
    table.insert(told, one)
  end
end
redis.call('SET', KEYS[1], cjson.encode(told), 'EX', ARGV[2])
"""


def telling(shares: Iterable[BudgetShare]) -> tuple[str, ...]:
    """The command of a gateway that tells. What others with other keys have told stays."""
    return "EVAL", _TELL, "1", budgets_key(), json.dumps([one[:4] for one in shares]), str(SHARES_KEPT_S)


def budgets() -> list[BudgetShare]:
    """What gateways have just told. Empty if none runs, and if it cannot be read."""
    with contextlib.suppress(redis.RedisError, ValidationError):
        told: Any = connections.streams().get(budgets_key())
        return _SHARES.validate_json(told or "[]")
    return []


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


def of_the_busiest(found: Sequence[TenantUsage], most: int) -> list[TenantUsage]:
    """Those of the `most` tenants with the most tokens."""
    tokens = Counter[str]()
    for one in found:
        tokens[one.tenant] += one.sums["prompt"] + one.sums["output"]
    kept = {tenant for tenant, _ in tokens.most_common(most)}
    return [one for one in found if one.tenant in kept]


def of_all(found: Iterable[TenantUsage]) -> list[TenantUsage]:
    """The sums of all tenants, by day and model. `tenant` is empty."""
    whole = defaultdict[tuple[str, str], tuple[Counter[str], Counter[str]]](lambda: (Counter(), Counter()))
    for one in found:
        sums, ends = whole[one.day, one.model]
        sums.update(one.sums)
        ends.update(one.ends)
    return [TenantUsage(day, "", model, *summed) for (day, model), summed in whole.items()]


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

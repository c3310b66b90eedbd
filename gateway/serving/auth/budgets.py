"""A tenant's budgets: tokens, in and out, in a day and in a month of UTC.

What was used is the ledger's sums, which workers write with the end of each task. So all gateways and all ways to
submit share it. A task that has begun is finished: a budget is exceeded by what runs when it is used up."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from petiole.gateway.core.caller import Caller, tell
from petiole.gateway.core.failures import Failure
from petiole.gateway.serving.retry import patiently
from petiole.tasks.fleet import usage
from petiole.tasks.servers import connections

KNOWN_FOR_S = 1.0
"""For so long a gateway does not ask Redis again what was used on a day."""
LATE = timedelta(hours=1)
"""A day that has ended this long ago has its last entries."""
LATELY = timedelta(minutes=1)
"""For so long after its end a period is looked at: its last entries come late."""
MOST_DAYS = 62


class Period(NamedTuple):
    """The period of a budget. `budget`: the limit's name. `name`: such as 2026-11-29, or 2026-11. `days`: today and
    the days before it. `ends`: when the budget begins anew."""

    budget: str
    name: str
    days: Sequence[str]
    ends: datetime


def periods(now: datetime) -> tuple[Period, Period]:
    """The month and the day of this time, which is one of UTC."""
    days = usage.days(now.day, now.timestamp())
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    next_month = (midnight.replace(day=1) + timedelta(days=32)).replace(day=1)
    return (
        Period("month_tokens", f"{now:%Y-%m}", days, next_month),
        Period("day_tokens", days[0], days[:1], midnight + timedelta(days=1)),
    )


def recent_periods(now: datetime) -> list[Period]:
    """Those of `periods`, and those that have ended within `LATELY`."""
    by_name = {one.name: one for one in (*periods(now - LATELY), *periods(now))}
    return [*by_name.values()]


class UsedTokens:
    """What an event loop knows of days: the tokens of each tenant. One look at a day is for all tenants."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, Mapping[str, int]]] = {}
        self._looking = asyncio.Lock()

    async def of(self, tenant: str, days: Sequence[str]) -> int:
        """The tenant's, on these days. Raises `Failure`."""
        return sum(used.get(tenant, 0) for used in await self.on(days))

    async def on(self, days: Sequence[str]) -> list[Mapping[str, int]]:
        """By tenant, on each of these days. Raises `Failure`."""
        return [await self._on(day) for day in days]

    async def _on(self, day: str) -> Mapping[str, int]:
        if (known := self._fresh(day)) is not None:
            return known
        async with self._looking:
            if (known := self._fresh(day)) is not None:
                return known
            has_ended = day < f"{datetime.now(UTC) - LATE:%Y-%m-%d}"
            [reply] = await patiently(lambda: connections.aperform([usage.command(day)]))
            found = Counter[str]()
            for one in usage.read(day, reply):
                found[one.tenant] += one.sums["prompt"] + one.sums["output"]
            self._known[day] = math.inf if has_ended else time.monotonic() + KNOWN_FOR_S, found
            while len(self._known) > MOST_DAYS:
                del self._known[min(self._known)]
            return found

    def _fresh(self, day: str) -> Mapping[str, int] | None:
        known_until, found = self._known.get(day, (0.0, {}))
        return found if time.monotonic() < known_until else None


used_tokens = connections.PerLoop(UsedTokens)
"""The running event loop's."""


async def check(asks: Caller) -> None:
    """Raises `Failure`: 429 if a budget of the caller's tenant is used up."""
    limits = asks.tenant.limits
    if not (limits.day_tokens or limits.month_tokens):
        return
    now = datetime.now(UTC)
    for period in periods(now):
        most: int | None = getattr(limits, period.budget)
        if most and (used := await used_tokens().of(asks.name, period.days)) >= most:
            tell("x-should-retry", "false")
            told = f"{period.budget}: the tenant's budget must be at most {most} tokens, got {used}"
            message = f"{told}; it begins anew at {period.ends:%Y-%m-%dT%H:%M:%SZ}"
            wait_s = math.ceil((period.ends - now).total_seconds())
            raise Failure(429, message, code="insufficient_quota", retry_after_s=wait_s)

"""A tenant's budgets: tokens, in and out, in a day and in a month of UTC.

What was used is the ledger's sums, which workers write with the end of each task. So all gateways and all ways to
submit share it. A task that has begun is finished: a budget is exceeded by what runs when it is used up."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta

from petiole.gateway.core.caller import Caller, tell
from petiole.gateway.core.failures import Failure
from petiole.gateway.serving.retry import patiently
from petiole.tasks.fleet import usage
from petiole.tasks.servers import connections

KNOWN_FOR_S = 1.0
"""For so long a gateway does not ask Redis again what a tenant has used."""

MOST_KNOWN = 10_000


class UsedTokens:
    """What an event loop knows of tenants: tokens of today and of this month."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str, int, int]] = {}

    async def of(self, tenant: str, now: datetime) -> tuple[int, int]:
        """Raises `Failure`."""
        found, today = self._known.get(tenant), f"{now:%Y-%m-%d}"
        if found is None or time.monotonic() > found[0] or found[1] != today:
            days = usage.days(now.day, now.timestamp())
            replies = await patiently(lambda: connections.aperform([usage.command(day) for day in days]))
            sums = [
                sum(one.sums["prompt"] + one.sums["output"] for one in usage.read(day, reply, tenant))
                for day, reply in zip(days, replies, strict=True)
            ]
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = time.monotonic() + KNOWN_FOR_S, today, sums[0], sum(sums)
            self._known[tenant] = found
        return found[2], found[3]


_used = connections.PerLoop(UsedTokens)


async def check(asks: Caller) -> None:
    """Raises `Failure`: 429 if a budget of the caller's tenant is used up."""
    limits = asks.tenant.limits
    if not (limits.day_tokens or limits.month_tokens):
        return
    now = datetime.now(UTC)
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    tomorrow, next_month = (
        midnight + timedelta(days=1),
        (midnight.replace(day=1) + timedelta(days=32)).replace(day=1),
    )
    of_day, of_month = await _used().of(asks.name, now)
    for name, most, used, anew in (
        ("month_tokens", limits.month_tokens, of_month, next_month),
        ("day_tokens", limits.day_tokens, of_day, tomorrow),
    ):
        if most and used >= most:
            tell("x-should-retry", "false")
            told = f"{name}: the tenant's budget must be at most {most} tokens, got {used}; it begins anew at"
            wait_s = math.ceil((anew - now).total_seconds())
            message = f"{told} {anew:%Y-%m-%dT%H:%M:%SZ}"
            raise Failure(429, message, code="insufficient_quota", retry_after_s=wait_s)

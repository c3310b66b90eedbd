"""What a caller has used: `GET /v1/usage`, from the ledger. A tenant sees its own. Without keys everybody sees
all."""

from __future__ import annotations

from typing import Any

from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import invalid
from petiole.gateway.serving.retry import patiently
from petiole.tasks.fleet import usage
from petiole.tasks.servers import connections

MOST_DAYS = 100
MOST_ROWS = 10_000
"""In an answer: one for each day, tenant and model."""


async def used(days: str) -> list[dict[str, Any]]:
    """The sums of the last days. `days`: their number, as a client writes it. Raises `Failure`."""
    if not (days.isascii() and days.isdecimal() and 1 <= int(days[:9]) <= MOST_DAYS):
        raise invalid("days", f"days: must be a number from 1 to {MOST_DAYS}, got {days[:64]!r}", "invalid_value")
    found: list[dict[str, Any]] = []
    for day in usage.days(int(days)):  # one by one: others' requests go on in between
        found += [_shown(one) for one in usage.read(day, await _of_day(day), caller().name or None)]
        if len(found) > MOST_ROWS:
            limit = f"days: must be so few that the answer has at most {MOST_ROWS} rows, got {days}"
            raise invalid("days", limit, "invalid_value")
    return found


async def _of_day(day: str) -> Any:
    [reply] = await patiently(lambda: connections.aperform([usage.command(day)]))
    return reply


def _shown(one: usage.TenantUsage) -> dict[str, Any]:
    return {
        "object": "usage.day",
        "day": one.day,
        "tenant": one.tenant,
        "model": one.model,
        "requests": one.sums["requests"],
        "input_tokens": one.sums["prompt"],
        "input_cached_tokens": one.sums["cached"],
        "output_tokens": one.sums["output"],
        "output_reasoning_tokens": one.sums["reasoning"],
        "ends": dict(one.ends),
    }

"""Looks at what tenants have used, and lets their webhooks know that a budget is nearly, or wholly, used up. The
fleet's monitors, who know no budgets, are told what is used of each.

Each gateway looks. The notice of a threshold is added once in a period: the mark that says so and the notice are
written in one step, and from then on the notice waits as all others do. A tenant without a webhook of its own has
that of "", if there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime

from petiole.gateway.core.caller import Caller, as_caller
from petiole.gateway.core.webhook_events import Notice
from petiole.gateway.serving.auth import api_keys, budgets
from petiole.gateway.serving.auth.budgets import Period
from petiole.gateway.serving.retry import patiently
from petiole.gateway.serving.webhooks import queue, receivers
from petiole.tasks.fleet import usage
from petiole.tasks.fleet.usage import BudgetShare
from petiole.tasks.servers import connections

LOOK_S = 5.0
THRESHOLDS = {80: "budget.warning", 100: "budget.exhausted"}
"""By percent of a budget, what is told."""
_KEPT_S = 86_400
"""How long after a period it is known what was told in it, because clocks differ."""
_MOST_TOLD = 10_000
_MOST_SHARES = 1_000
"""How many budgets monitors are told of: those of which most is used."""


class BudgetWatch:
    """`counted`: told of each notice that another one displaces: "dropped"."""

    def __init__(self, counted: Callable[[str], None]) -> None:
        self._counted = counted
        self._told = set[str]()

    async def look(self) -> None:
        """Raises `Failure`."""
        tenants, now, shares = await api_keys.tenants(), datetime.now(UTC), list[BudgetShare]()
        for period in budgets.recent_periods(now):
            by_day = await budgets.used_tokens().on(period.days)
            for name, tenant in tenants.items():
                if most := getattr(tenant.limits, period.budget):
                    used = sum(day.get(name, 0) for day in by_day)
                    if period.ends > now:
                        shares.append(BudgetShare(name, period.budget, used, most))
                    for percent in THRESHOLDS:
                        if 100 * used >= percent * most:
                            await self._tell(name, period, percent, most, used)
        if shares:
            shares.sort(key=lambda one: one.used / one.most, reverse=True)
            await patiently(lambda: connections.aperform([usage.telling(shares[:_MOST_SHARES])]))

    async def _tell(self, tenant: str, period: Period, percent: int, most: int, used: int) -> None:
        about = f"{tenant}.{period.budget}.{period.name}.{percent}.{most}"
        if about in self._told:
            return
        for whose in dict.fromkeys((tenant, "")):
            if await receivers.of(whose) is not None:
                break
        else:
            return
        now = int(time.time())
        told = {
            "tenant": tenant,
            "budget": period.budget,
            "period": period.name,
            "percent": percent,
            "limit": most,
            "used": used,
        }
        with as_caller(Caller(whose)):
            notice = Notice(THRESHOLDS[percent], about, now, told)
            for _ in range(await queue.add_once(notice, int(period.ends.timestamp()) - now + _KEPT_S)):
                self._counted("dropped")
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told.add(about)

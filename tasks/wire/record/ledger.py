"""The ledger: what tasks have used. The script that writes the end of a task's stream writes its entry, in the
same step. So a task that an interruption made begin again has one entry, and a task without an end has none.
A task without a tenant is in the sums alone: a million rows of a night take no more room than one.

    USAGE_KEY:DAY         hash: by task id, the entry of a tenant's task as JSON; kept for `PETIOLE_USAGE_DAYS`
    USAGE_KEY:DAY:totals  hash: `["TENANT","MODEL"] WHAT` -> a sum; WHAT is one of `SUMS`, or `end END`

A day is one of UTC, by the clock of the worker that writes the end."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from petiole.tasks.wire.headers import Account
from petiole.tasks.wire.keys import account_keys, usage_keys, watched_key

SUMS = ("requests", "prompt", "cached", "output", "reasoning")
"""The sums: tasks, and their tokens."""

SLOT_MS = 5000
"""What limits count, they count in slots of this length."""

SECONDS_A_DAY = 86_400


def keys_of(account: Account, at: float) -> list[str]:
    """The keys of an entry that is written at this time, in the order in which the script takes them."""
    day = time.strftime("%Y-%m-%d", time.gmtime(at))
    key = account.held[0] if account.held else ""
    return [*usage_keys(day), *account_keys(account.tenant), *account_keys(account.tenant, key), watched_key()]


def entry(
    account: Account,
    task_id: str,
    attempt: int,
    record: Mapping[str, Any],
    output: int,
    prompt: int | None,
    at: float,
) -> str:
    """`record`: how the task has ended. `output` and `prompt`: their tokens, as far as this attempt knows them; an
    end with usage counts for itself."""
    usage = record.get("usage") or {}
    ended = record["finish_reason"]
    if ended == "cancelled" and record.get("stop_reason") == "expired":
        ended = "expired"
    found = {
        "task": task_id,
        "at": round(at, 3),
        "tenant": account.tenant,
        "model": account.model,
        "adapter": account.adapter,
        "prompt": usage.get("prompt_tokens", prompt),
        "cached": usage.get("cached_prompt_tokens", 0),
        "output": usage.get("completion_tokens", output),
        "reasoning": usage.get("reasoning_tokens") or 0,
        "end": ended,
        "attempt": attempt,
        "days": account.days,
    }
    return json.dumps(found | ({"held": [*account.held[1:], SLOT_MS]} if account.held else {}))

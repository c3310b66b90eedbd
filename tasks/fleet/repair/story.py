"""The story of one task, from what Redis has of it: its attempts, their workers, and how each has ended."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NamedTuple

import redis
from celery.states import PENDING

from petiole.tasks.fleet import control
from petiole.tasks.fleet.repair import quarantined
from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record.codec import BegunAttempt, LoggedOutput, begun_attempts


class Attempt(NamedTuple):
    """`began_at`: in Unix seconds. `end`: how it has ended, or what it does."""

    number: int
    worker: str
    began_at: float
    end: str


class Story(NamedTuple):
    """`state`: Celery's. `facts`: everything else that is known, by name. `known`: whether anything is."""

    task_id: str
    state: str
    attempts: list[Attempt]
    facts: dict[str, Any]

    @property
    def known(self) -> bool:
        return self.state != PENDING or bool(self.attempts or self.facts)


def of(task_id: str) -> Story:
    keys, client = stream_keys(task_id), connections.streams()
    with client.pipeline(transaction=False) as pipe:
        pipe.hgetall(keys.state)
        pipe.hgetall(keys.asked)
        pipe.lrange(keys.log, 0, -1)
        state, asked, entries = pipe.execute()
    log = LoggedOutput.of(entries)
    facts: dict[str, Any] = {}
    if b"submitted" in asked:
        with suppress(ValueError):
            facts["submitted_at"] = float(asked[b"submitted"])
    if b"cancel" in asked:
        facts["cancelled"] = True
    if entries:
        facts |= {"tokens": len(log.token_ids), "deltas": len(entries)}
        if log.unreadable:
            facts["unreadable_deltas"] = log.unreadable
    facts |= {
        name: state[name.encode()].decode(errors="replace")
        for name in ("model", "deaths")
        if name.encode() in state
    }
    end = _end(state)
    facts |= end
    with suppress(redis.exceptions.NoPermissionError):
        aside = [one.reason for one in quarantined.listed() if one.task_id == task_id]
        if aside:
            facts["put_aside"] = aside[0]
    return Story(task_id, control.state_of(task_id), _attempts(begun_attempts(state), state, end), facts)


def _end(state: dict[bytes, bytes]) -> dict[str, Any]:
    """How the task has ended. Empty: it has not, or the record cannot be read."""
    try:
        done = json.loads(state[b"done"])
        found = {"finish_reason": done["finish_reason"], "error": done.get("error", {}).get("type")}
        timing, usage = done.get("timing") or {}, done.get("usage") or {}
        found |= {"ended_at": timing.get("ended_at"), **timing, **usage}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}
    return {name: value for name, value in found.items() if value is not None}


def _attempts(begun: list[BegunAttempt], state: dict[bytes, bytes], end: dict[str, Any]) -> list[Attempt]:
    """An attempt's end is what the next one says of it. The last one's is the task's."""
    found = []
    for place, one in enumerate(begun):
        if place + 1 < len(begun):
            how = "its worker died" if begun[place + 1].why == "died" else "handed back, or lost before it ran"
        elif end:
            how = end.get("error") or end["finish_reason"]
        else:
            how = "runs" if b"running" in state else "waits"
        found.append(Attempt(one.number, one.worker, one.at, how))
    return found

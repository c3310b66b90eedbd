"""Deltas as JSON, as docs/streams.md describes them. Formatted by hand for speed: this is the hot path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from petiole.gpu_worker.request import Delta
from petiole.tasks.worker.output.outcomes import Outcome, logprobs_json


def opening(task_id: str, attempt: int) -> str:
    """The beginning of every delta of an attempt. The delta's index follows."""
    return f'{{"task_id":{quote(task_id)},"attempt":{attempt},"index":'


def merged(opening: str, index: int, pieces: Sequence[Delta], outcome: Outcome | None) -> str:
    """One delta of all `pieces`; the first piece begins at `index`. With an outcome, it is the last delta."""
    ids: list[int] = []
    text, extras = "", outcome is not None
    for delta in pieces:
        ids += delta.token_ids
        text += delta.text
        extras = extras or delta.logprobs is not None or delta.values is not None
    tokens = str(ids[0]) if len(ids) == 1 else ",".join(map(str, ids))
    reason = "null" if outcome is None else quote(outcome.finish_reason)
    return (
        f'{opening}{index},"token_ids":[{tokens}],"text":{quote(text)},'
        f'"finish_reason":{reason}{_extras(pieces, outcome) if extras else ""}}}'
    )


def _extras(pieces: Sequence[Delta], outcome: Outcome | None) -> str:
    extras = ""
    if any(delta.logprobs is not None for delta in pieces):
        extras += f',"logprobs":{json.dumps([e for delta in pieces for e in logprobs_json(delta.logprobs or ())])}'
    if any(delta.values is not None for delta in pieces):
        extras += f',"values":{json.dumps([v or None for delta in pieces for v in delta.values or _none(delta)])}'
        extras += f',"bins":{json.dumps([b or None for delta in pieces for b in delta.bins or _none(delta)])}'
    if any(delta.items is not None for delta in pieces):
        extras += f',"items":{json.dumps([one for delta in pieces for one in delta.items or _none(delta)])}'
    if outcome is not None:
        record = outcome.record
        extras += f',"stop_reason":{json.dumps(outcome.stop_reason)}'
        if "error" in record:
            extras += f',"error":{json.dumps(record["error"])}'
    return extras


def _none(delta: Delta) -> list[None]:
    return [None] * len(delta.token_ids)


def closing(task_id: str, error: dict[str, Any]) -> list[str]:
    """The last delta and the record of a task that no worker ran: the arguments of `close.lua`, which adds attempt
    and index to the delta."""
    return [
        f'{{"task_id":{quote(task_id)},"attempt":',
        ',"index":',
        f',"token_ids":[],"text":"","finish_reason":"error","stop_reason":null,"error":{json.dumps(error)}}}',
        json.dumps({"finish_reason": "error", "error": error}),
    ]

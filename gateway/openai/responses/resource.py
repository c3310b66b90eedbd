"""The answer as an object: what is known of a response. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from petiole.contract.results.outputs import Usage
from petiole.gateway.core.failures import Failure, failure_of
from petiole.gateway.core.parts import CollectedOutput, Kind, OutputEnded, OutputItem, PositionedToken
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.openai import logprobs
from petiole.gateway.openai.answers import usage
from petiole.gateway.openai.responses import tools
from petiole.gateway.openai.responses.items import Item, output_id
from petiole.gateway.openai.responses.request import NAMES
from petiole.tasks import errors

ITEMS: dict[Kind, str] = {
    "content": "message",
    "reasoning": "reasoning",
    "call": "function_call",
    "custom": "custom_tool_call",
}
"""By what an output is made of: the type of an item."""

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
RUNNING = ("queued", "in_progress")

_DEFAULTS: dict[str, Any] = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "store": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
}
_FIXED: dict[str, Any] = {
    "safety_identifier": None,
    "service_tier": "default",
    "truncation": "disabled",
    "user": None,
}


def status_of(ended: OutputEnded) -> Status:
    match ended.finish_reason:
        case "error":
            return "failed"
        case "cancelled":
            return "cancelled"
        case "stop":
            return "completed"
    return "incomplete"


def failure(ended: OutputEnded) -> Failure | None:
    return None if ended.error is None else failure_of(errors.rebuild(ended.error), NAMES)


def resource(record: RequestRecord, status: Status, whole: CollectedOutput) -> dict[str, Any]:
    """The response. `completed_at` is null where a worker of an earlier version has not said when it ended."""
    asked, ended = record.asked, whole.ended
    failed = None if ended is None else failure(ended)
    return {
        "id": record.id,
        "object": record.kind,
        "created_at": record.created,
        "completed_at": int(ended.at) if status == "completed" and ended and ended.at else None,
        "status": status,
        "model": record.model,
        "output": output(record, whole.pieces, None if status in RUNNING else status),
        "error": failed and {"code": failed.code or "server_error", "message": failed.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "usage": None if ended is None or ended.usage is None else used(ended.usage),
        "conversation": {"id": asked["conversation"]} if "conversation" in asked else None,
        "reasoning": {"effort": None, "summary": None, **asked.get("reasoning", {})},
        "text": text_of(asked.get("text", {})),
        **{name: asked.get(name, default) for name, default in _DEFAULTS.items()},
        **_FIXED,
    }


def finished(record: RequestRecord, whole: CollectedOutput) -> dict[str, Any]:
    """The response when its output has ended."""
    assert whole.ended is not None
    return resource(record, status_of(whole.ended), whole)


def used(known: Usage) -> dict[str, Any]:
    """Usage, as responses call it."""
    shown = usage([known])
    return {
        "input_tokens": shown["prompt_tokens"],
        "input_tokens_details": shown["prompt_tokens_details"],
        "output_tokens": shown["completion_tokens"],
        "output_tokens_details": shown["completion_tokens_details"],
        "total_tokens": shown["total_tokens"],
    }


def text_of(asked: dict[str, Any]) -> dict[str, Any]:
    form = asked.get("format") or {"type": "text"}
    if form.get("type") == "json_schema":
        form = {"name": "", "description": None, "strict": True, **form}
    return {"verbosity": "medium", **asked, "format": form}


# ---------------------------------------------------------------- output


def output(record: RequestRecord, pieces: Sequence[OutputItem], ended_as: Status | None) -> list[Item]:
    """The items of these pieces. `ended_as`: None while the output goes on. All but the last are complete."""
    last = {None: "in_progress", "completed": "completed"}.get(ended_as, "incomplete")
    return [
        item(record, index, piece, "completed" if index < len(pieces) - 1 else last)
        for index, piece in enumerate(pieces)
    ]


def item(record: RequestRecord, index: int, piece: OutputItem, status: str) -> Item:
    kind = ITEMS[piece.kind]
    known = {"id": output_id(record.id, kind, index), "type": kind, "status": status}
    match piece.kind:
        case "content":
            return {**known, "role": "assistant", "content": [part(record, piece)]}
        case "reasoning":
            return {**known, "summary": [], "content": [part(record, piece)]}
        case "call" | "custom":
            text = "arguments" if piece.kind == "call" else "input"
            name = tools.names(record.asked.get("tools", ())).get(piece.name, tools.Name(None, piece.name))
            return {**known, "call_id": piece.call_id, **name.said, text: piece.text}


def part(record: RequestRecord, piece: OutputItem) -> dict[str, Any]:
    if piece.kind == "reasoning":
        return {"type": "reasoning_text", "text": piece.text}
    tokens = shown(record, piece.tokens)
    return {"type": "output_text", "text": piece.text, "annotations": [], "logprobs": tokens}


def shown(record: RequestRecord, tokens: Iterable[PositionedToken]) -> list[dict[str, Any]]:
    """Tokens of a message with their log-probabilities, if they were asked for. The end token is not shown."""
    likeliest = record.asked.get("logprobs")
    if likeliest is None:
        return []
    as_ids = bool(record.asked.get("as_ids"))
    return [logprobs.shown(one.token, likeliest, as_ids) for one in tokens if one.said]

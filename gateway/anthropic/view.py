"""The answer of /messages, streamed and whole: a view of parts. Pure.

    message_start                        when a worker has counted the prompt
        content_block_start              a block: text, thinking, tool_use
            content_block_delta ...      text_delta, thinking_delta, input_json_delta
            content_block_delta          signature_delta, of a thought
        content_block_stop
    message_delta, message_stop          or: error

A thought whose text the client does not want is a block without text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from petiole import json_text
from petiole.gateway.anthropic.answers import error_body, stopped, usage, usage_so_far
from petiole.gateway.core.events import StreamEvent, encode
from petiole.gateway.core.failures import of_end
from petiole.gateway.core.parts import (
    CollectedOutput,
    ItemDone,
    ItemStarted,
    Kind,
    OutputEnded,
    OutputItem,
    OutputStarted,
    Part,
    TextDelta,
)
from petiole.gateway.core.record import RequestRecord

_DELTAS: dict[Kind, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessagesView:
    """The name of an event is its type."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._begun = False
        self._index = -1
        self._kind: Kind = "content"
        self._called = False
        self._head = b""  # of a delta of the open block

    def begin(self, choice: int) -> Iterable[StreamEvent]:
        return []

    def events(self, choice: int, part: Part) -> Iterable[StreamEvent]:
        if isinstance(part, TextDelta):
            if self._kind == "reasoning" and self._record.asked.get("hidden"):
                return []
            return [StreamEvent("content_block_delta", None, part.text)]
        if isinstance(part, OutputEnded) and (failure := of_end(part)) is not None:
            return [StreamEvent("error", error_body(failure))]
        found = self._begin(part)
        match part:
            case ItemStarted():
                self._index, self._kind = self._index + 1, part.kind
                self._called = self._called or part.kind == "call"
                kind, text = _DELTAS[part.kind]
                head = {"type": "content_block_delta", "index": self._index, "delta": {"type": kind}}
                self._head = encode(head)[:-2] + b',"%b":' % text.encode()
                opened = {"index": self._index, "content_block": _block(self._record, OutputItem(*part))}
                found.append(StreamEvent("content_block_start", opened))
            case ItemDone():
                if self._kind == "reasoning":
                    signed = {"type": "signature_delta", "signature": self._record.id}
                    found.append(StreamEvent("content_block_delta", {"index": self._index, "delta": signed}))
                found.append(StreamEvent("content_block_stop", {"index": self._index}))
            case OutputEnded():
                delta = stopped(part, self._called, self._record.asked.get("stop", ()))
                found.append(StreamEvent("message_delta", {"delta": delta, "usage": usage(part.usage)}))
                found.append(StreamEvent("message_stop", {}))
        return found

    def finish(self) -> Iterable[StreamEvent]:
        return []

    def event_name(self, event: StreamEvent) -> str | None:
        return event.name

    def encode(self, choice: int, number: int, event: StreamEvent) -> bytes:
        if event.text is not None:
            return b"%b%b}}" % (self._head, encode(event.text))
        return encode({"type": event.name, **event.fields})

    def _begin(self, part: Part) -> list[StreamEvent]:
        """The first event comes with the first part, which tells the number of the prompt's tokens if it is
        known."""
        if self._begun:
            return []
        self._begun = True
        prompt_tokens = part.prompt_tokens if isinstance(part, OutputStarted) else 0
        empty = {**_head(self._record), "content": [], "stop_reason": None, "stop_sequence": None}
        return [StreamEvent("message_start", {"message": {**empty, "usage": usage_so_far(prompt_tokens)}})]


def whole(record: RequestRecord, outputs: Sequence[CollectedOutput]) -> dict[str, Any]:
    """The answer of a request whose output has ended. Raises `Failure`."""
    [output] = outputs
    ended = output.ended
    assert ended is not None
    if (failure := of_end(ended)) is not None:
        raise failure
    called = any(piece.kind == "call" for piece in output.pieces)
    return {
        **_head(record),
        "content": [_block(record, piece, record.id) for piece in output.pieces],
        **stopped(ended, called, record.asked.get("stop", ())),
        "usage": usage(ended.usage),
    }


def _head(record: RequestRecord) -> dict[str, Any]:
    return {"id": record.id, "type": "message", "role": "assistant", "model": record.model}


def _block(record: RequestRecord, piece: OutputItem, signature: str = "") -> dict[str, Any]:
    match piece.kind:
        case "content":
            return {"type": "text", "text": piece.text}
        case "reasoning":
            shown = "" if record.asked.get("hidden") else piece.text
            return {"type": "thinking", "thinking": shown, "signature": signature}
        case "call" | "custom":
            return {"type": "tool_use", "id": piece.call_id, "name": piece.name, "input": _input(piece.text)}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call as an object. What is none is wrapped, as Anthropic's documentation has it."""
    try:
        found = json_text.decode(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}

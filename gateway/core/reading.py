"""One task's deltas as parts. The same deltas, split in any other way, give the same parts, split in another way.

Where the record asks for parts, text is divided into reasoning, content and calls, as the worker has announced it:
what announces a task comes before the first text, in a delta of its own. Otherwise all text is content."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast, get_type_hints

import msgspec

from petiole.gateway.core.parts import Begun, Closed, Ended, Kind, Opened, Part, Prompted, Text
from petiole.gateway.core.places import Places
from petiole.gateway.core.record import Record
from petiole.outputs import Prepared
from petiole.tasks.requests.results import ShownPiece, StreamDelta
from petiole.tasks.templates import detection, message
from petiole.tasks.templates.parser import (
    CallArguments,
    CallBegun,
    CallEnded,
    Content,
    Event,
    Parser,
    Reasoning,
)


class Reading:
    """The state of one output's reader. `task_id`: the task whose text is divided; None: no text is."""

    def __init__(self, task_id: str | None = None) -> None:
        self._task_id = task_id
        self._parser: Parser | None = None
        self._places = Places()
        self._opened: Kind | None = None
        self._last: Kind | None = None  # what was opened last
        self._length = 0  # of the output, in characters

    @classmethod
    def of(cls, record: Record, choice: int) -> Reading:
        return cls(record.tasks[choice] if record.asked.get("parts") else None)

    def read(self, delta: StreamDelta) -> list[Part]:
        """The parts that this delta makes, opens or closes. A delta without text may make none."""
        parts: list[Part] = []
        if delta.prepared is not None and self._task_id is not None:
            self._parser = _parser(delta.prepared)
            parts.append(Begun(delta.prepared.prompt_tokens))
        if delta.index < 0 and delta.token_ids:
            return [*parts, Prompted(delta.logprobs or (), last=not delta.end)]
        if delta.logprobs is not None:
            self._places.add(delta.logprobs)
        self._length += len(delta.text)
        if self._parser is not None:
            events = self._parser.push(delta.text)
            if delta.finish_reason is not None:
                events += self._parser.finish()
            for event in events:
                self._add(event, parts)
        elif self._task_id is not None and delta.content is not None:
            self._divide(delta, parts)
        elif delta.text:
            self._open("content", parts)
            parts.append(Text(delta.text, self._places.emit(delta.text)))
        if delta.finish_reason is not None:
            self._end(delta, parts)
        return parts

    def _add(self, event: Event, parts: list[Part]) -> None:
        match event:
            case Content(text, at):
                self._open("content", parts)
                parts.append(Text(text, self._places.emit(text, at)))
            case Reasoning(text, at):
                self._open("reasoning", parts)
                parts.append(Text(text, self._places.emit(text, at, said=False)))
            case CallBegun(call, name):
                self._open_call(parts, name, message.call_id(self._task_id or "", call))
            case CallArguments(_, text):
                parts.append(Text(text))
            case CallEnded():
                self._close(parts)

    def _divide(self, delta: StreamDelta, parts: list[Part]) -> None:
        """A whole output that the worker has divided: its log is gone, and its result is left."""
        if delta.reasoning:
            self._open("reasoning", parts)
            parts.append(Text(delta.reasoning))
        if content := delta.content:
            at = delta.text.rfind(content)  # content around a call is at no one place
            self._open("content", parts)
            parts.append(Text(content, self._places.emit(content, at) if at >= 0 else ()))
        for call in delta.tool_calls or ():
            self._open_call(parts, call.name or "", call.id or "")
            if call.arguments:
                parts.append(Text(call.arguments))

    def _open(self, kind: Kind, parts: list[Part]) -> None:
        if self._opened != kind:
            self._close(parts)
            self._opened = self._last = kind
            parts.append(Opened(kind))

    def _open_call(self, parts: list[Part], name: str, call_id: str) -> None:
        self._close(parts)
        self._opened = self._last = "call"
        parts.append(Opened("call", name, call_id))

    def _close(self, parts: list[Part]) -> None:
        if self._opened is not None:
            self._opened = None
            parts.append(Closed())

    def _end(self, delta: StreamDelta, parts: list[Part]) -> None:
        assert delta.finish_reason is not None
        if delta.error is None:
            if self._last is None:
                self._open("content", parts)  # an empty output is an empty content
            self._close(parts)
        rest = self._places.rest(self._length, said=self._last in ("content", None))
        at = None if delta.timing is None else delta.timing.ended_at
        parts.append(Ended(delta.finish_reason, delta.stop_reason, delta.usage, delta.error, rest, at))


def _parser(prepared: Prepared) -> Parser | None:
    """How the text is divided. None: a format that this version does not know, or none."""
    format = detection.named(prepared.format)
    if format is None:
        return None
    return Parser(format.template, prompt_end=prepared.prompt_end, tools=prepared.tool_types or None)


def _copy(delta: msgspec.Struct, *, update: dict[str, Any]) -> msgspec.Struct:
    return msgspec.structs.replace(delta, **update)


def _decoder() -> Callable[[bytes], StreamDelta]:
    """For a class with the fields of `StreamDelta`, and what readers of streams ask of it. No delta of a log has a
    field of `ShownPiece`."""
    hints, fields, shown = get_type_hints(StreamDelta), StreamDelta.model_fields, ShownPiece.model_fields.keys()
    declared = [
        (name, hints[name], msgspec.NODEFAULT if field.is_required() else field.default)
        for name, field in fields.items()
        if name not in shown
    ]
    more = {"end": StreamDelta.end, "is_heartbeat": StreamDelta.is_heartbeat, "model_copy": _copy}
    kind = msgspec.defstruct("Delta", declared, namespace=more | dict.fromkeys(shown), frozen=True, gc=False)
    return cast("Callable[[bytes], StreamDelta]", msgspec.json.Decoder(kind).decode)


_decode = _decoder()


def delta_of(raw: bytes) -> StreamDelta:
    """The delta. Its class is not `StreamDelta`, but has the same fields: pydantic takes six times as long.
    Raises pydantic's ValidationError."""
    try:
        return _decode(raw)
    except msgspec.MsgspecError:
        return StreamDelta.model_validate_json(raw)

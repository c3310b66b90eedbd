"""One task's deltas as parts. The same deltas, split in any other way, give the same parts, split in another way.

Where the record asks for parts, text is divided into reasoning, content and calls, as the worker has announced it:
what announces a task comes before the first text, in a delta of its own. Otherwise all text is content."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, cast, get_type_hints

import msgspec

from petiole.contract.results.outputs import Prepared
from petiole.contract.results.task_result import ShownPiece, StreamDelta
from petiole.gateway.core.foreign.text_tools import InputReader
from petiole.gateway.core.parts import (
    ItemDone,
    ItemStarted,
    Kind,
    OutputEnded,
    OutputStarted,
    Part,
    PromptTokens,
    TextDelta,
    TokenCount,
)
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.text_offsets import TokenOffsets
from petiole.tasks.output_parsing import formats, message
from petiole.tasks.output_parsing.parser import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
)


class OutputAssembler:
    """The state of one output's reader. `task_id`: the task whose text is divided; None: no text is.
    `custom`: the functions that stand for tools which take text. `counts`: tokens are counted."""

    def __init__(self, task_id: str | None = None, custom: Collection[str] = (), *, counts: bool = False) -> None:
        self._task_id = task_id
        self._custom = custom
        self._input: InputReader | None = None  # of the open call
        self._parser: Parser | None = None
        self._places = TokenOffsets()
        self._opened: Kind | None = None
        self._last: Kind | None = None  # what was opened last
        self._length = 0  # of the output, in characters
        self._count = TokenCount(0, 0) if counts else None

    @classmethod
    def of(cls, record: RequestRecord, choice: int) -> OutputAssembler:
        asked = record.asked
        task_id = record.tasks[choice] if asked.get("parts") else None
        return cls(task_id, asked.get("custom", ()), counts=bool(asked.get("counts")))

    def read(self, delta: StreamDelta) -> list[Part]:
        """The parts that this delta makes, opens or closes. A delta without text may make none."""
        parts: list[Part] = []
        if self._count is not None:
            prompt = self._count.prompt_tokens if delta.prepared is None else delta.prepared.prompt_tokens
            self._count = TokenCount(prompt, max(self._count.completion_tokens, delta.end))
            parts.append(self._count)
        if delta.prepared is not None and self._task_id is not None:
            self._parser = _parser(delta.prepared)
            parts.append(OutputStarted(delta.prepared.prompt_tokens))
        if delta.index < 0 and delta.token_ids:
            return [*parts, PromptTokens(delta.logprobs or (), last=not delta.end)]
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
            parts.append(TextDelta(delta.text, self._places.emit(delta.text)))
        if delta.finish_reason is not None:
            self._end(delta, parts)
        return parts

    def _add(self, event: Event, parts: list[Part]) -> None:
        match event:
            case ContentDelta(text, at):
                self._open("content", parts)
                parts.append(TextDelta(text, self._places.emit(text, at)))
            case ReasoningDelta(text, at):
                self._open("reasoning", parts)
                parts.append(TextDelta(text, self._places.emit(text, at, said=False)))
            case CallStarted(call, name):
                self._open_call(parts, name, message.call_id(self._task_id or "", call))
            case ArgumentsDelta(_, text):
                self._add_arguments(text, parts)
            case CallEnded():
                self._close(parts)

    def _divide(self, delta: StreamDelta, parts: list[Part]) -> None:
        """A whole output that the worker has divided: its log is gone, and its result is left."""
        if delta.reasoning:
            self._open("reasoning", parts)
            parts.append(TextDelta(delta.reasoning))
        if content := delta.content:
            at = delta.text.rfind(content)  # content around a call is at no one place
            self._open("content", parts)
            parts.append(TextDelta(content, self._places.emit(content, at) if at >= 0 else ()))
        for call in delta.tool_calls or ():
            self._open_call(parts, call.name or "", call.id or "")
            if call.arguments:
                self._add_arguments(call.arguments, parts)

    def _open(self, kind: Kind, parts: list[Part]) -> None:
        if self._opened != kind:
            self._close(parts)
            self._opened = self._last = kind
            parts.append(ItemStarted(kind))

    def _open_call(self, parts: list[Part], name: str, call_id: str) -> None:
        self._close(parts)
        kind: Kind = "custom" if name in self._custom else "call"
        self._input = InputReader() if kind == "custom" else None
        self._opened = self._last = kind
        parts.append(ItemStarted(kind, name, call_id))

    def _add_arguments(self, text: str, parts: list[Part]) -> None:
        said = text if self._input is None else self._input.push(text)
        if said:
            parts.append(TextDelta(said))

    def _close(self, parts: list[Part]) -> None:
        if self._opened is not None:
            if self._opened == "custom" and self._input is not None and (rest := self._input.finish()):
                parts.append(TextDelta(rest))
            self._opened = None
            parts.append(ItemDone())

    def _end(self, delta: StreamDelta, parts: list[Part]) -> None:
        assert delta.finish_reason is not None
        if delta.error is None:
            if self._last is None:
                self._open("content", parts)  # an empty output is an empty content
            self._close(parts)
        rest = self._places.rest(self._length, said=self._last in ("content", None))
        at = None if delta.timing is None else delta.timing.ended_at
        parts.append(OutputEnded(delta.finish_reason, delta.stop_reason, delta.usage, delta.error, rest, at))


def _parser(prepared: Prepared) -> Parser | None:
    """How the text is divided. None: a format that this version does not know, or none."""
    format = formats.named(prepared.format)
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

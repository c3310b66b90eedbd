"""The answer as events: a view of parts. Pure.

    response.created, and response.queued of a background response, response.in_progress
        response.output_item.added, response.content_part.added
            response.output_text.delta ...                 of reasoning: response.reasoning_text
        response.output_text.done, response.content_part.done, response.output_item.done
        response.output_item.added                         a call of a tool
            response.function_call_arguments.delta ...
        response.function_call_arguments.done, response.output_item.done
    response.completed, response.incomplete or response.failed

Whether an item is complete is known when the next one begins, or from the end. So what closes an item waits for
the part that follows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from petiole.gateway.core.events import StreamEvent, encode
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.parts import (
    CollectedOutput,
    ItemDone,
    ItemStarted,
    Kind,
    OutputEnded,
    OutputStarted,
    Part,
    TextDelta,
)
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.openai.answers import error_body
from petiole.gateway.openai.responses import resource
from petiole.gateway.openai.responses.items import Item, output_id
from petiole.gateway.openai.responses.resource import Status

_TEXTS: dict[Kind, str] = {
    "content": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
    "custom": "response.custom_tool_call_input",
}
DELTA = "response.output_text.delta"
_LAST = {"completed": "response.completed", "failed": "response.failed"}


class ResponsesView:
    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._closing = False
        self._begun = False
        self._plain = "logprobs" not in record.asked
        self._head = b""  # of a delta of the open item
        self.whole = CollectedOutput()

    def begin(self, choice: int) -> Iterable[StreamEvent]:
        if not self._record.asked.get("background"):
            return [self._state("response.created", "in_progress"), *self._begin()]
        return [self._state("response.created", "queued"), self._state("response.queued", "queued")]

    def events(self, choice: int, part: Part) -> Iterable[StreamEvent]:
        if isinstance(part, TextDelta):
            self.whole.add(part)
            return [StreamEvent(f"{_TEXTS[self._kind]}.delta", None, part.text, part.tokens)]
        if isinstance(part, OutputStarted):
            return []
        found = [] if self._begun else self._begin()
        match part:
            case ItemDone():
                self._closing = True
            case ItemStarted():
                found += self._close("completed")
                self.whole.add(part)
                found += self._open()
            case OutputEnded():
                status = resource.status_of(part)
                found += self._close("completed" if status == "completed" else "incomplete")
                self.whole.add(part)
                found.append(self._state(_LAST.get(status, "response.incomplete"), status))
        return found

    def finish(self) -> Iterable[StreamEvent]:
        return []

    def event_name(self, event: StreamEvent) -> str | None:
        return event.name

    def encode(self, choice: int, number: int, event: StreamEvent) -> bytes:
        if event.text is None:
            return encode({"type": event.name, "sequence_number": number, **event.fields})
        if event.name != DELTA:
            return b'%b%b,"sequence_number":%d}' % (self._head, encode(event.text), number)
        tokens = b"[]"
        if not self._plain:
            tokens = encode(resource.shown(self._record, event.tokens))
        return b'%b%b,"logprobs":%b,"sequence_number":%d}' % (self._head, encode(event.text), tokens, number)

    # ------------------------------------------------------------

    def _begin(self) -> list[StreamEvent]:
        self._begun = True
        return [self._state("response.in_progress", "in_progress")]

    def _state(self, name: str, status: Status) -> StreamEvent:
        return StreamEvent(name, {"response": resource.resource(self._record, status, self.whole)})

    def _open(self) -> list[StreamEvent]:
        place, item = self._place(), self._item("in_progress")
        self._head = encode({"type": f"{_TEXTS[self._kind]}.delta", **place})[:-1] + b',"delta":'
        if self._is_call:
            return [StreamEvent("response.output_item.added", self._placed(item))]
        [part] = item["content"]
        return [
            StreamEvent("response.output_item.added", self._placed({**item, "content": []})),
            StreamEvent("response.content_part.added", {**place, "part": part}),
        ]

    def _close(self, status: str) -> list[StreamEvent]:
        """What closes the last item, if it is closing."""
        if not self._closing:
            return []
        self._closing = False
        place, item, done = self._place(), self._item(status), f"{_TEXTS[self._kind]}.done"
        end = StreamEvent("response.output_item.done", self._placed(item))
        if self._is_call:
            said = {name: item[name] for name in ("name", "arguments", "input") if name in item}
            return [StreamEvent(done, {**place, **said}), end]
        [part] = item["content"]
        told = {name: part[name] for name in ("text", "logprobs") if name in part}
        return [
            StreamEvent(done, {**place, **told}),
            StreamEvent("response.content_part.done", {**place, "part": part}),
            end,
        ]

    @property
    def _kind(self) -> Kind:
        return self.whole.pieces[-1].kind

    @property
    def _is_call(self) -> bool:
        return self._kind in ("call", "custom")

    @property
    def _index(self) -> int:
        return len(self.whole.pieces) - 1

    def _item(self, status: str) -> Item:
        return resource.item(self._record, self._index, self.whole.pieces[-1], status)

    def _placed(self, item: Item) -> dict[str, Any]:
        return {"output_index": self._index, "item": item}

    def _place(self) -> dict[str, Any]:
        item_id = output_id(self._record.id, resource.ITEMS[self._kind], self._index)
        place = {"item_id": item_id, "output_index": self._index}
        return place if self._is_call else {**place, "content_index": 0}


def error_event(failure: Failure, number: str) -> bytes:
    """What goes wrong outside the log. It has the number of the event before it: what follows that one is still to
    be had. The error is there twice, as OpenAI and as Open Responses have it."""
    error = error_body(failure)["error"]
    said = {name: error[name] for name in ("code", "message", "param")}
    shown = {"type": "error", "sequence_number": max(0, int(number)), **said, "error": error}
    return b"event: error\ndata: %b\n\n" % encode(shown)

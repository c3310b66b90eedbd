"""Deltas with reasoning, content and calls: what a reader makes of the text. Pure."""

from __future__ import annotations

from petiole.contract.results.task_result import StreamDelta, ToolCall
from petiole.tasks.output_parsing import formats, message
from petiole.tasks.output_parsing.parser import (
    ArgumentsDelta,
    CallStarted,
    ContentDelta,
    Event,
    Parser,
    ReasoningDelta,
)


class StreamPresentation:
    """The presentation of one stream, from its first delta on. The task's announcement says how it is divided."""

    def __init__(self, task_id: str) -> None:
        self._task_id = task_id
        self._parser: Parser | None = None

    def show(self, delta: StreamDelta) -> StreamDelta:
        """The same delta with `content`, `reasoning` and `tool_calls`."""
        if (prepared := delta.prepared) is not None:
            format = formats.named(prepared.format)
            if format is not None:
                self._parser = Parser(
                    format.template, prompt_end=prepared.prompt_end, tools=prepared.tool_types or None
                )
            return delta
        if self._parser is None:
            shown = delta.content if delta.content is not None else delta.text
            return delta.model_copy(update={"content": shown or None})
        events = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            events += self._parser.finish()
        return delta.model_copy(update=self._parts(events))

    def _parts(self, events: list[Event]) -> dict[str, str | list[ToolCall] | None]:
        content, reasoning, calls = "", "", list[ToolCall]()
        for event in events:
            match event:
                case ContentDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case CallStarted(call, name):
                    own_id = message.call_id(self._task_id, call)
                    calls.append(ToolCall(index=call, arguments="", id=own_id, name=name))
                case ArgumentsDelta(call, text):
                    last = calls.pop() if calls and calls[-1].index == call else ToolCall(index=call, arguments="")
                    calls.append(last.model_copy(update={"arguments": last.arguments + text}))
        return {"content": content or None, "reasoning": reasoning or None, "tool_calls": calls or None}

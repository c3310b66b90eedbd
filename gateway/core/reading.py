"""One task's deltas as parts. The same deltas, split in any other way, give the same parts, split in another way.

Today all text is content. Where a template divides text into reasoning, content and calls, `_divide` is the place
to do it: it is fed all text in order, and the end once. What the worker has announced (`prepared`), such as the
prompt's end, comes before the first text, in a delta of its own."""

from __future__ import annotations

from collections.abc import Iterator

from petiole.gateway.core.parts import Closed, Ended, Opened, Part, Text
from petiole.gateway.core.places import Places
from petiole.tasks.requests.results import StreamDelta


class Reading:
    """The state of one output's reader."""

    def __init__(self) -> None:
        self._places = Places()
        self._opened = self._closed = 0

    def read(self, delta: StreamDelta) -> list[Part]:
        """The parts that this delta makes, opens or closes. A delta without text may make none."""
        if delta.logprobs is not None:
            self._places.add(delta.logprobs)
        parts = self._divide(delta.text) if delta.text else []
        if delta.finish_reason is not None:
            parts += self._end(delta)
        return parts

    def _divide(self, text: str) -> list[Part]:
        part = Text(text, self._places.emit(text))
        return [part] if self._opened > self._closed else [self._open(), part]

    def _open(self) -> Opened:
        self._opened += 1
        return Opened("content")

    def _end(self, delta: StreamDelta) -> Iterator[Part]:
        assert delta.finish_reason is not None
        if delta.error is None:
            if not self._opened:
                yield self._open()  # an empty output is an empty content
            if self._opened > self._closed:
                self._closed += 1
                yield Closed()
        yield Ended(delta.finish_reason, delta.stop_reason, delta.usage, delta.error, self._places.rest())

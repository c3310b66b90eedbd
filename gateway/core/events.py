"""Events, their numbers, and what is left of them after a number: see the package's map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from petiole.gateway.core.parts import PositionedToken

encode = msgspec.json.encode
"""What goes over the wire is compact JSON."""


class StreamEvent(msgspec.Struct, frozen=True, gc=False):
    """A part of a client's stream. `name` and `fields` are its view's. `text` is what may be split; an event
    without text is structural."""

    name: str
    fields: Any = None
    text: str | None = None
    tokens: Sequence[PositionedToken] = ()

    def without(self, characters: int) -> StreamEvent:
        """The rest, after the first of its characters."""
        assert self.text is not None
        tokens = [
            PositionedToken(at - characters, token, said) for at, token, said in self.tokens if at >= characters
        ]
        return StreamEvent(self.name, self.fields, self.text[characters:], tokens)


class EventNumbering:
    """Numbers the events of one output. `after`: the last number that the client has."""

    def __init__(self, after: int = -1) -> None:
        self.after = after
        self.last = -1

    def number(self, event: StreamEvent) -> StreamEvent | None:
        """What the client lacks of the event, whose number is `last` then. None: nothing."""
        before = self.last
        self.last = before + (1 if event.text is None else len(event.text))
        if before >= self.after:
            return event
        return None if self.last <= self.after else event.without(self.after - before)

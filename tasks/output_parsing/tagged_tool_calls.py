"""The reader of calls that have a tag around each argument. The name was in the opening mark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from petiole.tasks.output_parsing.json_values import escaped, quoted, typed
from petiole.tasks.output_parsing.marks import Mark, Marks
from petiole.tasks.output_parsing.tool_calls import Calls, is_name, meant


@dataclass(frozen=True, eq=False)
class TaggedMarks:
    """The marks between and behind arguments. `head`: what begins one. `close`: the end of the call. `between`:
    either. `tail`: what ends a value:

        0  its own end, and then what may follow it: an argument, or the end of the call
        1  the beginning of an argument: the end of the value is missing
        2  the end of the call, and then another call: as before

    The group `next` has what follows. The group `slip` is not empty where an argument begins as the format does
    not begin one. `last`: what ends a value at the end of the output: its own end, or the end of the call.
    `plain`: the types of a parameter that the tool does not have."""

    head: Marks
    close: Marks
    between: Marks
    tail: Marks
    last: Marks
    plain: str


class Tagged:
    """`kinds`: the types of the tool's parameters. The caller reads the end of the call.

    A value ends only where something follows that may follow a value: its closing tag alone is text. Where the
    closing tag is missing, or the next tag is a slip, the value ends only at the tag of another parameter that the
    tool has and the call did not have yet: a value may be XML."""

    def __init__(self, calls: Calls, name: str, tags: TaggedMarks, kinds: Mapping[str, str]) -> None:
        self._calls, self._tags, self._kinds = calls, tags, kinds
        self._kind: str | None = None  # of the argument that is being read
        self._texts: list[str] = []
        self._given: set[str] = set()
        self.done = False
        self.failed = not is_name(name)
        if not self.failed:
            calls.begin(name)

    def feed(self, text: str, at: int, *, final: bool) -> int:
        while not self.done and not self.failed:
            inside = self._kind is not None
            marks = self._tags.tail if inside else self._tags.between
            found = marks.find(text, at, final=False)
            if isinstance(found, int):
                if not final:
                    return self._read(text[at:found], found)
                return self._last(text, at, found)
            if inside:
                at = self._value_until(text, at, found)
            elif found.number == 0:
                self._open(marks.captures(text, found).get("key", ""))
                at = found.end
            else:
                self._end()
                at = found.start
        return at

    def _last(self, text: str, at: int, held: int) -> int:
        """No more text comes. `held`: from there on, it may be the beginning of a mark. One that can only be the
        end of the call is taken for it."""
        tags = self._tags
        if self._kind is not None:
            found = tags.last.find(text, held, final=True)
            if not isinstance(found, Mark) or found.start > held:
                return self._read(text[at:], len(text))
            self._read(text[at:held], held)
            self._close()
            held = found.end if found.number == 0 else held
        begun = tags.close.find(text, held, final=False)
        if isinstance(begun, Mark) or tags.head.find(text, begun, final=False) == len(text) > begun:
            self._end()
        return len(text)

    def _value_until(self, text: str, at: int, found: Mark) -> int:
        captures = self._tags.tail.captures(text, found)
        key = meant(captures.get("key", ""), self._kinds)
        unsure = found.number == 1 or captures.get("slip")
        if unsure and (key not in self._kinds or key in self._given):
            return self._read(text[at : found.start + 1], found.start + 1)
        self._read(text[at : found.start], found.start)
        self._close()
        return found.end - len(captures["next"])

    def _open(self, written: str) -> None:
        key = meant(written, self._kinds)
        self._calls.arguments(f"{', ' if self._given else '{'}{quoted(key)}: ")
        self._given.add(key)
        self._kind = self._kinds.get(key, self._tags.plain)
        if self._kind == "string":
            self._calls.arguments('"')

    def _read(self, text: str, end: int) -> int:
        if self._kind == "string":
            self._calls.arguments(escaped(text))
        elif self._kind is not None:
            self._texts.append(text)
        return end

    def _close(self) -> None:
        assert self._kind is not None
        self._calls.arguments('"' if self._kind == "string" else typed("".join(self._texts), self._kind))
        self._kind = None
        self._texts.clear()

    def _end(self) -> None:
        self._calls.arguments("}" if self._given else "{}")
        self._calls.end(True)
        self.done = True

"""What stands between the marks of a call: a reader for each way in which families write calls.

A reader is fed the text after the opening mark, and tells `Calls` what it finds as soon as that is certain. It is
`done` after the last character of the calls, or `failed` at the first one that cannot belong to any.

    Arguments    the arguments as one value; the name was in the opening mark
    Object       {"name": ..., "arguments": ...}
    Listed       [{"name": ..., "arguments": ...}, ...]
    Tagged       a tag for each argument; the name was in the opening mark
    PythonCalls  [name(key=value, ...), ...]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from petiole.tasks.templates.marks import Mark, Marks
from petiole.tasks.templates.values import JSON, PYTHON, Dialect, Value, escaped, quoted, typed

MOST_NAME = 256
_SPACES = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class Calls(Protocol):
    """What a reader tells."""

    def begin(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self, complete: bool) -> None: ...


class Body(Protocol):
    done: bool
    failed: bool

    def feed(self, text: str, at: int, *, final: bool) -> int:
        """Read from `at` on. Returns the place up to which it was read; the rest must be fed again, with more."""


def is_name(name: object) -> bool:
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        return False
    return name.encode(errors="ignore").decode() == name  # no lone surrogate


class Arguments:
    """`needs`: the tools of which one must have this name, or else this is no call. Its arguments begin with a
    brace then."""

    def __init__(
        self, calls: Calls, name: str, dialect: Dialect = JSON, needs: Collection[str] | None = None
    ) -> None:
        self._calls, self._name, self._value = calls, name, Value(dialect)
        self._begun = False
        self.done = False
        self.failed = not is_name(name) or (needs is not None and name not in needs)
        if not self.failed and needs is None:
            self._begin()

    def _begin(self) -> None:
        self._begun = True
        self._calls.begin(self._name)

    def feed(self, text: str, at: int, *, final: bool) -> int:
        if self.failed:
            return at
        value = self._value
        at = value.feed(text, at, final=final)
        if not self._begun and value.first:
            if value.first != "{":
                self.failed = True
                return at
            self._begin()
        if value.out:
            self._calls.arguments(value.take())
        self.done, self.failed = value.done, value.failed
        if self.done:
            self._calls.end(value.first == "{")
        return at


class Object:
    """`names`, `keys`: the members that have the name and the arguments. Arguments that come before the name wait
    for it. Arguments that are JSON as text are taken out of their quotes."""

    def __init__(self, calls: Calls, dialect: Dialect, names: Collection[str], keys: Collection[str]) -> None:
        self._calls, self._dialect, self._names, self._keys = calls, dialect, names, keys
        self._expects = "brace"  # brace, key or end, key, colon, value, comma
        self._key = ""
        self._value: Value | None = None
        self._waiting: list[str] = []
        self._found = self._is_object = self.begun = False
        self.done = self.failed = False

    def feed(self, text: str, at: int, *, final: bool) -> int:
        while not self.done and not self.failed:
            at = _SPACES.match(text, at).end() if self._value is None else at  # type: ignore[union-attr]
            if at >= len(text):
                return at
            after = self._token(text, at, final)
            if after == at:
                return at
            at = after
        return at

    def _token(self, text: str, at: int, final: bool) -> int:
        if self._value is not None:
            return self._member(text, at, final)
        letter = text[at]
        match self._expects:
            case "brace" if letter == "{":
                self._expects = "key or end"
            case "key or end" | "comma" if letter == "}":
                self._end()
            case "comma" if letter == ",":
                self._expects = "key"
            case "colon" if letter == ":":
                self._expects = "value"
            case "key" | "key or end" if letter == '"' or self._dialect.bare_keys:
                return self._member(text, at, final)
            case "value":
                return self._member(text, at, final)
            case _:
                self.failed = True
                return at
        return at + 1

    def _member(self, text: str, at: int, final: bool) -> int:
        """Read a key or a value."""
        is_key = self._expects != "value"
        if self._value is None:
            self._value = _BareKey() if is_key and text[at] != '"' else Value(self._dialect)
        value = self._value
        at = value.feed(text, at, final=final)
        if not is_key and self._key in self._keys and value.out and value.first not in ("", '"'):
            self._is_object |= value.first == "{"
            self._say(value.take())
        if value.failed:
            self.failed = True
        elif value.done:
            written, self._value = value.take(), None
            if is_key:
                self._key, self._expects = json.loads(written), "colon"
            else:
                self._expects = "comma"
                self._known(written, value.first)
        return at

    def _known(self, written: str, first: str) -> None:
        """A member is complete. `written`: of its value, what was not said yet."""
        if self._key in self._names and not self.begun:
            name: str = json.loads(written) if first == '"' else ""
            if not is_name(name):
                self.failed = True
                return
            self.begun = True
            self._calls.begin(name)
            if self._waiting:
                self._calls.arguments("".join(self._waiting))
        elif self._key in self._keys:
            self._found = True
            if first == '"':
                inside: str = json.loads(written).encode(errors="replace").decode()
                self._is_object = inside.lstrip()[:1] == "{"
                self._say(inside)
            elif written:
                self._say(written)

    def _say(self, text: str) -> None:
        if self.begun:
            self._calls.arguments(text)
        else:
            self._waiting.append(text)

    def _end(self) -> None:
        self.done, self.failed = self.begun, not self.begun
        if self.begun:
            if not self._found:
                self._calls.arguments("{}")
            self._calls.end(self._is_object or not self._found)


class _BareKey(Value):
    """A key without quotes."""

    def __init__(self) -> None:
        super().__init__(Dialect(bare_keys=True))

    def feed(self, text: str, at: int, *, final: bool) -> int:
        found = _NAME.match(text, at)
        if found is None:
            self.failed = True
            return at
        if found.end() == len(text) and not final:
            return at
        self.out.append(quoted(found[0]))
        self.done, self.first = True, '"'
        return found.end()


class Listed:
    """A list of objects, or one object without a list."""

    def __init__(self, calls: Calls, dialect: Dialect, names: Collection[str], keys: Collection[str]) -> None:
        self._new: Callable[[], Object] = partial(Object, calls, dialect, names, keys)
        self._object: Object | None = None
        self._expects = "bracket"  # bracket, object or end, object, comma
        self._alone = False
        self.done = self.failed = False

    def feed(self, text: str, at: int, *, final: bool) -> int:
        while not self.done and not self.failed:
            if self._object is not None:
                at = self._object.feed(text, at, final=final)
                if not self._object.done and not self._object.failed:
                    return at
                self.failed, self.done = self._object.failed, self._alone and self._object.done
                self._object, self._expects = None, "comma"
                continue
            at = _SPACES.match(text, at).end()  # type: ignore[union-attr]
            if at >= len(text):
                return at
            letter = text[at]
            if letter == "[" and self._expects == "bracket":
                self._expects, at = "object or end", at + 1
            elif letter == "{" and self._expects != "comma":
                self._alone = self._expects == "bracket"
                self._object = self._new()
            elif letter == "]" and self._expects in ("object or end", "comma"):
                self.done, at = True, at + 1
            elif letter == "," and self._expects == "comma":
                self._expects, at = "object", at + 1
            else:
                self.failed = True
        return at


class Tagged:
    """`between`: the head of an argument is the mark 0, the end of the call the mark 1, which the caller reads.
    `kinds`: the types of the tool's parameters. A parameter without a type has the type `plain`."""

    def __init__(self, calls: Calls, name: str, between: Marks, tail: Marks, kinds: Mapping[str, str], plain: str):
        self._calls, self._between, self._tail, self._kinds, self._plain = calls, between, tail, kinds, plain
        self._kind: str | None = None  # of the argument that is being read
        self._texts: list[str] = []
        self._any = False
        self.done = False
        self.failed = not is_name(name)
        if not self.failed:
            calls.begin(name)

    def feed(self, text: str, at: int, *, final: bool) -> int:
        while not self.done and not self.failed:
            marks = self._between if self._kind is None else self._tail
            found = marks.find(text, at, final=final)
            until = found.start if isinstance(found, Mark) else found
            if self._kind is not None and until > at:
                self._read(text[at:until])
            if not isinstance(found, Mark):
                return until
            at = found.end
            if self._kind is not None:
                self._close(self._kind)
            elif found.number == 0:
                self._open(marks.captures(text, found).get("key", ""))
            else:
                self._calls.arguments("}" if self._any else "{}")
                self._calls.end(True)
                self.done = True
                at = found.start  # the caller reads the end
        return at

    def _open(self, key: str) -> None:
        self._calls.arguments(f"{', ' if self._any else '{'}{quoted(key)}: ")
        self._any = True
        self._kind = self._kinds.get(key, self._plain)
        if self._kind == "string":
            self._calls.arguments('"')

    def _read(self, text: str) -> None:
        if self._kind == "string":
            self._calls.arguments(escaped(text))
        else:
            self._texts.append(text)

    def _close(self, kind: str) -> None:
        self._calls.arguments('"' if kind == "string" else typed("".join(self._texts), kind))
        self._kind = None
        self._texts.clear()


class PythonCalls:
    """`needs`: as for `Arguments`. `opened`: the bracket was in the opening mark."""

    def __init__(self, calls: Calls, needs: Collection[str] | None, *, opened: bool) -> None:
        self._calls, self._needs = calls, needs
        self._expects = "name" if opened else "bracket"  # or key or end, key, equals, comma, next
        self._value: Value | None = None
        self._any = False
        self.done = self.failed = False

    def feed(self, text: str, at: int, *, final: bool) -> int:
        while not self.done and not self.failed:
            if self._value is None:
                at = _SPACES.match(text, at).end()  # type: ignore[union-attr]
            if at >= len(text):
                return at
            after = self._token(text, at, final)
            if after == at:
                return at
            at = after
        return at

    def _token(self, text: str, at: int, final: bool) -> int:
        if self._value is not None:
            return self._read_value(text, at, final)
        letter, expects = text[at], self._expects
        if expects in ("name", "key or end", "key") and (found := _NAME.match(text, at)) is not None:
            return self._named(text, found, final)
        match expects:
            case "bracket" if letter == "[":
                self._expects = "name"
            case "equals" if letter == "=":
                self._expects, self._value = "comma", Value(PYTHON)
            case "comma" if letter == ",":
                self._expects = "key"
            case "key or end" | "comma" if letter == ")":
                self._calls.arguments("}" if self._any else "{}")
                self._calls.end(True)
                self._expects = "next"
            case "next" if letter == ",":
                self._expects = "name"
            case "next" if letter == "]":
                self.done = True
            case _:
                self.failed = True
                return at
        return at + 1

    def _named(self, text: str, found: re.Match[str], final: bool) -> int:
        """A tool's name and its parenthesis, or a key."""
        at, end = found.start(), found.end()
        if end - at > MOST_NAME:
            self.failed = True
            return at
        if end == len(text) and not final:
            return at
        if self._expects == "name":
            if end >= len(text) or text[end] != "(" or (self._needs is not None and found[0] not in self._needs):
                self.failed = True
                return at
            self._any, self._expects = False, "key or end"
            self._calls.begin(found[0])
            return end + 1
        self._calls.arguments(f"{', ' if self._any else '{'}{quoted(found[0])}: ")
        self._any, self._expects = True, "equals"
        return end

    def _read_value(self, text: str, at: int, final: bool) -> int:
        value = self._value
        assert value is not None
        at = value.feed(text, at, final=final)
        if value.out:
            self._calls.arguments(value.take())
        if value.failed:
            self.failed = True
        elif value.done:
            self._value = None
        return at

"""Parses tool calls, which stand between marks: a reader for each way in which families write calls.

A reader is fed the text after the opening mark, and tells `Calls` what it finds as soon as that is certain. It is
`done` after the last character of the calls, or `failed` at the first one that cannot belong to any.

    Arguments    the arguments as one value; the name was in the opening mark
    JsonCall     {"name": ..., "arguments": ...}
    JsonCalls    [{"name": ..., "arguments": ...}, ...]
    PythonCalls  [name(key=value, ...), ...]

`tagged_tool_calls` has the one for a tag around each argument.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Protocol

from petiole.tasks.output_parsing.json_values import JSON, PYTHON, Dialect, Value, bare_key_at, key_at, quoted

MOST_NAME = 256
_SPACES = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[\w.-]+")
_QUOTED = re.compile(r"""(["'])(?P<name>.+?)\1(?:\s.*)?""", re.DOTALL)
_NEXT_LIST = re.compile(r"\][ \t\n\r]{0,16}\[[ \t\n\r]{0,16}(?=\{)")
_NEXT_LIST_BEGUN = re.compile(r"\][ \t\n\r]{0,16}(?:\[[ \t\n\r]{0,16})?\Z")


class Calls(Protocol):
    """What a reader tells."""

    def begin(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self, complete: bool) -> None: ...


class Body(Protocol):
    done: bool
    failed: bool

    def feed(self, text: str, at: int, *, final: bool) -> int:
        """Read from `at` on, at most one call. Returns the place up to which it was read; the rest must be fed
        again: at once if a call has ended, else with more."""


def is_name(name: object) -> bool:
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME:
        return False
    return name.encode(errors="ignore").decode() == name  # no lone surrogate


def meant(written: str, known: Collection[str]) -> str:
    """The name that a model means: models put spaces and quotes around it, and attributes behind the quotes."""
    name = written.strip()
    if name not in known and (found := _QUOTED.fullmatch(name)):
        return found["name"]
    return name


class Arguments:
    """`needs`: the tools of which one must have this name, or else this is no call. Its arguments begin with a
    brace then. `keys`: the tool's parameters."""

    def __init__(
        self,
        calls: Calls,
        name: str,
        dialect: Dialect = JSON,
        needs: Collection[str] | None = None,
        keys: Collection[str] = (),
    ) -> None:
        self._calls, self._name, self._value = calls, name, Value(dialect, keys)
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


class _Tokens(ABC):
    """Base of the readers that read token by token. Spaces stand between tokens, and belong to values."""

    _value: Value | None = None
    done = failed = _call_ended = False

    def feed(self, text: str, at: int, *, final: bool) -> int:
        self._call_ended = False
        while not (self.done or self.failed or self._call_ended):
            at = _SPACES.match(text, at).end() if self._value is None else at  # type: ignore[union-attr]
            if at >= len(text):
                return at
            after = self._token(text, at, final)
            if after == at:
                return at
            at = after
        return at

    @abstractmethod
    def _token(self, text: str, at: int, final: bool) -> int:
        """Read one token. Returns the place after it, or `at` if more text is needed."""


class JsonCall(_Tokens):
    """`names`, `keys`: the members that have the name and the arguments. Arguments that come before the name wait
    for it. Arguments that are JSON as text are taken out of their quotes."""

    def __init__(self, calls: Calls, dialect: Dialect, names: Collection[str], keys: Collection[str]) -> None:
        self._calls, self._dialect, self._names, self._keys = calls, dialect, names, keys
        self._expects = "brace"  # brace, key or end, colon, value, comma
        self._key = ""
        self._waiting: list[str] = []
        self.found = self._is_object = self.begun = False

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
                self._expects = "key or end"  # models write a comma too many
            case "colon" if letter == ":":
                self._expects = "value"
            case "key or end" if letter == '"' or self._dialect.bare_keys:
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
            self.found = True
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
            if not self.found:
                self._calls.arguments("{}")
            self._calls.end(self._is_object or not self.found)


class _BareKey(Value):
    """A key without quotes."""

    def __init__(self) -> None:
        super().__init__(Dialect(bare_keys=True))

    def feed(self, text: str, at: int, *, final: bool) -> int:
        key, end = bare_key_at(text, at, final=final)
        if not key:
            self.failed = end < 0
            return at
        self.out.append(quoted(key))
        self.done, self.first = True, '"'
        return end


class JsonCalls:
    """A list of objects, or one object without a list. A comma between two may be missing, and models end the list
    and begin another for the next call. `given`: whether each object has arguments."""

    def __init__(self, calls: Calls, dialect: Dialect, names: Collection[str], keys: Collection[str]) -> None:
        self._new: Callable[[], JsonCall] = partial(JsonCall, calls, dialect, names, keys)
        self._object: JsonCall | None = None
        self._expects = "bracket"  # bracket, object or end, comma
        self._alone = False
        self.given = True
        self.done = self.failed = False

    def feed(self, text: str, at: int, *, final: bool) -> int:
        while not self.done and not self.failed:
            if self._object is not None:
                at = self._object.feed(text, at, final=final)
                self.given &= self._object.found or not self._object.done
                if not self._object.done and not self._object.failed:
                    return at
                self.failed, self.done = self._object.failed, self._alone and self._object.done
                self._object, self._expects = None, "comma"
                return at
            at = _SPACES.match(text, at).end()  # type: ignore[union-attr]
            if at >= len(text):
                return at
            letter = text[at]
            if letter == "[" and self._expects == "bracket":
                self._expects, at = "object or end", at + 1
            elif letter == "{":
                self._alone = self._expects == "bracket"
                self._object = self._new()
            elif letter == "]" and self._expects in ("object or end", "comma"):
                if not final and _NEXT_LIST_BEGUN.match(text, at):
                    return at
                following = _NEXT_LIST.match(text, at)
                self.done, self._expects = following is None, "object or end"
                at = at + 1 if following is None else following.end()
            elif letter == "," and self._expects == "comma":
                self._expects, at = "object or end", at + 1
            else:
                self.failed = True
        return at


class PythonCalls(_Tokens):
    """`tools`: the parameters of each. `needs`: as for `Arguments`. `opened`: the bracket was in the opening
    mark."""

    def __init__(
        self, calls: Calls, tools: Mapping[str, Collection[str]], needs: Collection[str] | None, *, opened: bool
    ) -> None:
        self._calls, self._tools, self._needs = calls, tools, needs
        self._keys: Collection[str] = ()
        self._expects = "name" if opened else "bracket"  # or key or end, key, equals, comma, next
        self._any = False

    def _token(self, text: str, at: int, final: bool) -> int:
        if self._value is not None:
            return self._read_value(text, at, final)
        letter, expects = text[at], self._expects
        if expects in ("name", "key") or (expects == "key or end" and letter != ")"):
            return self._named(text, at, final)
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
                self._expects, self._call_ended = "next", True
            case "next" if letter == ",":
                self._expects = "name"
            case "next" if letter == "]":
                self.done = True
            case _:
                self.failed = True
                return at
        return at + 1

    def _named(self, text: str, at: int, final: bool) -> int:
        """A tool's name and its parenthesis, or a key."""
        calls = self._expects == "name"
        known = self._tools if calls else self._keys
        name, end = key_at(text, at, _NAME, "(" if calls else "=", known, final=final)
        if not name:
            self.failed = end < 0
            return at
        if not calls:
            self._calls.arguments(f"{', ' if self._any else '{'}{quoted(name)}: ")
            self._any, self._expects = True, "equals"
            return end
        if not is_name(name) or (self._needs is not None and name not in self._needs):
            self.failed = True
            return at
        self._any, self._expects, self._keys = False, "key or end", self._tools.get(name, ())
        self._calls.begin(name)
        return _SPACES.match(text, end).end() + 1  # type: ignore[union-attr]

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

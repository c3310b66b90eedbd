"""One JSON value, read as it comes, and written as JSON.

Strict JSON goes through as it is, but for control characters in strings, which are escaped. A `Dialect` says what
else a family writes: keys without quotes, other quotes, Python's words. It goes through as the JSON that it means.
No recursion: a value may be nested as deeply as it likes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

_PLAIN = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_SPACES = re.compile(r"[ \t\n\r]+")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_LITERAL = re.compile(r"[-+.0-9A-Za-z_]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null"}
_PYTHON = {**_WORDS, "True": "true", "False": "false", "None": "null"}
_BARE_KEY = re.compile(r"""[^:,{}\[\]"'\x00-\x1f]+""")
LONGEST_LITERAL = 1024


@dataclass(frozen=True)
class Dialect:
    """`quotes`: pairs of texts that begin and end a string in which no escapes are read."""

    bare_keys: bool = False
    quotes: tuple[tuple[str, str], ...] = ()
    python: bool = False


JSON, PYTHON = Dialect(), Dialect(python=True)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """As it stands inside quotes."""
    return quoted(text)[1:-1]


def key_at(
    text: str, at: int, plain: re.Pattern[str], end: str, known: Collection[str], *, final: bool
) -> tuple[str, int]:
    """A key without quotes, and the place behind it, where `end` follows: the longest one that is `known`, or else
    one that is `plain`. An empty key: there is none; at `at`, more text must decide."""
    rest = text[at : at + LONGEST_LITERAL]
    if not final and any(len(key) >= len(rest) and key.startswith(rest) for key in known):
        return "", at
    for key in sorted(known, key=len, reverse=True):
        if rest.startswith(key) and rest[len(key) :].lstrip(" ").startswith(end):
            return key, at + len(key)
        if not final and rest.startswith(key) and not rest[len(key) :].strip(" "):
            return "", at
    found = plain.match(text, at)
    behind = at if found is None else found.end()
    if found is None or len(found[0]) > LONGEST_LITERAL or not found[0].strip():
        return "", -1
    if (spaces := _SPACES.match(text, behind)) is not None:
        behind = spaces.end()
    if behind == len(text):
        return "", -1 if final else at
    return (found[0].strip(), behind) if text[behind:].startswith(end) else ("", -1)


def bare_key_at(text: str, at: int, known: Collection[str] = (), *, final: bool) -> tuple[str, int]:
    return key_at(text, at, _BARE_KEY, ":", known, final=final)


def is_bare_key(key: str) -> bool:
    """Whether an object without quotes around its keys may have it."""
    return _BARE_KEY.fullmatch(key) is not None and key == key.strip()


class Value:
    """The reader of one value. `out`: what is written so far, for the caller to take. `done`: the value is
    complete. `failed`: what comes is no such value. `keys`: names that the value itself may have, if it is an
    object."""

    __slots__ = ("_dialect", "_end", "_escapes", "_expects", "_keys", "_open", "done", "failed", "first", "out")

    def __init__(self, dialect: Dialect = JSON, keys: Collection[str] = ()) -> None:
        self._dialect, self._keys = dialect, keys
        self._open: list[str] = []
        self._expects = "value"  # value, value or end, key, key or end, colon, comma
        self._end = ""  # of the string that is being read
        self._escapes = False  # the string has escapes
        self.done = self.failed = False
        self.first = ""
        self.out: list[str] = []

    def take(self) -> str:
        """What was written since the last call."""
        text = "".join(self.out)
        self.out.clear()
        return text

    def feed(self, text: str, at: int, *, final: bool) -> int:
        """Read from `at` on. Returns the place up to which it was read; the rest must be fed again, with more."""
        size = len(text)
        while at < size and not self.done and not self.failed:
            if self._end:
                after = self._escaped_string(text, at) if self._escapes else self._quoted_string(text, at)
            elif (spaces := _SPACES.match(text, at)) is not None:
                after = spaces.end()
                if self._open:
                    self.out.append(spaces[0])
            else:
                after = self._token(text, at, final)
            if after == at:
                return at
            at = after
        return at

    # ------------------------------------------------------------ tokens

    def _token(self, text: str, at: int, final: bool) -> int:
        letter, expects = text[at], self._expects
        if expects in ("colon", "comma"):
            return self._between(letter, at)
        if letter in "}]" and expects.endswith("or end") and self._closes(letter):
            return at + 1
        key = expects.startswith("key")
        if (begun := self._begin_string(text, at, final)) >= 0:
            return begun
        if not key and letter in "{[":
            self.first = self.first or letter
            self._open.append(letter)
            self.out.append(letter)
            self._expects = "key or end" if letter == "{" else "value or end"
            return at + 1
        return self._bare_key(text, at, final) if key else self._literal(text, at, final)

    def _between(self, letter: str, at: int) -> int:
        if self._expects == "colon" and letter == ":":
            self._expects = "value"
        elif self._expects == "comma" and letter == ",":
            self._expects = "key" if self._open[-1] == "{" else "value"
        elif self._expects == "comma" and letter in "}]" and self._closes(letter):
            return at + 1
        else:
            return self._fail(at)
        self.out.append(letter)
        return at + 1

    def _closes(self, letter: str) -> bool:
        if not self._open or self._open[-1] + letter not in ("{}", "[]"):
            return False
        self._open.pop()
        self.out.append(letter)
        self._ended()
        return True

    def _ended(self, key: bool = False) -> None:
        """A value or a key has ended."""
        self._expects = "colon" if key else "comma"
        self.done = not key and not self._open

    def _fail(self, at: int) -> int:
        self.failed = True
        return at

    def _bare_key(self, text: str, at: int, final: bool) -> int:
        if not self._dialect.bare_keys:
            return self._fail(at)
        key, end = bare_key_at(text, at, self._keys if len(self._open) == 1 else (), final=final)
        if not key:
            return self._fail(at) if end < 0 else at
        self.out.append(quoted(key))
        self._ended(key=True)
        return end

    def _literal(self, text: str, at: int, final: bool) -> int:
        found = _LITERAL.match(text, at)
        if found is None or len(found[0]) > LONGEST_LITERAL:
            return self._fail(at)
        if found.end() == len(text) and not final:
            return at
        word = found[0]
        if NUMBER.fullmatch(word):
            self.out.append(word)
        elif (known := (_PYTHON if self._dialect.python else _WORDS).get(word)) is not None:
            self.out.append(known)
        else:
            return self._fail(at)
        self.first = self.first or word[0]
        self._ended()
        return found.end()

    # ------------------------------------------------------------ strings

    def _begin_string(self, text: str, at: int, final: bool) -> int:
        """The place after a quote; `at` if more text must decide; -1 if no string begins."""
        letter = text[at]
        if letter == '"' or (letter == "'" and self._dialect.python):
            self._end, self._escapes = letter, True
            return self._opened(at + 1)
        for begin, end in self._dialect.quotes:
            if text.startswith(begin, at):
                self._end, self._escapes = end, False
                return self._opened(at + len(begin))
            if not final and begin.startswith(text[at:]):
                return at
        return -1

    def _opened(self, at: int) -> int:
        self.first = self.first or '"'
        self.out.append('"')
        return at

    def _closed(self, at: int) -> int:
        self.out.append('"')
        self._end = ""
        self._ended(self._expects.startswith("key"))
        return at

    def _escaped_string(self, text: str, at: int) -> int:
        quote, letter = self._end, text[at]
        if letter == quote:
            return self._closed(at + 1)
        if letter == "\\":
            if (escape := _ESCAPE.match(text, at)) is not None:
                self.out.append(escape[0])
                return escape.end()
            if len(text) < at + 2 or (text[at + 1] == "u" and len(text) < at + 6):
                return at
            if self._dialect.python and text[at + 1] == "'":
                self.out.append("'")
                return at + 2
            return self._fail(at)
        if (plain := _PLAIN[quote].match(text, at)) is not None:
            self.out.append(plain[0].replace('"', '\\"') if quote == "'" else plain[0])
            return plain.end()
        self.out.append(escaped(letter))
        return at + 1

    def _quoted_string(self, text: str, at: int) -> int:
        end = text.find(self._end, at)
        if end == at:
            return self._closed(at + len(self._end))
        until = end if end >= 0 else len(text) - _begun(text, at, self._end)
        self.out.append(escaped(text[at:until]))
        return until


def _begun(text: str, at: int, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    for size in range(min(len(mark) - 1, len(text) - at), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def whole(text: str, dialect: Dialect = PYTHON) -> tuple[str, str]:
    """A text that is one value, as JSON, and its first character; empty texts if it is none."""
    value = Value(dialect)
    end = value.feed(text, 0, final=True)
    if not value.done or text[end:].strip(" \t\n\r"):
        return "", ""
    return value.take(), value.first


def typed(text: str, kinds: str) -> str:
    """The text of an argument as JSON of one of these types, such as "integer|null"; as a string if it is none.
    Text that is JSON in quotes loses them where it may be something else than text, too: a value that would be
    read as something else is written so."""
    bare, among = text.strip(), kinds.split("|")
    value, first = whole(bare, JSON) if bare[:1] == '"' or among == ["any"] else ("", "")
    if first == '"' and not {"any", "string"} & {*among}:
        return _among(json.loads(value).strip(), among) or value  # a number in quotes, and the like
    return value or _among(bare, among) or quoted(text)


def _among(bare: str, kinds: Sequence[str]) -> str:
    """The JSON of one of these types that a text is; empty if it is none."""
    for kind in kinds:
        match kind:
            case "integer" if re.fullmatch(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?", bare):
                return bare.partition(".")[0]
            case "number" if NUMBER.fullmatch(bare):
                return bare
            case "boolean" if bare.lower() in ("true", "false"):
                return bare.lower()
            case "null" if bare in ("null", "None"):
                return "null"
            case "object" | "array":
                value, first = whole(bare)
                if first == ("{" if kind == "object" else "["):
                    return value
    return ""

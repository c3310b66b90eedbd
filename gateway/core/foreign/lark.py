"""A grammar in Lark's notation as one regular expression. Pure.

    start: begin line+            ->   BEGIN\\n(?:\\+.*\\n)+
    begin: "BEGIN" LF
    line: "+" /.*/ LF
    %import common.LF

Where no name needs itself, each one is replaced by what it stands for. A grammar has no expression if a name needs
itself, or if it has what is not read here: templates, flags, directives other than imports of Lark's own
terminals, and in expressions all that engines of expressions read in different ways, such as look-arounds."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

MOST = 4096
"""Characters of an expression: a short grammar could name its parts a billion times."""
MOST_TOLD = 4096
"""Characters of a grammar."""
_MOST_TIMES = 1000

_TOKEN = re.compile(
    r'(?P<gap>[ \t\r]+|//[^\n]*|\#[^\n]*)|(?P<line>\n\s*)|(?P<text>"(?:\\.|[^"\\\n])*")(?![a-z])'
    r"|/(?P<expression>(?:\\.|[^/\\\n*])(?:\\.|[^/\\\n])*)/(?![a-z])|(?P<name>\w+)|(?P<mark>\.\.|->|[()\[\]|?*+~:.!%,])"
)
_PLAIN = re.compile(
    r"(?:(?:\\(?:[dwsDWSnrtfv]|[^\w\s<>])"
    r"|\[(?:\^|(?!\^))(?:\\(?:[dwsDWSnrtfv]|[^\w\s<>])|[^\]\\\[&~-]|-(?!-))+\]"
    r"|\)|[^\\\[\](){}*+?^$|])(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})?(?![*+?{])|\((?:\?:|(?!\?))|\|)+"
)
"""An expression that all engines read alike, if its parentheses match."""
_QUOTED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]")
"""An escape, or a class: parentheses in it are none."""
_COMMON = {
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "SIGNED_INT": "[+-]?[0-9]+",
    "SIGNED_NUMBER": r"[+-]?(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
"""Lark's own terminals."""


class _Token(NamedTuple):
    kind: str
    text: str


class _NotReadError(Exception):
    pass


def expression(grammar: str) -> str | None:
    """What the rule `start` stands for. None: the grammar has no expression."""
    if len(grammar) > MOST_TOLD:
        return None
    try:
        return _Names(grammar).stands_for("start") or None
    except (_NotReadError, RecursionError):
        return None


class _Names:
    """What each name of a grammar stands for."""

    def __init__(self, grammar: str) -> None:
        self._bodies: dict[str, list[_Token]] = {}
        self._found: dict[str, str] = {}
        self._open: set[str] = set()
        for said in _statements(grammar):
            match [token.text for token in said]:
                case ["%", "import", "common", ".", name]:
                    self._import(name, name)
                case ["%", "import", "common", ".", name, "->", other]:
                    self._import(name, other)
                case ["%", "import", "common", "(", *names, ")"]:
                    for name in names[::2]:
                        self._import(name, name)
                case [name, ":", *_]:
                    self._bodies[name] = said[2:]
                case [("?" | "!"), name, ":", *_]:
                    self._bodies[name] = said[3:]
                case [name, ".", _, ":", *_]:  # a priority
                    self._bodies[name] = said[4:]
                case _:
                    raise _NotReadError

    def _import(self, name: str, other: str) -> None:
        if name not in _COMMON:
            raise _NotReadError
        self._found[other] = _COMMON[name]

    def stands_for(self, name: str) -> str:
        if name not in self._found:
            if name in self._open or name not in self._bodies:
                raise _NotReadError
            self._open.add(name)
            rest = deque(self._bodies[name])
            self._found[name] = self._choice(rest)
            if rest:
                raise _NotReadError
        return self._found[name]

    def _choice(self, rest: deque[_Token]) -> str:
        found = [self._sequence(rest)]
        total = len(found[0])
        while _next(rest, "|"):
            found.append(self._sequence(rest))
            total += len(found[-1])
            if total > MOST:
                raise _NotReadError
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _sequence(self, rest: deque[_Token]) -> str:
        found = ""
        while rest and not (rest[0].kind == "mark" and rest[0].text in "|)]"):
            if _next(rest, "->"):  # a name for the tree
                rest.popleft()
            else:
                found += self._item(rest)
            if len(found) > MOST:
                raise _NotReadError
        return found

    def _item(self, rest: deque[_Token]) -> str:
        found = self._atom(rest)
        for mark in "?*+":
            if _next(rest, mark):
                return f"(?:{found}){mark}"
        if _next(rest, "~"):
            least = most = _number(rest)
            if _next(rest, ".."):
                most = _number(rest)
            return f"(?:{found}){{{least},{most}}}"
        return found

    def _atom(self, rest: deque[_Token]) -> str:
        if not rest:
            raise _NotReadError
        match rest.popleft():
            case ("text", text):
                first = _unquoted(text)
                if not _next(rest, ".."):
                    return _escaped(first)
                last = _unquoted(rest.popleft().text) if rest and rest[0].kind == "text" else ""
                if not (len(first) == len(last) == 1 and first.isalnum() and last.isalnum()):
                    raise _NotReadError
                return f"[{first}-{last}]"
            case ("expression", text):
                text = text.replace(r"\/", "/")
                if not (_PLAIN.fullmatch(text) and _matching(text)):
                    raise _NotReadError
                return f"(?:{text})"
            case ("name", name):
                return self.stands_for(name)
            case ("mark", ("(" | "[") as mark):
                found = self._choice(rest)
                if not _next(rest, ")" if mark == "(" else "]"):
                    raise _NotReadError
                return f"(?:{found})" if mark == "(" else f"(?:{found})?"
        raise _NotReadError


def _statements(grammar: str) -> Iterator[list[_Token]]:
    """A line goes on in the next one, if that begins with a bar."""
    said: list[_Token] = []
    broken = False
    for token in _tokens(grammar):
        if token.kind == "line":
            broken = True
            continue
        if broken and said and token != ("mark", "|"):
            yield said
            said = []
        broken = False
        said.append(token)
    if said:
        yield said


def _tokens(grammar: str) -> Iterator[_Token]:
    at = 0
    while at < len(grammar):
        if (found := _TOKEN.match(grammar, at)) is None:
            raise _NotReadError
        at = found.end()
        kind = str(found.lastgroup)
        if kind != "gap":
            yield _Token(kind, found[kind])


def _next(rest: deque[_Token], mark: str) -> bool:
    """Whether this mark is next; it is taken then."""
    if rest and rest[0] == ("mark", mark):
        rest.popleft()
        return True
    return False


def _matching(text: str) -> bool:
    """Whether its parentheses do."""
    depth = 0
    for mark in _QUOTED.sub("", text):
        depth += (mark == "(") - (mark == ")")
        if depth < 0:
            return False
    return depth == 0


def _number(rest: deque[_Token]) -> int:
    if not rest or not re.fullmatch("[0-9]{1,4}", rest[0].text) or (found := int(rest[0].text)) > _MOST_TIMES:
        raise _NotReadError
    rest.popleft()
    return found


def _unquoted(text: str) -> str:
    try:
        found = str(json.loads(text))
        found.encode()  # which refuses half a surrogate
    except ValueError:
        raise _NotReadError from None
    return found


def _escaped(text: str) -> str:
    """An expression for this text."""
    found = re.sub(r"[\\.^$|?*+()\[\]{}]", r"\\\g<0>", text)
    return found.replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")

"""Regular expressions of schemas.

`pattern` and `patternProperties` search: an expression without anchors may match anywhere. The terminals of a
grammar match as a whole. Expressions for values are left to the grammar library, which also escapes what JSON must
escape. Expressions for keys become terminals here, so that keys may match one expression and not another. Such
keys contain nothing that JSON must escape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache, lru_cache

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from petiole.gpu_worker.exceptions import InvalidRequest

MAX_REPEATS = 10_000
"""Maximum count in a regular expression's `{n,m}`, because the cost of masks grows with it."""

KEPT = 64
"""How many answers about expressions are kept; an answer has the expression, which may be as large as a schema."""

_KEPT_SEARCHERS = 16
"""How many expressions are kept ready to search: each takes some twenty times its text. An object needs a few at
a time."""

_REPEATS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*),?(\d*)\}", re.DOTALL)
"""An escaped letter, a class, or counts."""

UNSATISFIABLE = "Unsatisfiable schema"
"""How a fault begins if the patterns are good, but no string has all of them."""

_NOT_ONLY_SIGNS = re.compile(r"\^\(\?!\^\[-\+\.\]\*\$\)")
"""How pydantic's expression for a `Decimal` begins: a look-ahead that bars text of signs and points alone."""


def check_repeats(field: str, expression: str) -> None:
    """Refuse counts that are too high. Braces that are escaped or in a class count nothing."""
    for counts in _REPEATS.finditer(expression):
        if any(count and int(count[:9]) > MAX_REPEATS for count in counts.groups()):
            raise InvalidRequest(field, f"must repeat at most {MAX_REPEATS} times", counts[0])


def without_lookahead(pattern: str) -> tuple[str, ...]:
    """Patterns that together are `pattern`, without the look-ahead of pydantic's."""
    begins = _NOT_ONLY_SIGNS.match(pattern)
    return (pattern,) if begins is None else ("^" + pattern[begins.end() :], "[^-+.]")


@lru_cache(maxsize=KEPT)
def fault(*patterns: str, low: int = 0, high: int | None = None) -> str:
    """Why no string of these lengths can have all the patterns; "" if one can."""
    schema = {"type": "string", "minLength": low, "allOf": [{"pattern": pattern} for pattern in patterns]}
    schema |= {} if high is None else {"maxLength": high}
    said: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return " ".join(said.split())


def found(field: str, pattern: str, text: str) -> bool:
    """Whether a pattern is found in a text of the schema itself. Takes time in proportion to the text, unlike
    Python's expressions."""
    matcher = _searcher(field, pattern).deep_copy()
    letters = text.encode()
    return bool(matcher.try_consume_tokens(list(letters)) == len(letters) and matcher.is_accepting())


@lru_cache(maxsize=_KEPT_SEARCHERS)
def _searcher(field: str, pattern: str) -> LLMatcher:
    grammar = LLMatcher.grammar_from_lark(f"start: K\nK: /{whole(pattern)}/\n")
    matcher = LLMatcher(single_bytes(), grammar, log_level=0)
    if matcher.is_error():
        raise InvalidRequest(field, "must have anchors only at the ends of a pattern for keys or values", pattern)
    return matcher


@cache
def single_bytes() -> LLTokenizer:
    """A tokenizer with a token a byte."""
    return LLTokenizer("byte")


def whole(pattern: str) -> str:
    """An expression that matches, as a whole, every text in which `pattern` is found."""
    return "|".join(_whole(part) for part in _alternatives(regex_to_lark(pattern, "dw")))


def _whole(part: str) -> str:
    begins, ends = part.startswith("^"), part.endswith("$") and not part.endswith(r"\$")
    middle = part[begins : len(part) - ends]
    return f"{'' if begins else '(?s:.*)'}({middle}){'' if ends else '(?s:.*)'}"


def _alternatives(pattern: str) -> Iterator[str]:
    """The parts between the bars of a pattern that are in no group and no class."""
    begin, depth, classes, k = 0, 0, 0, 0
    while k < len(pattern):
        letter = pattern[k]
        if letter == "\\":
            k += 1
        elif letter == "[":
            classes += 1
        elif letter == "]" and classes:
            classes -= 1
        elif not classes:
            depth += (letter == "(") - (letter == ")")
            if letter == "|" and depth == 0:
                yield pattern[begin:k]
                begin = k + 1
        k += 1
    yield pattern[begin:]

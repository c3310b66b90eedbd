"""Compiles a request's constraint into the initial state of its sequence."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, reduce
from typing import Any

from llguidance import LLMatcher

from petiole.gpu_worker.constraints import calls
from petiole.gpu_worker.constraints.budget import Budget, BudgetState, Place
from petiole.gpu_worker.constraints.grammar import vocabulary_of
from petiole.gpu_worker.constraints.proving import proved
from petiole.gpu_worker.constraints.schema import grammar_of
from petiole.gpu_worker.constraints.schema.patterns import check_repeats
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request import Constraint, ConstraintKind
from petiole.gpu_worker.request.protocols import ConstraintState
from petiole.gpu_worker.request.requests import check_text, plain_data
from petiole.gpu_worker.text import Tokenizer

MAX_BYTES = 512 * 1024
"""Maximum size of a constraint as JSON text."""

MAX_MULTIPLE = 100_000
"""Maximum sum of a schema's `multipleOf` numbers. A number counts as its digits, without zeros at the end. Numbers
that may apply to the same value count as their least common multiple. Compiling takes time and memory in
proportion to the sum: at the limit, half a second. Without a limit, two alternatives of 100,000 take minutes and
gigabytes."""

_JOINING = {"anyOf", "oneOf", "allOf", "$ref"}
"""Keywords that add schemas for the same value."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|(?://|#)[^\n]*|/(?:\\.|[^/\\])+/|%json\s*')
"""In a grammar: a string, a comment, a regular expression, or where a schema begins."""

_MULTIPLE = re.compile(r'"multipleOf"\s*:\s*([-+.\deE]+)')
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


def compile_constraint(constraint: Constraint, tokenizer: Tokenizer) -> ConstraintState:
    """The initial state of a constraint. Raises InvalidRequest with a field that starts with "constraint".

    Slow for a new tokenizer or constraint: call it on a preparation thread."""
    kind, field = constraint.kind, f"constraint.{constraint.kind}"
    if kind not in _SOURCES and kind != "calls":
        raise InvalidRequest("constraint.kind", "must be json_schema, regex, choice, grammar or calls", kind)
    text = json.dumps(plain_data(field, constraint.value))
    if len(text) > MAX_BYTES:
        raise InvalidRequest(field, f"must be at most {MAX_BYTES} characters as JSON", f"{len(text)} characters")
    value = json.loads(text)
    budget = value.pop("budget", None) if kind == "calls" and isinstance(value, dict) else None
    if budget is not None and value.get("free"):
        return _limited(budget, value, None, tokenizer)
    vocabulary = vocabulary_of(tokenizer)
    text = text if budget is None else json.dumps(value)  # a budget changes no grammar
    state = vocabulary.grammar(proved(kind, text, vocabulary, tokenizer), field, constraint.value).start()
    return state if budget is None else _limited(budget, value, state, tokenizer)


def _limited(most: int, value: Any, inner: ConstraintState | None, tokenizer: Tokenizer) -> ConstraintState:
    """A constraint of kind "calls" whose thought has a budget."""
    thought, thinks = value.get("thought"), value.get("thinks", "free")
    if thought is None:
        thought, thinks = {"open": "", "close": ""}, "closed"
    end = thought["close"] + thought.get("after", "")

    @lru_cache
    def closing(begun: int) -> tuple[int, ...]:
        return tuple(tokenizer.encode(end[begun:], add_special_tokens=False))

    limit = Budget(
        most,
        thought["open"].lstrip().encode(),
        thought["close"],
        closing,
        tokenizer.token_bytes,
        tokenizer.vocab_size,
    )
    return BudgetState.begin(limit, inner, _PLACES[thinks])


def source_of(kind: str, text: str, special: frozenset[tuple[str, int]]) -> str:
    """The grammar of a constraint's value, given as JSON text. `special`: as in `Vocabulary`. Raises
    InvalidRequest. It may take long, or crash: for the child alone."""
    value = json.loads(text)
    if kind == "calls":
        return calls.source_of(value, dict(special), _SOURCES)
    return next(make for known, make in _SOURCES.items() if known == kind)(f"constraint.{kind}", value)


def warm_up(tokenizer: Tokenizer) -> None:
    """Do the one-time work for a tokenizer. Does not raise InvalidRequest; compiling a constraint will."""
    with suppress(InvalidRequest):
        compile_constraint(Constraint("json_schema", {}), tokenizer)


def _json_schema(field: str, value: Any) -> str:
    if value is False:
        raise InvalidRequest(field, "allows no value at all", "false")
    if value is not True and not isinstance(value, Mapping):
        raise InvalidRequest(field, "must be a JSON schema (an object)", type(value).__name__)
    schema = {} if value is True else dict(value)
    _check_multiples(f"{field}.multipleOf", _multiples(schema))
    return str(LLMatcher.grammar_from_lark(grammar_of(field, schema)))


def _choice(field: str, value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidRequest(field, "must be a list of one or more strings", value)
    choices = [check_text(f"{field}[{k}]", choice) for k, choice in enumerate(value)]
    literals = " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))
    return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {literals}"))


def _regex(field: str, value: Any) -> str:
    text = _expression(field, value)
    check_repeats(field, text)
    return str(LLMatcher.grammar_from_regex(text))


def _grammar(field: str, value: Any) -> str:
    text = _expression(field, value)
    for part in _without_literals(text):
        check_repeats(field, part)
    return str(LLMatcher.grammar_from_lark(text))


def _without_literals(grammar: str) -> Iterator[str]:
    """The parts of a grammar that may contain counts: all but its string literals and comments. A schema counts
    as one part, whose strings may be patterns."""
    begin = 0
    while (found := _LITERAL.search(grammar, begin)) is not None:
        yield grammar[begin : found.start()]
        begin = found.end()
        if found[0].startswith("%json"):
            with suppress(ValueError, RecursionError):
                begin = json.JSONDecoder().raw_decode(grammar, begin)[1]
            yield grammar[found.end() : begin]
        elif found[0].startswith("/") and not found[0].startswith("//"):
            yield found[0]
    yield grammar[begin:]


def _expression(field: str, value: Any) -> str:
    """A regular expression, or a grammar that contains regular expressions."""
    text = check_text(field, value)
    if not text.strip():
        raise InvalidRequest(field, "must not be empty", repr(text))
    unescaped = _ESCAPE.sub(lambda letter: chr(int(letter[1], 16)), text)  # a grammar may contain JSON schemas
    _check_multiples(field, [_MULTIPLE.findall(unescaped)])
    return text


def _multiples(schema: Any) -> list[list[Any]]:
    """Every `multipleOf` in a schema. Numbers that may apply to the same value are in one list. References are not
    followed: if one may add a number, all numbers of the schema are in one list."""
    groups = list(_groups(schema))
    return [group for group in groups if group is not None] if None not in groups else [_all("multipleOf", schema)]


def _groups(part: Any) -> Iterator[list[Any] | None]:
    """The lists of `_multiples` in a part of the schema; None if a reference may add to a list."""
    if isinstance(part, dict):
        if not _JOINING.isdisjoint(part):
            references, numbers = _all("$ref", part), _all("multipleOf", part)
            yield None if len(references) > 1 or (references and numbers) else numbers
            return
        yield [part.get("multipleOf")]
    for each in _parts(part):
        yield from _groups(each)


def _all(keyword: str, part: Any) -> list[Any]:
    """All values of a keyword, anywhere in a part of a schema."""
    own = [part[keyword]] if isinstance(part, dict) and keyword in part else []
    return own + [value for each in _parts(part) for value in _all(keyword, each)]


def _parts(part: Any) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()


def _check_multiples(field: str, groups: Iterable[Iterable[Any]]) -> None:
    """`groups`: numbers, or their text; those of one group may apply to the same value. Other values are
    ignored."""
    total = sum({reduce(_common, map(_digits, numbers), 1) for numbers in groups} - {1})
    if total > MAX_MULTIPLE:
        limit = f"must add up to at most {MAX_MULTIPLE} (least common multiples where several may hold)"
        raise InvalidRequest(field, limit, total)


def _common(multiple: int, number: int) -> int:
    return math.lcm(multiple, number) if multiple <= MAX_MULTIPLE else multiple


def _digits(number: Any) -> int:
    """The number's digits without zeros at its ends, because powers of ten cost nothing."""
    if not isinstance(number, int | float | str):
        return 1
    digits = "".join(filter(str.isdecimal, str(number).lower().partition("e")[0])).strip("0")
    return int(digits[:99] or 1)  # Python refuses to convert thousands


_PLACES: Mapping[str, Place] = {
    "open": "inside",
    "free": "before",
    "closed": "behind",
}
"""By how the prompt ends: where the output begins."""

_SOURCES: dict[ConstraintKind, Callable[[str, Any], str]] = {
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}

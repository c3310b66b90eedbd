"""From a request's constraint to the state that its sequence starts with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from gpu_worker.constraints.grammar import GrammarState, vocabulary_of
from gpu_worker.errors import InvalidRequest
from gpu_worker.request import Constraint
from gpu_worker.text import Tokenizer
from gpu_worker.text.checks import check_text, plain_data

MAX_BYTES = 128 * 1024
"""The largest constraint, as JSON text."""

_WHITESPACE = r"\n?[ ]{0,16}"
"""Between the parts of a JSON value: enough for compact and for indented output, and finite, so that no model can
spend its budget on blanks."""


def compile_constraint(constraint: Constraint, tokenizer: Tokenizer) -> GrammarState:
    """Raises InvalidRequest with a field that starts with "constraint". Slow the first time that a tokenizer or a
    constraint is seen: for a preparation thread."""
    field = f"constraint.{constraint.kind}"
    value = plain_data(field, constraint.value)
    size = len(json.dumps(value))
    if size > MAX_BYTES:
        raise InvalidRequest(field, f"must be at most {MAX_BYTES} characters as JSON", f"{size} characters")
    match constraint.kind:
        case "json_schema":
            source = _json_schema(field, value)
        case "regex":
            source = LLMatcher.grammar_from_regex(_text(field, value))
        case "choice":
            source = LLMatcher.grammar_from_lark(_choice(field, value))
        case "grammar":
            source = LLMatcher.grammar_from_lark(_text(field, value))
        case _:
            raise InvalidRequest(
                "constraint.kind", "must be json_schema, regex, choice or grammar", constraint.kind
            )
    return vocabulary_of(tokenizer).grammar(source, field, constraint.value).start()


def _json_schema(field: str, value: Any) -> str:
    if value is False:
        raise InvalidRequest(field, "allows no value at all", "false")
    if value is not True and not isinstance(value, Mapping):
        raise InvalidRequest(field, "must be a JSON schema (an object)", type(value).__name__)
    schema = {} if value is True else dict(value)
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE}))


def _choice(field: str, value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        raise InvalidRequest(field, "must be a list of one or more strings", value)
    choices = [check_text(f"{field}[{k}]", choice) for k, choice in enumerate(value)]
    return "start: " + " | ".join(json.dumps(choice) for choice in dict.fromkeys(choices))


def _text(field: str, value: Any) -> str:
    text = check_text(field, value)
    if not text.strip():
        raise InvalidRequest(field, "must not be empty", repr(text))
    return text

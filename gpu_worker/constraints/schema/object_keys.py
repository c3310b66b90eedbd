"""The keys of an object that its schema does not name, as terminals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain, combinations

import numpy as np
from llguidance import LLMatcher

from petiole.gpu_worker.constraints.schema import patterns
from petiole.gpu_worker.constraints.schema.intersection import both
from petiole.gpu_worker.constraints.schema.nodes import NOTHING, KeyRules, Node, String
from petiole.gpu_worker.constraints.schema.rules import Terminal
from petiole.gpu_worker.exceptions import InvalidRequest

MAX_PATTERNS = 5
"""Maximum number of `patternProperties` of one object: their keys are sorted by which of them match."""

_PLAIN = r'[^"\\\x00-\x1F\x7F]'
_ESCAPE = r'\\["\\bfnrt]|\\u00(0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])'
_LETTER = f"({_PLAIN}|{_ESCAPE})"


def free_keys(
    field: str, rules: Sequence[KeyRules], names: Sequence[String], taken: Sequence[str]
) -> Iterator[tuple[Terminal, Node]]:
    """Keys that are not `taken`, and what the values of each kind must be. A key that matches several
    `patternProperties` must follow all of them. `names`: what all keys must be."""
    listed = list(dict.fromkeys(pattern for rule in rules for pattern, _ in rule.patterns))
    if len(listed) > MAX_PATTERNS:
        limit = f"must have at most {MAX_PATTERNS} patternProperties of one object"
        raise InvalidRequest(field, limit, len(listed))
    for matched in chain.from_iterable(combinations(listed, n) for n in range(len(listed) + 1)):
        value = both(
            node
            for rule in rules
            for node in [node for pattern, node in rule.patterns if pattern in matched] or [rule.rest]
        )
        if value != NOTHING:
            terminal = _terminal(field, matched, [one for one in listed if one not in matched], names, taken)
            if _matches_something(field, terminal):
                yield Terminal(terminal), value


def _terminal(
    field: str,
    matched: Sequence[str],
    others: Sequence[str],
    names: Sequence[String],
    taken: Sequence[str],
) -> str:
    searched = [*matched, *(pattern for name in names for pattern in name.patterns)]
    letter = _PLAIN if searched or others else _LETTER
    parts = [f'/"{letter}*"/']
    parts += [_containing(pattern) for pattern in searched]
    parts += [f"~({_containing(pattern)})" for pattern in others]
    for name in names:
        if name.low or name.high is not None:
            parts.append(f'/"{letter}{{{name.low},{"" if name.high is None else name.high}}}"/')
    if taken:
        parts.append(f"~({' | '.join(json.dumps(quoted(name)) for name in taken)})")
    return " & ".join(parts)


def quoted(text: str) -> str:
    """A text in JSON's form, as the grammar writes it."""
    return json.dumps(text, ensure_ascii=False)


def _containing(pattern: str) -> str:
    return rf'"\"" /{patterns.whole(pattern)}/ "\""'


@lru_cache(maxsize=patterns.KEPT)
def _matches_something(field: str, terminal: str) -> bool:
    """Whether a terminal matches any text. In a grammar, one that matches none is a dead end."""
    grammar = LLMatcher.grammar_from_lark(f"start: K\nK: {terminal}\n")
    matcher = LLMatcher(patterns.single_bytes(), grammar, log_level=0)
    if matcher.is_error():
        raise InvalidRequest(field, f"must have patterns that can be matched: {matcher.get_error()}", terminal)
    mask = np.zeros(-(-patterns.single_bytes().vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return not matcher.is_error()

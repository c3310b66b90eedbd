"""What a constraint allows: exactly the outputs that match it, and an end exactly where one may be."""

from __future__ import annotations

import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, strategies as st

from petiole.gpu_worker.constraints import (
    ConstraintState,
    compile_constraint,
    fill_draft_masks,
    fill_masks,
    grammar as grammars,
    warm_up,
)
from petiole.gpu_worker.constraints.compiler import MAX_BYTES
from petiole.gpu_worker.constraints.grammar import vocabulary_of
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.text import Tokenizer
from tests.gpu_worker.constraints.walking import (
    PADDED_VOCAB,
    WORDS,
    accepts,
    allowed,
    compiled,
    draw,
    feed,
    tokenizer,
)
from tests.support import tokenizers as samples


def allowed_texts(state: ConstraintState) -> set[str]:
    """The allowed tokens as text, "" for an end."""
    return {tokenizer().decode([v]) for v in allowed(state)}


# --- what is allowed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "pattern", [r"[a-f]{2,5}", r"\d{3}-\d{4}", r"(yes|no)( indeed)*!", r"[à-ÿ😀]+", r"a|ab|abc"]
)
def test_random_output_matches_a_regular_expression(pattern: str, seed: int) -> None:
    assert re.fullmatch(pattern, draw(compiled("regex", pattern), random.Random(seed)))


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=5), st.data())
def test_every_choice_and_nothing_else_is_possible(choices: list[str], data: st.DataObject) -> None:
    state = compiled("choice", choices)
    for choice in choices:
        assert 2 in allowed(fed(state, choice))
    assert draw(state, random.Random(data.draw(st.integers(0, 99)))) in choices


def walk(state: ConstraintState, token_id: int) -> None:
    """Go on by one token for as long as the constraint can say what is allowed."""
    while allowed(state):
        state.consume(token_id)


def fed(state: ConstraintState, text: str) -> ConstraintState:
    copy = state.fork()
    assert feed(copy, text)
    return copy


@pytest.mark.parametrize("seed", range(5))
def test_random_output_follows_a_grammar(seed: int) -> None:
    grammar = """
        start: sum
        sum: term ("+" term)*
        term: NUMBER | "(" sum ")"
        NUMBER: /[1-9][0-9]{0,3}/
    """
    text = draw(compiled("grammar", grammar), random.Random(seed))
    assert set(text) <= set("0123456789+()")
    assert isinstance(eval(text), int)  # a sum, whatever it says


def test_indented_json_is_allowed_and_endless_blanks_are_not() -> None:
    state = compiled("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}})
    assert feed(state.fork(), json.dumps({"a": 1}, indent=2))
    assert feed(state.fork(), '{"a":1}')
    assert not feed(state.fork(), '{"a":' + " " * 100)


@pytest.mark.parametrize("seed", range(5))
def test_a_tokenizer_with_byte_fallback_is_served(seed: int) -> None:
    made = Tokenizer(samples.sentencepiece(), special_tokens={"eos_token": "</s>"})
    choices = ["hello 😀", "the fox", "日本"]
    state = compile_constraint(Constraint("choice", choices), made)
    assert draw(state, random.Random(seed), made) in choices


# --- ends -------------------------------------------------------------------------------------------------------


def test_eos_is_allowed_exactly_where_the_output_may_end() -> None:
    state = compiled("regex", "XZ|XZQ")
    assert allowed_texts(state) == {"X"}
    assert feed(state, "X")
    assert allowed_texts(state) == {"Z"}
    assert feed(state, "Z")
    assert allowed_texts(state) == {"", "Q"}
    assert not state.finished
    assert feed(state, "Q")
    assert state.finished
    assert set(allowed(state)) == tokenizer().eos_token_ids


def test_nothing_but_eos_is_consumed_after_the_end() -> None:
    state = compiled("regex", "a")
    assert feed(state, "a")
    assert not feed(state, "a")
    assert state.consume(2)
    assert state.consume(0)
    assert state.finished
    assert set(allowed(state)) == tokenizer().eos_token_ids


def test_an_allowed_token_that_takes_a_grammar_to_its_limits_is_the_callers_mistake() -> None:
    state = compiled("grammar", "start: " + " | ".join(f'%json {{"const": {k}}}' for k in range(2000)))
    token = tokenizer().encode("1")[0]
    assert token in allowed(state)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="must have fewer alternatives"):
            state.consume(token)


def test_tokens_that_only_the_model_has_are_never_allowed() -> None:
    assert max(allowed(compiled("regex", "(.|\n)*"))) < tokenizer().vocab_size < PADDED_VOCAB


def test_control_tokens_are_not_text() -> None:
    state = compiled("regex", "(.|\n)*")
    assert tokenizer().backend.token_to_id("<|im_start|>") not in allowed(state)


# --- back and forth ---------------------------------------------------------------------------------------------


def test_a_token_that_is_not_allowed_changes_nothing() -> None:
    state = compiled("regex", "ab")
    before = allowed(state)
    assert not state.consume(tokenizer().encode("b")[0])
    assert not state.consume(PADDED_VOCAB - 1)
    assert not state.consume(-1)
    assert allowed(state) == before
    assert feed(state, "ab")


@given(seed=st.integers(0, 10_000), moves=st.lists(st.integers(-6, 3), max_size=25))
def test_going_back_is_never_having_gone(seed: int, moves: list[int]) -> None:
    """Random walks forth (n > 0) and back (n < 0), past the end too, against a state that replays its tokens."""
    rng = random.Random(seed)
    constraint = ("json_schema", {"type": "array", "items": {"enum": [1, "two", None]}, "maxItems": 2})
    state, taken = compiled(*constraint), []
    for move in moves:
        if move < 0:
            back = min(-move, len(taken))
            state.rollback(back)
            del taken[len(taken) - back :]
        for _ in range(move):
            taken.append(rng.choice(allowed(state)))
            assert state.consume(taken[-1])
        replayed = compiled(*constraint)
        assert all(replayed.consume(v) for v in taken)
        assert (allowed(state), state.finished) == (allowed(replayed), replayed.finished)


def test_a_fork_goes_its_own_way() -> None:
    state = compiled("choice", ["left", "right"])
    fork = state.fork()
    assert feed(fork, "left")
    assert allowed_texts(state) >= {"l", "r"}
    assert feed(state, "right")


def test_more_cannot_be_taken_back_than_was_consumed() -> None:
    with pytest.raises(AssertionError, match="more than was consumed"):
        compiled("regex", "a").rollback(1)


# --- many at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [WORDS, -(-samples.byte_level().get_vocab_size() // 32), 11])
def test_masks_of_many_states_are_those_of_each(words: int) -> None:
    states = [compiled("choice", ["one", "two", "ten"]) for _ in range(6)]
    for state, text in zip(states, ["", "o", "t", "on", "one", "te"], strict=True):
        assert feed(state, text)
    together, alone = np.full((6, words), -1, np.int32), np.full((6, words), -1, np.int32)
    fill_masks(states, together)
    for row, state in enumerate(states):
        state.fill_mask(alone[row])
    assert (together == alone).all()
    widest = np.full((6, WORDS), -1, np.int32)
    fill_masks(states, widest)
    assert (together == widest[:, :words]).all(), "a model with fewer tokens than its tokenizer has lacks the last"


def test_the_masks_of_drafts_are_those_met_on_their_way() -> None:
    state = compiled("regex", "X(Z|Q)K")
    x, z, k, other = (tokenizer().encode(letter)[0] for letter in "XZKJ")
    masks = np.zeros((4, WORDS), np.int32)
    assert fill_draft_masks(state, [x, z, k], masks) == 3
    walked = state.fork()
    for row, draft in enumerate([x, z, k]):
        expected = np.zeros(WORDS, np.int32)
        walked.fill_mask(expected)
        assert (masks[row] == expected).all()
        walked.consume(draft)
    assert fill_draft_masks(state, [x, other, k], masks) == 1
    assert allowed(state) == [x]


def test_after_a_warm_up_no_constraint_waits_for_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Tokenizer(samples.byte_level(), eos_token_ids=[2])
    warm_up(made)
    monkeypatch.setattr(grammars, "Vocabulary", None)  # nobody may make another
    assert feed(compile_constraint(Constraint("choice", ["word"]), made), "word")


def test_a_warm_up_leaves_it_to_the_constraint_to_fail() -> None:
    made = Tokenizer(samples.byte_level(), eos_token_ids=[])
    warm_up(made)
    with pytest.raises(InvalidRequest, match="EOS"):
        compile_constraint(Constraint("choice", ["word"]), made)


def test_threads_compile_for_one_tokenizer_at_the_same_time() -> None:
    made = Tokenizer(samples.byte_level(), eos_token_ids=[2])
    constraints = [Constraint("choice", [f"word{k % 7}", "other"]) for k in range(40)]
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda constraint: compile_constraint(constraint, made), constraints))
    assert all(feed(state, f"word{k % 7}") and state.finished for k, state in enumerate(states))
    assert vocabulary_of(made) is vocabulary_of(made)


def test_threads_walk_the_same_grammar_at_the_same_time() -> None:
    """Its states share what the grammar's automata have explored."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 4}
    states = [compiled("json_schema", schema) for _ in range(40)]
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda k: draw(states[k], random.Random(k)), range(40)))
    assert texts == [draw(compiled("json_schema", schema), random.Random(k)) for k in range(40)]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("regex", "((", r"constraint.regex: .*unclosed group, got \(\("),
        ("regex", "", "constraint.regex: must not be empty"),
        ("regex", None, "constraint.regex: must be a string, got NoneType"),
        ("regex", r"\bword", "constraint.regex: .*lookarounds not supported"),
        ("regex", "a{1000000}", "constraint.regex: must repeat at most 10000 times, got \\{1000000\\}"),
        ("grammar", 'start: "a"{20000}', r"constraint.grammar: must repeat at most 10000 times, got \{20000\}"),
        ("grammar", 'start: /a{,20000}/ "b"', "constraint.grammar: must repeat at most 10000 times"),
        ("grammar", 'start: %json {"pattern": "a{20000}"}', "constraint.grammar: must repeat at most 10000 times"),
        ("regex", "(a?){1000}a{1000}", "constraint.regex: .*too many expressions"),
        ("regex", "\ud800", "constraint.regex: must be valid Unicode text"),
        ("grammar", "start: nowhere", 'constraint.grammar: .*unknown name: "nowhere"'),
        ("grammar", 'other: "a"', "constraint.grammar: no start rule found"),
        ("json_schema", "string", r"constraint.json_schema: must be a JSON schema \(an object\), got str"),
        ("json_schema", False, "constraint.json_schema: allows no value at all"),
        ("json_schema", {"type": "text"}, "constraint.json_schema.type: must be one of null, .*, got text"),
        ("json_schema", {"maximum": "5"}, "constraint.json_schema.maximum: must be a number, got 5"),
        ("json_schema", {"not": {}}, "constraint.json_schema.not: cannot be enforced; leave it out, got {}"),
        (
            "json_schema",
            {"$ref": "#"},
            "constraint.json_schema: must allow a value, got a schema that allows none",
        ),
        ("grammar", "start: start", "constraint.grammar: no token can begin an output"),
        ("regex", r"[^\s\S]", "constraint.regex: no token can begin an output"),
        ("json_schema", {"a": object()}, "constraint.json_schema.a: must be JSON data, got object"),
        (
            "json_schema",
            {"type": "string", "pattern": "b{1,20000}"},
            "constraint.json_schema.pattern: must repeat at most 10000 times",
        ),
        *(
            (kind, value, f"constraint.{kind}.*: must add up to at most 100000 .*, got {got}")
            for kind, value, got in (
                ("json_schema", {"type": "integer", "multipleOf": 10_000_019}, 10_000_019),
                ("json_schema", {"allOf": [{"multipleOf": 99.7}, {"items": {"multipleOf": -9967}}]}, 997 * 9967),
                ("grammar", 'start: %json {"type": "integer", "multiple\\u004ff": 10000019}', 10_000_019),
                ("grammar", f'start: %json {{"multipleOf": {"7" * 5000}}}', "7+"),
            )
        ),
        ("choice", [], "constraint.choice: must be a list of one or more strings"),
        ("choice", "ab", "constraint.choice: must be a list of one or more strings, got ab"),
        ("choice", ["a", 1], r"constraint.choice\[1\]: must be a string, got int"),
        ("choice", ["a" * MAX_BYTES], f"constraint.choice: must be at most {MAX_BYTES} characters as JSON"),
        ("xml", "a", "constraint.kind: must be json_schema, regex, choice, grammar or calls, got xml"),
    ],
)
def test_a_bad_constraint_is_refused_by_field(kind: Any, value: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{expected}") as raised:
        compiled(kind, value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("grammar", r'start: "{12345}" A // {12345}' + "\nA: /[{]12345}/  # {12345}", "{12345}{12345}"),
        ("grammar", r'start: "\"{12345}" /\{12345\}/', '"{12345}{12345}'),
        ("regex", r"\{12345\}[{12345}]+", "{12345}5{"),
    ],
)
def test_braces_that_count_nothing_have_no_limit(kind: str, value: str, text: str) -> None:
    assert accepts(compiled(kind, value), text)


def test_multiples_that_are_easy_are_served() -> None:
    easy = [5, 2500, 0.01, 1e-9, 10_000_000, 365, 24]
    schema = {"anyOf": [{"type": "number", "multipleOf": number} for number in easy]}
    assert feed(compiled("json_schema", schema), "5")


def multiple_of(number: float) -> dict[str, Any]:
    return {"type": "number", "multipleOf": number}


def test_multiples_of_different_values_are_limited_by_their_sum() -> None:
    places = {"day": 365, "width": 1024, "week": 7, "hour": 3600, "price": 0.25}
    properties = {name: multiple_of(number) for name, number in places.items()}
    properties["row"] = {"type": "array", "items": multiple_of(997), "minItems": 1}
    properties["next"] = {"anyOf": [{"$ref": "#/$defs/page"}, {"type": "null"}]}
    page = {"type": "object", "properties": {"n": multiple_of(991)}}
    required = [*properties]
    schema = {"type": "object", "properties": properties, "required": required, "$defs": {"page": page}}
    state = compiled("json_schema", schema)
    assert feed(state, '{"day":730,"width":1024,"week":7,"hour":3600,"price":1.25,"row":[997],"next":{"n":')
    many = {"type": "object", "properties": {str(n): multiple_of(n) for n in range(9_801, 9_823, 2)}}
    with pytest.raises(
        InvalidRequest, match=f"must add up to at most 100000 .*, got {sum(range(9_801, 9_823, 2))}"
    ):
        compiled("json_schema", many)


@pytest.mark.parametrize(
    "met",
    [
        {"anyOf": [{"properties": {"a": multiple_of(997)}}, {"properties": {"a": multiple_of(991)}}]},
        {"anyOf": [multiple_of(997), multiple_of(991)]},
        {"allOf": [multiple_of(997)], **multiple_of(991)},
        {"$ref": "#/$defs/a", **multiple_of(991)},
        {"$ref": "#/$defs/list", "items": multiple_of(991)},
        {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        {"allOf": [{"$ref": "#/$defs/b"}, multiple_of(997)]},
    ],
)
def test_multiples_that_may_hold_for_the_same_value_are_limited_by_their_least_common_multiple(met: Any) -> None:
    shared = {"a": multiple_of(997), "b": multiple_of(991), "list": {"items": multiple_of(997)}}
    for schema in (met, {"type": "object", "properties": {"x": met}}, {"type": "array", "items": met}):
        if "$ref" in str(met):
            schema = {**schema, "$defs": shared}
        with pytest.raises(InvalidRequest, match=r"must add up to at most 100000 .*, got 9[89]\d{4}$"):
            compiled("json_schema", schema)


def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(3000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="must be nested at most 64 deep"):
        compiled("json_schema", schema)


def test_a_model_without_eos_cannot_be_constrained() -> None:
    with pytest.raises(InvalidRequest, match=r"^constraint: needs a model with an EOS token"):
        compile_constraint(Constraint("regex", "a"), Tokenizer(samples.byte_level()))


def test_a_grammar_that_becomes_too_complex_fails_its_request_and_is_not_kept() -> None:
    state = compiled("regex", "(a{1,1000}){1,1000}")
    a = tokenizer().encode("a")[0]
    with pytest.raises(InvalidRequest, match=r"^constraint: .*too many expressions.* after [0-9]+ tokens"):
        walk(state, a)
    again = compiled("regex", "(a{1,1000}){1,1000}")
    assert "a" in allowed_texts(again)
    assert again.consume(a)


def test_masks_are_filled_while_a_vocabulary_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes about a second with a large vocabulary, on a preparation thread; masks are the engine's."""
    states = [compiled("regex", pattern) for pattern in ("[a-z]+", "[0-9]+")]
    begun, done = threading.Event(), threading.Event()

    def slow(made: Tokenizer) -> None:
        begun.set()
        done.wait(60)

    monkeypatch.setattr(grammars, "Vocabulary", slow)
    grammars._executor.cache_clear()
    with ThreadPoolExecutor(2) as threads:
        making = threads.submit(vocabulary_of, Tokenizer(samples.byte_level(), eos_token_ids=[0]))
        begun.wait(60)
        filled = threads.submit(fill_masks, states, np.zeros((2, WORDS), np.int32))
        try:
            filled.result(timeout=60)
        finally:
            done.set()
        making.result(timeout=60)

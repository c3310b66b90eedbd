"""A thought with a budget: it is closed by force when its tokens are used up, and nothing else is changed."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import numpy as np
import pytest

from petiole.gpu_worker import Constraint, Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.constraints import BudgetState, compile_constraint
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.request.protocols import ConstraintState
from petiole.gpu_worker.text import load_tokenizer
from petiole.tasks.output_parsing.writing import WRITINGS, composed
from tests.support.toy_engine import BoldProposer

TOKENIZER = load_tokenizer(resolve_model("petiole-tiny"))
THOUGHT = {"open": "<think>", "close": "</think>", "after": ""}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
CALL = {"name": "f", "strict": True, "begin": '<tool_call>\n{"name": "f", "arguments": ', "end": "}\n</tool_call>"}
FREE: dict[str, Any] = {"thought": THOUGHT, "free": True}
SCHEMA: dict[str, Any] = {"thought": THOUGHT, "answer": {"kind": "json_schema", "value": CITY}}
CALLS: dict[str, Any] = {
    "thought": THOUGHT,
    "trigger": "<tool_call>",
    "calls": [{**CALL, "schema": CITY}],
    "least": 1,
    "most": 1,
}
CLOSING = TOKENIZER.encode("</think>", add_special_tokens=False)
LATE = 4  # tokens more, so that a character is whole


def state_of(budget: int, thinks: str, asked: dict[str, Any]) -> ConstraintState:
    return compile_constraint(Constraint("calls", {**asked, "budget": budget, "thinks": thinks}), TOKENIZER)


def allowed(state: ConstraintState) -> list[int]:
    words = np.zeros(16, np.int32)
    state.fill_mask(words)
    return [v for v in range(TOKENIZER.vocab_size) if words.view(np.uint32)[v // 32] >> (v % 32) & 1]


def walk(state: ConstraintState, rng: random.Random, most: int = 120) -> list[int]:
    """Random tokens that are allowed. On the way, the state is rolled back and forked now and then."""
    tokens: list[int] = []
    while len(tokens) < most and not state.finished:
        for _ in range(rng.choice((0, 0, 0, 2))):
            assert state.consume(rng.choice(allowed(state))) or True
            state.rollback(1)
        state = state.fork() if rng.random() < 0.1 else state
        ids = allowed(state)
        token = rng.choice([v for v in ids if v not in TOKENIZER.eos_token_ids] or ids)
        if token in TOKENIZER.eos_token_ids:
            break
        assert state.consume(token)
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("asked", [FREE, SCHEMA, CALLS], ids=["free", "schema", "calls"])
def test_a_thought_ends_with_its_budget_whatever_the_model_says(seed: int, asked: dict[str, Any]) -> None:
    rng = random.Random(seed)
    budget = rng.choice((0, 1, 7, 20))
    tokens = walk(state_of(budget, "open", asked), rng)
    text = b"".join(map(TOKENIZER.token_bytes, tokens))
    assert text.count(b"</think>") == 1
    thought, _, rest = text.partition(b"</think>")
    ends = next(
        n for n in range(len(tokens) + 1) if b"</think>" in b"".join(map(TOKENIZER.token_bytes, tokens[:n]))
    )
    assert ends - len(CLOSING) <= budget + LATE
    if asked is not FREE:
        thought.decode()
        answer = rest.split(b'"arguments": ')[-1].removesuffix(b"}\n</tool_call>")
        assert json.loads(answer)["city"] in ("Rome", "Oslo")


THINKING = sorted(name for name, writing in WRITINGS.items() if writing.thought)


@pytest.mark.parametrize("name", THINKING)
def test_every_family_closes_its_thought_and_the_answer_follows(name: str) -> None:
    """Also where nothing is left for the thought, and whether the prompt or the model begins it. What the budget
    forces, the grammar allows."""
    writing, rng = WRITINGS[name], random.Random(name)
    assert writing.thought is not None
    tools = [{"name": "f", "parameters": CITY, "strict": True}]
    answer = ("json_schema", CITY)
    asked = [composed(writing, (), least=0, most=None, answer=one) for one in (None, answer)]
    if writing.calls:
        asked += [composed(writing, tools, least=least, most=1, answer=None) for least in (0, 1)]
    closing = len(TOKENIZER.encode(writing.thought.close, add_special_tokens=False))
    close = writing.thought.close.encode()
    for form, budget, thinks in itertools.product(asked, (0, 1, 9), ("open", "free")):
        state = state_of(budget, thinks, form | {"free": form["answer"] is None and not form["calls"]})
        if thinks == "free":
            assert all(map(state.consume, TOKENIZER.encode(writing.thought.open, add_special_tokens=False)))
        tokens = walk(state, rng, most=budget + LATE + closing)
        assert b"".join(map(TOKENIZER.token_bytes, tokens)).count(close) == 1


def test_a_thought_that_ends_earlier_is_left_alone() -> None:
    for text in ("hm</think>1, 2, 3 and much more", "</think>", "<b>1</b></think> x"):
        state = state_of(20, "open", FREE)
        for token in TOKENIZER.encode(text, add_special_tokens=False):
            assert len(allowed(state)) == TOKENIZER.vocab_size
            assert state.consume(token)
        assert isinstance(state, BudgetState)
        assert state.is_free_for(10_000)


def test_a_closing_mark_that_has_begun_is_completed() -> None:
    tokens = [*TOKENIZER.encode("hm", add_special_tokens=False), *CLOSING]
    for budget in range(2, len(tokens) + 1):
        state = state_of(budget, "open", FREE)
        for place, token in enumerate(tokens):
            assert (allowed(state) == [token]) == (place >= budget)
            assert state.consume(token)
        assert len(allowed(state)) == TOKENIZER.vocab_size


def test_only_a_thought_at_the_beginning_counts() -> None:
    for text, free in (("<think>a", False), ("\n<think>a", False), ("a <think> b", True), ("<thing>", True)):
        state = state_of(5, "free", FREE)
        assert isinstance(state, BudgetState)
        assert all(map(state.consume, TOKENIZER.encode(text, add_special_tokens=False)))
        assert state.is_free_for(10_000) == free
    assert state_of(5, "closed", FREE).is_free_for(10_000)  # type: ignore[attr-defined]


def test_no_character_is_cut() -> None:
    letter = TOKENIZER.encode("é", add_special_tokens=False)
    assert len(letter) == 2
    for before in (2, 3):
        state = state_of(3, "open", FREE)
        assert all(map(state.consume, TOKENIZER.encode("a") * before))
        if before == 2:
            assert state.consume(letter[0])
            assert state.consume(letter[1])
        assert allowed(state) == [CLOSING[0]]


# ---------------------------------------------------------------- in the engine


KINDS = [(asked, budget) for asked in (FREE, SCHEMA, CALLS) for budget in (4, 9)]


def ask(asked: dict[str, Any], budget: int = 9, **fields: Any) -> Request:
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=asked is FREE)
    constraint = Constraint("calls", {**asked, "budget": budget})
    return Request("Count from 1 to 60.<think>", sampling=sampling, constraint=constraint, **fields)


def engine(**config: Any) -> Engine:
    config = {"num_pages": 4000, **config}  # not a row of the longest for each of 64: half a GB to clear
    settings = EngineConfig(model="petiole-tiny", device="cpu", dtype="float32", debug=True, **config)
    return Engine(settings, proposer=BoldProposer())


def test_drafts_preemption_and_resume_change_no_token_of_it() -> None:
    requests = [ask(*kind) for kind in KINDS]
    with engine() as plain:
        whole = [result.token_ids for result in plain.generate(requests)]
        for (_, budget), tokens in zip(KINDS, whole, strict=True):
            text = TOKENIZER.decode(tokens, skip_special_tokens=False)
            thought = text.partition("</think>")[0]
            assert len(tokens) > budget
            assert len(TOKENIZER.encode(thought, add_special_tokens=False)) <= budget + LATE
        parts = [(asked, budget, tokens) for (asked, budget), tokens in zip(KINDS, whole, strict=True)]
        again = [ask(*one, resume_token_ids=tokens[:at]) for *one, tokens in parts for at in (2, one[1] + 3)]
        resumed = [result.token_ids for result in plain.generate(again)]
        assert resumed == [tokens for tokens in whole for _ in (2, 3)]
    with engine(speculative_tokens=4, num_pages=120, max_num_seqs=6) as other:
        assert [result.token_ids for result in other.generate(requests)] == whole
        other.check_invariants()
        assert other.stats()["preemptions"]

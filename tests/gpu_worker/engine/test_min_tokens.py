"""`min_tokens` on a real model: nothing ends an output before, whatever else the engine does meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from petiole.gpu_worker import Constraint, Engine, EngineConfig, Request, Result, SamplingParams
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.text import load_tokenizer
from tests.support.toy_engine import BoldProposer
from tests.support.trials import rest

TOKENIZER = load_tokenizer(resolve_model("petiole-tiny"))
ENDS = {509, 511}
DIGITS = list(range(15, 25))
COMMA = 259
PROMPTS = ["Count from 1 to 5.", "Who are you?", "What is 2 plus 3?", "Yes or no?"]


def tiny(jitter: Any = None, **config: Any) -> Engine:
    config = {"num_pages": 4000, **config}  # not a row of the longest for each of 64: half a GB to clear
    settings = EngineConfig(model="petiole-tiny", device="cpu", dtype="float32", debug=True, **config)
    runtime = ModelRuntime(settings, device=CpuDevice(jitter=jitter))
    return Engine(settings, runtime=runtime, tokenizer=TOKENIZER, proposer=BoldProposer())


def ask(prompt: str, **options: Any) -> Request:
    """Fields of `Request`, or else of `SamplingParams`; greedy unless it says otherwise."""
    fields = {key: options.pop(key) for key in list(options) if key in Request.__dataclass_fields__}
    sampling = SamplingParams(**{"max_tokens": 60, "temperature": 0.0, **options})
    return Request(messages=[{"role": "user", "content": prompt}], sampling=sampling, **fields)


def answer(*requests: Request, **config: Any) -> list[Result]:
    with tiny(**config) as engine:
        return list(engine.generate(requests))


# ---------------------------------------------------------------- property


def draw(seed: int) -> list[Request]:
    rng = random.Random(seed)

    def one(i: int) -> Request:
        max_tokens = 70 if i < 3 else rng.randint(10, 70)  # too long for all of them to have room at once
        stops = {
            "stop": rng.choice([[], [], [","], ["e", " 4"]]),
            "stop_token_ids": rng.choice([[], [], [COMMA], DIGITS]),
            "stop_token_sequences": rng.choice([[], [], [[COMMA, DIGITS[4]]], [[DIGITS[2]]]]),
        }
        return ask(
            rng.choice(PROMPTS),
            max_tokens=max_tokens,
            min_tokens=max_tokens if i < 3 else min(rng.choice([0, 1, 5, 20, max_tokens - 1]), max_tokens),
            temperature=rng.choice([0.0, 0.8, 1.5]),
            top_p=rng.choice([1.0, 0.9]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
            logprobs=rng.choice([None, 3]),
            ignore_eos=rng.random() < 0.2,
            constraint=rng.choice([None, None, Constraint("regex", "[0-9, ]+")]),
            priority=rng.choice([0, 1]),
            request_id=f"{seed}.{i}",
            **stops,
        )

    return [one(i) for i in range(12)]


def delays(seed: int) -> Callable[[], None]:
    rng = random.Random(seed)
    return lambda: time.sleep(0.001 * rng.random() * (rng.random() < 0.3))


@pytest.mark.parametrize("seed", rest(range(6)))
def test_random_workloads_end_where_they_do_on_a_blocking_engine(seed: int) -> None:
    requests, busy = draw(seed), {"max_num_seqs": 6, "num_pages": 110, "chunk_size": 8}
    drafts = [0, 4][seed % 2]
    with tiny(delays(seed), pipeline="on", speculative_tokens=drafts, **busy) as engine:
        results = engine.generate(requests)
        stats = engine.stats()
    assert stats["preemptions"]
    assert bool(stats["draft_tokens"]) == bool(drafts)
    with tiny(pipeline="off", max_num_seqs=1) as engine:
        alone = engine.generate(requests)
    for request, result, other in zip(requests, results, alone, strict=True):
        assert (result.token_ids, result.text, result.stop_reason) == (
            other.token_ids,
            other.text,
            other.stop_reason,
        ), request
        low = request.sampling.min_tokens
        assert not (ENDS | set(request.sampling.stop_token_ids)) & set(result.token_ids[:low]), request
        assert len(result.token_ids) > low or len(result.token_ids) == request.sampling.max_tokens, request


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.2, "seed": 4},
        {"stop": ["e", "5"]},
        {"stop_token_ids": [COMMA, 64, 82], "ignore_eos": True},
    ],
    ids=str,
)
def test_the_count_goes_on_from_the_tokens_that_an_earlier_attempt_has_made(options: dict[str, Any]) -> None:
    def asked(prompt: str, resumed: tuple[int, ...] = ()) -> Request:
        return ask(prompt, min_tokens=30, resume_token_ids=resumed, **options)

    with tiny() as engine:
        whole = dict(zip(PROMPTS, engine.generate([asked(prompt) for prompt in PROMPTS]), strict=True))
        cases = [(prompt, taken) for prompt in PROMPTS for taken in (1, 12, 29, 30, 31)]
        resumed = engine.generate([asked(prompt, whole[prompt].token_ids[:taken]) for prompt, taken in cases])
    for (prompt, _), result in zip(cases, resumed, strict=True):
        assert (result.token_ids, result.text) == (whole[prompt].token_ids, whole[prompt].text)
    assert len({len(result.token_ids) for result in whole.values()}) > 1, "some of them end"


# ---------------------------------------------------------------- one by one


def test_an_end_token_is_drawn_as_soon_as_the_output_has_min_tokens() -> None:
    natural, *held = answer(ask(PROMPTS[1]), *(ask(PROMPTS[1], min_tokens=n) for n in (23, 24, 25)))
    assert (len(natural.token_ids), natural.stop_reason) == (24, "eos")
    assert held[0].token_ids == natural.token_ids, "23 tokens and then an end token"
    for n, result in zip((24, 25), held[1:], strict=True):
        assert result.token_ids[:23] == natural.token_ids[:23]
        assert len(result.token_ids) > n


def test_exactly_max_tokens() -> None:
    result = answer(ask(PROMPTS[0], max_tokens=40, min_tokens=40))[0]
    assert (len(result.token_ids), result.stop_reason) == (40, "max_tokens")


def test_end_tokens_are_held_back_although_they_would_end_nothing() -> None:
    free, held = answer(*(ask(PROMPTS[1], ignore_eos=True, min_tokens=n) for n in (0, 30)))
    assert free.token_ids[23] in ENDS
    assert not ENDS & set(held.token_ids[:30])


def test_log_probabilities_are_those_of_a_request_that_bans_the_end_tokens() -> None:
    held, banned, free = answer(
        ask(PROMPTS[1], logprobs=20, max_tokens=24, min_tokens=24),
        ask(PROMPTS[1], logprobs=20, max_tokens=24, banned_token_ids=list(ENDS)),
        ask(PROMPTS[1], logprobs=20, max_tokens=24),
    )
    assert held.logprobs == banned.logprobs
    assert held.logprobs is not None
    assert free.token_ids[-1] in ENDS
    assert all(not ENDS & {token for token, _ in entry.top} for entry in held.logprobs)


def test_a_stop_string_or_sequence_that_an_early_token_completes_ends_nothing() -> None:
    whole = answer(ask(PROMPTS[0], min_tokens=40))[0]  # 1, 2, 3, ...
    at = [n for n, token in enumerate(whole.token_ids) if token == COMMA]
    strings, sequences = answer(
        ask(PROMPTS[0], min_tokens=at[5], stop=[","]),
        ask(PROMPTS[0], min_tokens=at[5] + 1, stop_token_sequences=[[COMMA]]),
    )
    assert strings.token_ids == whole.token_ids[: at[5] + 1]
    assert strings.text == whole.text[: whole.text.index(", 7")]
    assert sequences.token_ids == whole.token_ids[: at[6] + 1]


# ---------------------------------------------------------------- constraints


def test_a_constraint_goes_on_where_it_can() -> None:
    result = answer(ask(PROMPTS[0], constraint=Constraint("regex", "[0-9]+"), min_tokens=20))[0]
    assert result.text[:20].isdigit()
    assert len(result.token_ids) > 20


def test_a_constraint_that_is_complete_ends_the_output_all_the_same() -> None:
    result = answer(ask(PROMPTS[3], constraint=Constraint("choice", ["yes", "no"]), min_tokens=20))[0]
    assert result.text in {"yes", "no"}
    assert result.stop_reason == "constraint"


@pytest.mark.parametrize(
    ("pattern", "options", "end"),
    [
        ("[0-9]+", {"stop_token_ids": DIGITS}, DIGITS),
        ("[0-9]*", {"allowed_token_ids": [100, *ENDS]}, ["eos"]),
    ],
    ids=["stop tokens", "end tokens"],
)
@pytest.mark.parametrize("drafts", [0, 4])
def test_end_tokens_are_drawn_where_a_constraint_leaves_no_others(
    pattern: str, options: dict[str, Any], end: list[Any], drafts: int
) -> None:
    constraint = Constraint("regex", pattern)
    free = ask(PROMPTS[0], min_tokens=20)
    bound = ask(PROMPTS[0], constraint=constraint, min_tokens=20, **options)
    beside, result = answer(free, bound, speculative_tokens=drafts)
    assert (len(result.token_ids), result.stop_reason in end) == (1, True)
    assert not ENDS & set(beside.token_ids[:20])

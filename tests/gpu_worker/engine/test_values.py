"""Values: their numbers are staged per slot, written to the pending inputs, copied to the host with
the ids and embedded by the next forward without the host. They identify the tokens in the prefix cache, in deltas
and in resumed requests. On the real runtime, with a decoder whose values matter,
as the CPU computes it and as CUDA does, there with a stand-in for FlashInfer."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.harness.driver import Driver
from petiole.cache import CoordToken
from petiole.gpu_worker import Engine, InvalidRequest, Request
from petiole.gpu_worker.constraints import PositionalConstraint, SkillConstraint
from petiole.gpu_worker.request.values import Numbers
from petiole.gpu_worker.runtime import building
from petiole.gpu_worker.runtime.interface import VALUES as VALUES_BESIDE
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.runtime.step.inputs import StepStates
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from petiole.gpu_worker.runtime.step.token_values import made_found
from tests.support import fake_flashinfer
from tests.support.toy_decoder import (
    COORDINATE_ID,
    COORDINATES,
    SIZE_ID,
    SIZES,
    VALUES,
    VOCAB,
    WIDTH,
    ToyDecoder,
    continuation,
    value_runtime,
)
from tests.support.toy_engine import Watch, request, toy_engine

OpenEngine = Callable[..., Engine]
PROMPTS = [[1 + i, 2, 3, 4 + i] for i in range(5)]
TOKENS = 20
EOS = 0
LONG = [26, 9, 2]


def delays(seed: int = 3) -> Any:
    rng = random.Random(seed)
    return lambda: time.sleep(rng.random() * 0.0005)


@pytest.fixture(params=["cpu", "cuda"])
def value_engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OpenEngine:
    """value_engine(**engine settings) -> an engine over the real runtime with the toy decoder in it."""
    if request.param == "cuda":
        fake_flashinfer.install(monkeypatch)

    def get(**config: Any) -> Engine:
        machine = {"max_num_seqs": 8, "num_pages": 60, "prefix_cache": "radix", **config}
        runtime = value_runtime(tmp_path, monkeypatch, delays(), **machine)
        if request.param == "cuda":
            fake_flashinfer.compute_as_on_cuda(runtime)
        return toy_engine(runtime=runtime, text=False, **machine)

    return get


Answer = tuple[tuple[int, ...], tuple[Numbers, ...]]


def answers(engine: Engine) -> list[Answer]:
    """Tokens and bins of every prompt, as the deltas brought them."""
    watches = [Watch() for _ in PROMPTS]
    handles = [
        engine.submit(request(p, TOKENS, ignore_eos=True), on_delta=w.on_delta)
        for p, w in zip(PROMPTS, watches, strict=True)
    ]
    tokens = [handle.result(timeout=60).token_ids for handle in handles]
    return [(ids, bins_of(watch)) for ids, watch in zip(tokens, watches, strict=True)]


def bins_of(watch: Watch) -> tuple[Numbers, ...]:
    return tuple(bins for delta in watch.deltas for bins in delta.bins or ())


def oracle(prompt: list[int], n: int = TOKENS) -> Answer:
    source = continuation(prompt)
    tokens, bins = zip(*[next(source) for _ in range(n)], strict=True)
    return tokens, bins


EXPECTED = [oracle(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("pipeline", ["on", "off"])
@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 16), ("off", 4)])
def test_values_are_those_of_a_model_without_an_engine(
    value_engine: OpenEngine, pipeline: str, cache: str, page_size: int
) -> None:
    machine = {"pipeline": pipeline, "prefix_cache": cache, "page_size": page_size, "speculative_tokens": 3}
    with value_engine(**machine) as engine:
        assert answers(engine) == EXPECTED
        assert answers(engine) == EXPECTED, "nor does what is cached of the first round change them"


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_a_preempted_sequence_gets_its_values_back_as_inputs(value_engine: OpenEngine, pipeline: str) -> None:
    with value_engine(pipeline=pipeline, num_pages=50, chunk_size=3) as engine:
        assert answers(engine) == EXPECTED
        assert engine.stats()["preemptions"]


def test_values_that_are_not_fed_back_change_what_follows(value_engine: OpenEngine) -> None:
    with value_engine() as engine:
        runtime = engine.runtime
        assert isinstance(runtime, ModelRuntime)
        pending = runtime._states.pending
        unread = pending.values.clone()  # broken: nobody reads these
        runtime._states.pending = PendingInputs(pending.token_ids, unread)
        assert answers(engine) != EXPECTED


def test_another_side_output_needs_its_sizes_and_an_executor_that_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden state leaves each step beside the values that were made from it."""
    sizes = building.side_outputs
    with_hidden = {"hidden": building.SideOutput(WIDTH, torch.float32)}
    monkeypatch.setattr(building, "side_outputs", lambda decoder: sizes(decoder) | with_hidden)
    runtime = value_runtime(tmp_path, monkeypatch, max_num_seqs=4)
    executor: Any = runtime._executor
    forward = executor.forward

    def forward_with_hidden(*given: Any) -> StepStates:
        states = forward(*given)
        hidden = states.sides[VALUES_BESIDE].args[-1]
        return replace(states, sides={**states.sides, "hidden": lambda token_ids: hidden})

    executor.forward = forward_with_hidden
    driver = Driver(runtime)
    sequences = [driver.sequence(prompt) for prompt in PROMPTS[:3]]
    outputs = [driver.prefill(sequences)]
    outputs += [driver.decode(sequences) for _ in range(3)]
    for output in outputs:
        token_ids, hidden = (torch.from_numpy(a) for a in (output.token_ids, output.side_outputs["hidden"]))
        made = made_found(ToyDecoder(runtime._decoder.plan), hidden, token_ids)
        assert (made.numpy() == output.side_outputs[VALUES_BESIDE]).all()
    runtime.close()


def test_a_model_of_text_stages_no_values() -> None:
    with toy_engine() as engine:
        deltas: list[Any] = []
        engine.submit(request(), on_delta=lambda _, delta: deltas.append(delta)).result(timeout=30)
    assert all(delta.values is delta.bins is None for delta in deltas)


class Points:
    """A skill of three tokens, with what was decoded beside them."""

    def __init__(self, steps: tuple[tuple[int, tuple[float, ...]], ...] = ()) -> None:
        self.steps = steps

    def allowed_token_ids(self) -> list[int]:
        return [5, 6, 7] if len(self.steps) < 3 else [0]

    def consume_step(self, token_id: int, values: Any = ()) -> None:
        self.steps += ((token_id, tuple(values)),)

    def finalize(self) -> Any:
        return [{"token": token, "at": list(values)} for token, values in self.steps]

    def fork(self) -> Points:
        return Points(self.steps)


def test_a_skill_steers_its_output_and_sees_the_values_beside_the_tokens(value_engine: OpenEngine) -> None:
    skill = SkillConstraint(Points(), [0], VOCAB)
    deltas: list[Any] = []
    with value_engine(num_pages=200) as engine:
        others = [engine.submit(request([9, i], 12)) for i in range(3)]
        handle = engine.submit(request([4, 2], 20, constraint=skill), on_delta=lambda _, d: deltas.append(d))
        result = handle.result(timeout=30)
        for other in others:
            other.result(timeout=30)
    assert len(result.token_ids) == 3
    assert {*result.token_ids} <= {5, 6, 7}
    points = skill.finalize()
    assert [point["token"] for point in points] == list(result.token_ids)
    assert [tuple(point["at"]) for point in points] == [v for delta in deltas for v in delta.values]
    assert any(point["at"] for point in points)


def test_values_follow_from_the_bins(value_engine: OpenEngine) -> None:
    watch = Watch()
    with value_engine() as engine:
        engine.submit(request(PROMPTS[0], TOKENS, ignore_eos=True), on_delta=watch.on_delta).result(timeout=30)
    tables = {COORDINATE_ID: (COORDINATES, 1), SIZE_ID: (SIZES, 2)}
    for delta in watch.deltas:
        for token, bins, values in zip(delta.token_ids, delta.bins or (), delta.values or (), strict=True):
            table, n = tables.get(token, ((), 0))
            assert len(bins) == n
            assert values == tuple(table[one] for one in bins)


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_a_resumed_request_continues_number_for_number(value_engine: OpenEngine, pipeline: str) -> None:
    """The second attempt embeds what the first one decoded, wherever that one stopped."""
    tokens, bins = EXPECTED[0]
    with value_engine(pipeline=pipeline, prefix_cache="off", num_pages=200) as engine:
        for n in range(1, TOKENS):
            watch = Watch()
            known = {"resume_token_ids": tokens[:n], "resume_bins": bins[:n]}
            resumed = request(PROMPTS[0], TOKENS, ignore_eos=True, **known)
            assert engine.submit(resumed, on_delta=watch.on_delta).result(timeout=30).token_ids == tokens
            assert bins_of(watch) == bins[n:]


def test_a_generated_point_is_matched_by_a_later_prompt(value_engine: OpenEngine) -> None:
    tokens, bins = EXPECTED[1]
    typed = [VALUES.cache_token(token, of) for token, of in zip(tokens, bins, strict=True)]
    where = next(k for k, of in enumerate(bins[:-1]) if of)
    moved = (VALUES.cache_token(tokens[where], tuple(1023 - one for one in bins[where])),)
    prompt = PROMPTS[1]
    with value_engine(num_pages=200) as engine:
        engine.generate([request(prompt, TOKENS, ignore_eos=True)])
        for points, matched in ((typed, TOKENS - 1), ((*typed[:where], *moved, *typed[where + 1 :]), where)):
            again = request([*prompt, *points, 1], 2, ignore_eos=True)
            usage = engine.submit(again).result(timeout=30).usage
            assert usage.cached_prompt_tokens == len(prompt) + matched
        as_text = engine.submit(request([*prompt, *tokens, 1], 2)).result(timeout=30)
        assert as_text.usage.cached_prompt_tokens == len(prompt) + where


def test_points_of_a_prompt_are_embedded_as_if_they_had_been_generated(value_engine: OpenEngine) -> None:
    tokens, bins = EXPECTED[2]
    typed = [VALUES.cache_token(token, of) for token, of in zip(tokens, bins, strict=True)]
    with value_engine(prefix_cache="off", chunk_size=3) as engine:
        result = engine.generate([request([*PROMPTS[2], *typed[:7]], TOKENS - 7, ignore_eos=True)])[0]
    assert result.token_ids == tokens[7:]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"resume_token_ids": [5]}, "resume_bins[0]"),
        ({"resume_token_ids": [1, 6], "resume_bins": [None, [3]]}, "resume_bins[1]"),
        ({"resume_token_ids": [5], "resume_bins": [[1024]]}, "resume_bins[0]"),
        ({"resume_token_ids": [5], "resume_bins": [[1], [2]]}, "resume_bins"),
        ({"prompt": [1, CoordToken(0.5, 2000)]}, "prompt[1]"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_field(value_engine: OpenEngine, bad: Any, field: str) -> None:
    with value_engine() as engine, pytest.raises(InvalidRequest) as caught:
        engine.submit(request(**bad)).result(timeout=30)
    assert caught.value.field == field


def test_a_model_of_text_refuses_points() -> None:
    with toy_engine() as engine, pytest.raises(InvalidRequest, match=r"prompt\[1\].*no such values"):
        engine.generate([request([1, CoordToken(0.5, 512)])])


class Boxes:
    """A positional skill: centre and size of up to `most` objects. EOS may stand in place of the first number."""

    def __init__(self, most: int, steps: tuple[tuple[int, tuple[float, ...]], ...] = ()) -> None:
        self.most, self.steps = most, steps

    def allowed_at(self, index: int) -> list[int]:
        if index == 3 * self.most:
            return [EOS]
        return ([COORDINATE_ID, EOS], [COORDINATE_ID], [SIZE_ID])[index % 3]

    def consume_step(self, token_id: int, values: Any = ()) -> None:
        self.steps += ((token_id, tuple(values)),)

    def finalize(self) -> Any:
        values = [value for _, of in self.steps for value in of]
        return [tuple(values[k : k + 4]) for k in range(0, len(values), 4)]

    def fork(self) -> Boxes:
        return Boxes(self.most, self.steps)


class CommittedBoxes(Boxes):
    """The same as a skill whose masks wait."""

    def allowed_token_ids(self) -> list[int]:
        return self.allowed_at(len(self.steps))

    def fork(self) -> CommittedBoxes:
        return CommittedBoxes(self.most, self.steps)


def boxes(prompt: list[int], most: int, *, positional: bool = True, **more: Any) -> Request:
    kind: Any = PositionalConstraint if positional else SkillConstraint
    skill = Boxes(most) if positional else CommittedBoxes(most)
    return request(prompt, 60, constraint=kind(skill, [EOS], VOCAB), **more)


def found(engine: Engine, asked: Request) -> tuple[tuple[int, ...], tuple[Numbers, ...], Any]:
    watch = Watch()
    result = engine.submit(asked, on_delta=watch.on_delta).result(timeout=30)
    assert isinstance(asked.constraint, SkillConstraint)
    return result.token_ids, bins_of(watch), asked.constraint.finalize()


def test_a_positional_skill_answers_as_one_whose_masks_wait(value_engine: OpenEngine) -> None:
    with value_engine(num_pages=400) as engine:
        for most, prompt in enumerate(PROMPTS, 1):
            waits = found(engine, boxes(prompt, most, positional=False))
            assert found(engine, boxes(prompt, most)) == waits
            assert len(waits[2]) == len(waits[0]) // 3
            assert all(len(box) == 4 for box in waits[2]), waits


@pytest.mark.parametrize("positional", [True, False])
def test_a_positional_skill_never_stalls_the_pipeline(value_engine: OpenEngine, positional: bool) -> None:
    """While its steps are in flight the next one is sampled; a skill whose masks wait has one in flight."""
    with value_engine(num_pages=400) as engine:
        loop, depth = engine._loop, []
        finalize = engine.scheduler.finalize_sampling

        def watch(handle: Any, mask: Any) -> Any:
            depth.append(len(loop.pipeline.batch_queue))
            return finalize(handle, mask)

        engine.scheduler.finalize_sampling = watch  # type: ignore[method-assign]
        tokens, _, _ = found(engine, boxes(LONG, 8, positional=positional))
    assert len(tokens) > 6
    assert max(depth) == int(positional)


def test_a_resumed_skill_answers_the_same_after_any_token(value_engine: OpenEngine) -> None:
    with value_engine(num_pages=400) as engine:
        tokens, bins, answer = found(engine, boxes(LONG, 4))
        assert len(answer) > 1
        for n in range(1, len(tokens)):
            again = boxes(LONG, 4, resume_token_ids=tokens[:n], resume_bins=bins[:n])
            assert found(engine, again) == (tokens, bins[n:], answer)


def test_a_skill_beside_others_and_short_of_pages_answers_the_same(value_engine: OpenEngine) -> None:
    with value_engine(num_pages=400) as engine:
        alone = found(engine, boxes(LONG, 8))
    with value_engine(num_pages=70, chunk_size=3) as engine, ThreadPoolExecutor(1) as pool:
        watch = Watch()
        engine.pause()  # all wait when the first of them starts
        handle = engine.submit(boxes(LONG, 8, priority=1), on_delta=watch.on_delta)
        others = pool.submit(answers, engine)
        while engine.stats()["waiting"] != 1 + len(PROMPTS):
            time.sleep(0.001)
        engine.resume()
        assert others.result() == EXPECTED
        assert handle.result(timeout=60).token_ids == alone[0]
        assert bins_of(watch) == alone[1]
        assert engine.stats()["preemptions"]

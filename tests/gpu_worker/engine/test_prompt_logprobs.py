"""Log-probabilities of prompts: those of transformers, each token's once, however the prompt was computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from petiole.contract.results.outputs import Delta
from petiole.gpu_worker import Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.request import Result
from petiole.gpu_worker.scheduling.planning import prefill
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from tests.gpu_worker.models.test_logits import reference, tokens
from tests.support.families import WITH_STATES
from tests.support.trials import rest

ASKED = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=2)
SHARED = tokens(24)
PROMPTS = [[*SHARED, *tokens(n, seed=n)] for n in (9, 1, 16)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"chunk_size": 5, "max_num_batched_tokens": 8},
    {"prefill_policy": "drain", "pipeline": "off"},
    {"prefill_policy": "mixed", "chunk_size": 16, "speculative_tokens": 2},
]


def check(result: Result, prompt: list[int], model: Any, top: int = 2) -> None:
    """The entries of all tokens but the first, against transformers."""
    table = reference(model, prompt)
    entries = result.prompt_logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == prompt
    assert (entries[0].logprob, entries[0].top) == (0.0, [])
    for at, entry in enumerate(entries[1:]):
        np.testing.assert_allclose(entry.logprob, table[at, prompt[at + 1]], rtol=1e-3, atol=1e-3)
        likeliest = np.sort(table[at])[::-1][:top]
        np.testing.assert_allclose([value for _, value in entry.top], likeliest, rtol=1e-3, atol=1e-3)
        np.testing.assert_allclose([table[at, token] for token, _ in entry.top], likeliest, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "qwen3.5"])
@pytest.mark.parametrize("settings", rest(SETTINGS, 2), ids=["default", "chunks", "drain", "mixed"])
def test_they_are_those_of_transformers(
    family: str, settings: dict[str, Any], checkpoint: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cache has the prompt, and where some prompts of a step are scored and others are not."""
    monkeypatch.setattr(prefill, "MOST_SCORED", 7)
    folder, model = checkpoint(family)
    if family in WITH_STATES:
        settings = {**settings, "speculative_tokens": 0}
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_num_seqs=8, debug=True, **settings)
    with Engine(config, runtime=open_runtime(folder, **settings)) as engine:
        plain = [Request(prompt=prompt, sampling=replace(ASKED, prompt_logprobs=None)) for prompt in PROMPTS]
        expected = [result.token_ids for result in engine.generate(plain)]
        scored = [Request(prompt=prompt, sampling=ASKED) for prompt in PROMPTS]
        results = engine.generate([*scored, *plain])
        assert [result.token_ids for result in results] == expected * 2
        for result, prompt in zip(results, PROMPTS, strict=False):
            assert result.usage.cached_prompt_tokens == 0
            check(result, prompt, model)
        assert [result.prompt_logprobs for result in results[3:]] == [None] * 3
        [one] = engine.generate([Request(prompt=[5], sampling=ASKED)])
        check(one, [5], model)


def test_the_prompt_comes_before_the_output_and_each_token_once(
    checkpoint: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "MOST_SCORED", 7)
    scored: list[int] = []  # in each step; the scores of several steps may be pushed as one
    score = Scheduler._score

    def counting(self: Scheduler, step: Any, counts: list[int], output: Any) -> None:
        scored.append(sum(counts))
        score(self, step, counts, output)

    monkeypatch.setattr(Scheduler, "_score", counting)
    folder, _ = checkpoint("qwen3")
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_num_seqs=8, debug=True)
    with Engine(config, runtime=open_runtime(folder)) as engine:
        for known in range(0, len(PROMPTS[0]) + 1, 11):  # of an earlier attempt
            request = Request(prompt=PROMPTS[0], sampling=ASKED, resume_prompt_tokens=known)
            deltas: list[Delta] = list(engine.submit(request))
            at = known - len(PROMPTS[0])
            for delta in deltas:
                assert delta.index == at
                at += len(delta.token_ids)
                assert at <= 0 or delta.index >= 0, "a delta of both"
                if delta.index < 0:
                    assert delta.logprobs is not None
                    assert [entry.token_id for entry in delta.logprobs] == list(delta.token_ids)
            given = [token for delta in deltas if delta.index < 0 for token in delta.token_ids]
            assert given == PROMPTS[0][known:]
            assert at == 3
    assert 0 < max(scored) <= 7


def test_the_preempted_go_on_where_they_were(checkpoint: Any, open_runtime: Any) -> None:
    folder, model = checkpoint("qwen3")
    pages = {"num_pages": 97, "chunk_size": 8, "max_num_batched_tokens": 8}
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_num_seqs=8, debug=True, **pages)
    with Engine(config, runtime=open_runtime(folder, **pages)) as engine:
        sampling = replace(ASKED, max_tokens=30, ignore_eos=True)
        asked = [
            Request(prompt=prompt, sampling=sampling, priority=priority)
            for priority, prompt in ((2, PROMPTS[0]), (1, PROMPTS[1]), (0, PROMPTS[2]))
        ]
        handles = [engine.submit(request) for request in asked]
        results = [handle.result(timeout=60) for handle in handles]
        assert engine.stats()["preemptions"]
    for result, prompt in zip(results, PROMPTS, strict=True):
        check(result, prompt, model)


def test_what_is_refused_is_named(checkpoint: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = checkpoint("qwen3")
    refused: list[tuple[Callable[[Request], Request], str]] = [
        (lambda r: replace(r, sampling=replace(ASKED, prompt_logprobs=21)), "prompt_logprobs"),
        (lambda r: replace(r, resume_prompt_tokens=99), "resume_prompt_tokens"),
        (lambda r: replace(r, sampling=replace(ASKED, prompt_logprobs=None, logprob_texts=True)), "logprob_texts"),
    ]
    with Engine(EngineConfig(model=str(folder), device="cpu"), runtime=open_runtime(folder)) as engine:
        for change, field in refused:
            with pytest.raises(InvalidRequest) as raised:
                engine.generate([change(Request(prompt=PROMPTS[0], sampling=ASKED))])
            assert raised.value.field == field
        monkeypatch.setattr("petiole.gpu_worker.preparation.tokens.MOST_SCORES", 3 * len(PROMPTS[0]) - 1)
        with pytest.raises(
            InvalidRequest, match=r"prompt_logprobs: must give at most 98 .* got '?2 for 33 tokens"
        ):
            engine.generate([Request(prompt=PROMPTS[0], sampling=ASKED)])

"""Layers that keep a state, through the engine: what is found again, and that nothing advances a state twice.

The toy runtime checks before each step that a row's state stands where the step begins, and holds what its KV
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petiole.cache.groups import recurrent_states
from petiole.gpu_worker import Engine, EngineConfig, FinishReason, Request, SamplingParams
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.models.plan import DeltaNet, FeedForward, Layer, ModelPlan, Norm
from petiole.gpu_worker.runtime.derived_settings import require_states_alone
from petiole.gpu_worker.runtime.interface import DRAFTED
from tests.support.families import build_model
from tests.support.toy_engine import EOS, BoldHeadProposer, Expected, expected, request, toy_engine

SYSTEM = [1 + i % 40 for i in range(50)]
STATES = {"snapshots": 30}


def reused(engine: Engine, prompt: list[int], **how: Any) -> int:
    asked = request(prompt, 4, ignore_eos=True, request_id=f"{len(prompt)}", **how)
    result = engine.generate([asked])[0]
    assert Expected.of(result) == expected(asked)
    return result.usage.cached_prompt_tokens


def test_what_prompts_find_again() -> None:
    with toy_engine(machine=STATES) as engine:
        assert [reused(engine, SYSTEM) for _ in range(2)] == [0, 49]
        branches = [[*SYSTEM[:30], 40 + k, 7, 8] for k in range(3)]
        assert [reused(engine, prompt) for prompt in branches] == [0, 30, 30]
        talk = [5, 6, 7, EOS, 8, 9, EOS, 10]
        assert reused(engine, talk) == 0
        assert [reused(engine, [*talk[:end], 11, 12]) for end in (4, 7)] == [4, 7]
        engine.check_invariants()
        stats = engine.stats()
    assert stats["states_total"] == 8
    assert stats["snapshots_made"] > 0
    assert stats["state_hit_tokens"] == stats["prefix_hit_tokens"] == 49 + 30 + 30 + 4 + 7


@pytest.mark.parametrize("cache", ["radix", "block", "off"])
@pytest.mark.parametrize("snapshots", [2, 20])
def test_running_out_of_pages_changes_no_token(cache: str, snapshots: int) -> None:
    asked = [
        request([1 + i, 2, 3], 30, ignore_eos=True, temperature=0.6 * (i % 2), request_id=str(i)) for i in range(6)
    ]
    with toy_engine(machine={"n_pages": 60, "snapshots": snapshots}, prefix_cache=cache) as engine:
        assert [Expected.of(r) for r in engine.generate(asked)] == [expected(r) for r in asked]
        engine.check_invariants()
        assert engine.stats()["preemptions"]
        if cache == "radix" and snapshots > 2:
            assert int(engine.stats()["prefix_hit_tokens"]) > 0


def test_a_cancelled_answer_leaves_its_row_as_good_as_new() -> None:
    """Two steps of it are in flight when it ends; the next request gets the row."""
    with toy_engine(machine=STATES, max_num_seqs=1, jitter=lambda: time.sleep(0.0005)) as engine:
        for k in range(5):
            running = engine.submit(request([3 + k, 4, 5], 90, ignore_eos=True))
            next(iter(running))
            running.cancel()
            following = request([3 + k, 4, 9], 5, ignore_eos=True, request_id=str(k))
            assert Expected.of(engine.generate([following])[0]) == expected(following)
            assert running.result().finish_reason is FinishReason.CANCELLED
        engine.check_invariants()
        assert engine.stats()["zombie_outputs"] > 0


def test_after_a_reload_nothing_is_found_again() -> None:
    with toy_engine(machine=STATES) as engine:
        assert [reused(engine, SYSTEM) for _ in range(2)] == [0, 49]
        engine.reload("other")
        asked = request(SYSTEM, 4, ignore_eos=True, request_id="after")
        result = engine.generate([asked])[0]
        assert result.usage.cached_prompt_tokens == 0
        engine.check_invariants()
        assert engine.stats()["snapshots_free"] == engine.stats()["snapshots_total"] - 1


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("drafts", [1, 4])
def test_drafts_pass_over_no_snapshot(drafts: int, right: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long answer leaves as many as without drafts, and others go on from them."""
    monkeypatch.setattr(recurrent_states, "EVERY", 10)
    asked = request([3, 4, 5], 80, ignore_eos=True)
    made, drafted, found = [], [], []
    for most in (0, drafts):
        machine = {**STATES, "drafts": most, "right": right}
        with toy_engine(
            machine=machine, speculative_tokens=most, proposer=BoldHeadProposer([DRAFTED] * drafts)
        ) as engine:
            answer = engine.generate([asked])[0]
            assert Expected.of(answer) == expected(asked)
            made.append(engine.stats()["snapshots_made"])
            drafted.append(engine.stats()["draft_tokens"])
            found.append(reused(engine, [3, 4, 5, *answer.token_ids[:60], 1]))
            engine.check_invariants()
    assert made[0] == made[1] >= 8
    assert found == [60, 60]
    assert drafted[1] > drafted[0] == 0


@pytest.mark.parametrize("family", ["qwen3.5", "lfm2"])
def test_a_real_model_answers_alike_whatever_is_found_again(family: str, checkpoint: Callable[..., Any]) -> None:
    folder, _ = checkpoint(family)
    prompt = [3 + (7 * i) % 300 for i in range(90)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    asked = [
        Request(prompt=ids, sampling=greedy)
        for ids in (prompt, prompt, [*prompt[:70], 5, 6], [*prompt[:70], 8], [*prompt[:70], 9, 9], prompt)
    ]
    answers, found = [], []
    for settings in ({"prefix_cache": "off"}, {}, {"prefix_cache": "block", "page_size": 16}, {"pipeline": "off"}):
        config = EngineConfig(
            model=str(folder), device="cpu", dtype="float32", max_num_seqs=4, chunk_size=32, debug=True, **settings
        )
        with Engine(config, runtime=open_runtime(config)) as engine:
            results = [engine.generate([one])[0] for one in asked]
            engine.check_invariants()
        answers.append([result.token_ids for result in results])
        found.append([result.usage.cached_prompt_tokens for result in results])
    assert answers[1:] == answers[:1] * 3
    assert found == [[0] * 6, [0, 89, 0, 70, 70, 89], [0, 80, 0, 64, 64, 80], [0, 89, 0, 70, 70, 89]]


def open_runtime(config: EngineConfig) -> Any:
    from petiole.gpu_worker.runtime.runtime import ModelRuntime

    return ModelRuntime(config)


def test_rounded_snapshots_give_nearly_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("qwen3.5", linear_value_head_dim=32).save_pretrained(tmp_path)
    prompt = [3 + (7 * i) % 300 for i in range(90)]
    asked = Request(prompt=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))
    monkeypatch.setenv("PETIOLE_EXACT", "off")
    shown, held = [], []
    for rounded in ("none", "int8"):
        config = EngineConfig(
            model=str(tmp_path), device="cpu", dtype="float32", max_num_seqs=4, num_pages=400,
            snapshot_quantization=rounded,
        )  # fmt: skip
        with Engine(config, runtime=open_runtime(config)) as engine:
            first, again = (engine.generate([asked])[0] for _ in range(2))
            held.append(engine.stats()["snapshots_total"])
        assert [first.usage.cached_prompt_tokens, again.usage.cached_prompt_tokens] == [0, 89]
        shown += [dict(made.logprobs[0].top) for made in (first, again)]
    exact, *others = shown
    assert others[0] == others[1] == exact
    assert others[2] != exact
    assert others[2] == pytest.approx(exact, abs=0.5)  # random weights make much of small differences
    assert held[1] > 2 * held[0]


@pytest.mark.parametrize(
    ("exact", "value_dim", "drafts", "limit"),
    [
        ("auto", 128, 0, "PETIOLE_EXACT=off"),
        ("off", 40, 0, "40"),
        ("off", 128, 2, "with speculative_tokens, which are 2"),
    ],
)
def test_rounded_snapshots_are_refused(
    exact: str, value_dim: int, drafts: int, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = DeltaNet(key_heads=1, value_heads=1, key_dim=16, value_dim=value_dim, kernel=4, norm=Norm())
    plan = ModelPlan("test", 50, 32, (Layer(net, FeedForward(64), Norm(), feed_forward_norm=Norm()),), Norm(), 99)
    monkeypatch.setenv("PETIOLE_EXACT", exact)
    with pytest.raises(InvalidRequest, match=f"snapshot_quantization: must be none .*{limit}"):
        require_states_alone(EngineConfig(snapshot_quantization="int8", speculative_tokens=drafts), plan)

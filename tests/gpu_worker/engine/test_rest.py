"""`max_tokens="rest"`: what the context, and the KV cache, have room for behind the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gpu_worker import InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.scheduling.stopping import StopRules
from tests.support.toy_engine import MAX_MODEL_LEN, toy_engine


def answer(prompt: list[int], *, machine: dict[str, Any] | None = None, **more: Any) -> Any:
    sampling = SamplingParams(max_tokens="rest", ignore_eos=True, temperature=0, **more.pop("sampling", {}))
    with toy_engine(machine=machine) as engine:
        return engine.generate([Request(prompt=prompt, sampling=sampling, **more)])[0]


def test_the_rest_of_the_context() -> None:
    for length in (1, 5, MAX_MODEL_LEN - 1):
        result = answer([1] * length)
        assert (len(result.token_ids), result.stop_reason) == (MAX_MODEL_LEN - length, "max_model_len")


def test_the_rest_ends_where_the_kv_cache_does() -> None:
    pages = 40
    result = answer([1] * 10, machine={"n_pages": pages})
    assert len(result.token_ids) == pages - 1 - 10 + 1


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: must fit, with the prompt, into the KV cache"):
        answer([1] * 30, machine={"n_pages": 20})


def test_a_resumed_task_goes_on_to_the_same_end() -> None:
    whole = answer([1] * 5)
    resumed = answer([1] * 5, resume_token_ids=whole.token_ids[:40])
    assert resumed.token_ids == whole.token_ids


def test_min_tokens_need_not_be_below_the_rest() -> None:
    rules = StopRules.of(SamplingParams(max_tokens="rest", min_tokens=50), frozenset(), 10, 40)
    assert rules.max_output_tokens == 30
    assert len(answer([1] * 5, sampling={"min_tokens": 3}).token_ids) == MAX_MODEL_LEN - 5


def test_another_text_is_refused() -> None:
    with (
        toy_engine() as engine,
        pytest.raises(InvalidRequest, match=r"^max_tokens: must be an integer, or"),
    ):
        engine.generate([Request(prompt=[1], sampling=SamplingParams(max_tokens="all"))])  # type: ignore[arg-type]

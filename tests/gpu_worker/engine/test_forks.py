"""A prompt and a part of its answer, sent while the answer is still being made; and equal prompts side by side."""

from __future__ import annotations

import time
from typing import Any

import pytest

from petiole.cache import PageTable
from petiole.gpu_worker import Engine, EngineConfig, EngineError
from petiole.gpu_worker.request import Request
from petiole.gpu_worker.scheduling.priorities.admission import RUN_TOKENS
from tests.support.toy_engine import Expected, expected, request, toy_engine
from tests.support.trials import rest

MAX_MODEL_LEN = 600
PROMPT = [5, 6, 7, 8]

POLICIES: dict[str, dict[str, Any]] = {
    "pipelined": {},
    "blocking": {"pipeline": "off"},
    "drained prefill": {"prefill_policy": "drain"},
    "mixed steps": {"prefill_policy": "mixed", "chunk_size": 7},
    "blocks of one": {"prefix_cache": "block"},
    "blocks": {"prefix_cache": "block", "page_size": 16},
    "speculation": {"speculative_tokens": 4},
    "speculation on blocks": {"speculative_tokens": 4, "prefix_cache": "block", "page_size": 16},
    "full reserve": {"reserve": "full"},
}


def long_engine(**config: Any) -> Engine:
    machine = {"max_model_len": MAX_MODEL_LEN, "n_pages": 4000, **config.pop("machine", {})}
    return toy_engine(machine=machine, lora_slots=2, **config)


def answer_so_far(engine: Engine, origin: Request, n: int) -> tuple[Any, list[int]]:
    """Submit a request, and stop the engine once at least `n` tokens have been read. Its handle and the tokens."""
    tokens: list[int] = []
    handle = engine.submit(origin, on_delta=lambda _, delta: tokens.extend(delta.token_ids))
    while len(tokens) < n:
        time.sleep(0)
    engine.pause()
    assert not handle.done()
    return handle, list(tokens)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("adapter", rest(["a", None]))
def test_a_fork_of_a_running_answer_reuses_what_was_read(policy: dict[str, Any], adapter: str | None) -> None:
    origin = request(PROMPT, 580, ignore_eos=True, adapter=adapter, temperature=0.8, seed=1)
    with long_engine(jitter=lambda: time.sleep(0.0002), **policy) as engine:
        running, read = answer_so_far(engine, origin, 2 * RUN_TOKENS)
        parts = [(RUN_TOKENS + 20, []), (RUN_TOKENS + 20, [1, 2, 3]), (2 * RUN_TOKENS, [])]
        forks = [request(PROMPT + read[:n] + more, 20, adapter=adapter) for n, more in parts]
        handles = [engine.submit(fork) for fork in forks]
        engine.resume()
        size = engine.scheduler.manager.table.page_size
        for fork, (n, more), handle in zip(forks, parts, handles, strict=True):
            result = handle.result(timeout=60)
            assert Expected.of(result) == expected(fork, MAX_MODEL_LEN)
            known = len(PROMPT) + n - (not more)  # the last token is always computed
            assert result.usage.cached_prompt_tokens >= known // size * size
        assert Expected.of(running.result(timeout=60)) == expected(origin, MAX_MODEL_LEN)


def test_a_fork_in_another_namespace_reuses_nothing() -> None:
    with long_engine(jitter=lambda: time.sleep(0.0002)) as engine:
        running, read = answer_so_far(engine, request(PROMPT, 400, ignore_eos=True), RUN_TOKENS + 5)
        fork = request(PROMPT + read, 5, salt="tenant")
        handle = engine.submit(fork)
        engine.resume()
        assert handle.result(timeout=60).usage.cached_prompt_tokens == 0
        running.cancel()


@pytest.mark.parametrize("cache", ["radix", "block"])
def test_the_shipped_model_goes_on_from_a_part_of_a_running_answer(cache: Any) -> None:
    prompt = list(range(5, 45))
    settings = EngineConfig(
        model="petiole-tiny", device="cpu", dtype="float32", debug=True, num_pages=2000, prefix_cache=cache
    )
    with Engine(settings) as engine:
        running, read = answer_so_far(engine, request(prompt, 400, ignore_eos=True), RUN_TOKENS + 10)
        n = RUN_TOKENS + 5
        handle = engine.submit(request(prompt + read[:n], 20, ignore_eos=True))
        engine.resume()
        fork, whole = handle.result(timeout=60), running.result(timeout=60)
        size = engine.scheduler.manager.table.page_size
    assert fork.usage.cached_prompt_tokens == (len(prompt) + n - 1) // size * size
    assert fork.token_ids == whole.token_ids[n : n + 20]


def side_by_side(**config: Any) -> bool:
    """Do prompts with a long common beginning, computed in one step, give the oracle's tokens? More requests take
    the pages that become free in between."""
    shared = [1 + i % 40 for i in range(60)]
    requests = [
        request(
            [*shared, 41 + i, *range(1, 48), *range(1, 20 + i)],
            30 + 10 * i,
            ignore_eos=True,
            temperature=0.5,
            request_id=str(i),
        )
        for i in range(4)
    ]
    requests += [request([45 + i % 3, 9, i], 40, ignore_eos=True, request_id=f"s{i}") for i in range(8)]
    engine = long_engine(machine={"n_pages": 900}, max_num_batched_tokens=2048, **config).start()
    try:
        engine.pause()
        handles = [engine.submit(one) for one in requests]
        engine.resume()
        return [Expected.of(handle.result(timeout=60)) for handle in handles] == [
            expected(one, MAX_MODEL_LEN) for one in requests
        ]
    except (AssertionError, EngineError):
        return False
    finally:
        engine.shutdown(drain=False)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_prompts_with_a_common_beginning_in_one_step_share_it_afterwards(
    policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    remap = PageTable.remap

    def count(self: PageTable, *how: Any) -> int:
        freed.append(remap(self, *how))
        return freed[-1]

    monkeypatch.setattr(PageTable, "remap", count)
    assert side_by_side(**policy)
    assert sum(freed) >= 60 // policy.get("page_size", 1)


def test_a_remapped_row_whose_entries_the_device_does_not_learn_answers_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PageTable, "remapped", lambda self, rows: [])  # broken: the step sends only new entries
    assert not side_by_side()

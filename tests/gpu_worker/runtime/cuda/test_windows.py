"""Layers with windows on the CUDA path have a pool of their own, whose pages other rows get when they fall behind.
Far beyond the window the tokens stay those of transformers, on a device that computes as late as it may."""

from __future__ import annotations

from threading import Semaphore
from typing import Any

import numpy as np
import pytest
import torch

from bench.harness.driver import Driver
from petiole.gpu_worker import Engine, Request, SamplingParams
from petiole.gpu_worker.runtime.cuda import executor, graphs
from petiole.gpu_worker.runtime.interface import StepBatch
from tests.gpu_worker.models.test_generation import oracle
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.gpu_worker.runtime.cuda.test_late_device import late
from tests.support import fake_flashinfer

__all__ = ["late"]

WINDOW, N_TOKENS = 7, 30
PROMPTS = [tokens(n, n) for n in (150, 90, 3, 121, 60, 140)]


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """The first one is being answered when the others come, which are more urgent."""
    asked, prepared = SamplingParams(max_tokens=N_TOKENS, ignore_eos=True, temperature=0.0), Semaphore(0)
    requests = [Request(prompt=prompt, sampling=asked, priority=9 * (not i)) for i, prompt in enumerate(prompts)]
    handles, launch = [], engine.runtime.launch_forward

    def forward(slot_id: int, batch: StepBatch) -> None:
        if batch.starts.max() > len(prompts[0]) and len(handles) == 1:
            handles.extend(engine.submit(one, on_prepared=lambda *_: prepared.release()) for one in requests[1:])
            assert all(prepared.acquire(timeout=60) for _ in requests[1:])
        launch(slot_id, batch)

    engine.runtime.launch_forward = forward
    handles.append(engine.submit(requests[0]))
    handles[0].result(timeout=60)
    engine.runtime.launch_forward = launch
    return [list(handle.result(timeout=60).token_ids) for handle in handles]


def gauge(engine: Engine, name: str) -> float:
    return engine.stats()[f"window_{WINDOW}_{name}"]


@pytest.mark.parametrize(
    ("family", "page_size", "policy", "drafts"),
    [
        ("gemma3", 1, "pipelined", 0),
        ("gemma3", 16, "mixed", 3),
        ("gemma4", 1, "pipelined", 3),
        ("mistral", 1, "mixed", 0),
    ],
)
def test_pages_behind_the_window_are_other_rows_and_the_tokens_those_of_transformers(
    family: str, page_size: int, policy: str, drafts: int, checkpoint: Any, late: Any
) -> None:
    """In less memory than the sequences need at once. The one that gives way goes on behind what is cached."""
    folder, model = checkpoint(family)
    expected = [oracle(model, prompt, N_TOKENS) for prompt in PROMPTS]
    cache = "radix" if page_size == 1 else "block"
    settings = {"page_size": page_size, "prefix_cache": cache, "prefill_policy": policy, "chunk_size": 8}
    settings |= {
        "num_pages": 1 + (256 if page_size == 1 else 64),
        "max_model_len": 256,
        "speculative_tokens": drafts,
    }
    with late(folder, debug=True, **settings) as engine:
        (pool,) = engine.runtime.limits.windows
        assert pool.window == WINDOW
        assert pool.n_pages == (65 if page_size == 1 else 17)
        assert answers(engine) == expected
        assert engine.stats()["preemptions"] > 0 or page_size > 1
        assert gauge(engine, "pages_evicted") * page_size > 200, "far more positions than the pool has"
        again = engine.stats()["prefix_hit_tokens"]
        assert answers(engine, PROMPTS[:1]) == expected[:1]
        assert engine.stats()["prefix_hit_tokens"] - again >= 120, "its window is still there"
        assert gauge(engine, "pages_held") == 0


def test_the_pool_holds_windows_where_the_table_holds_sequences(checkpoint: Any, late: Any) -> None:
    held = []
    with late(checkpoint("gemma3")[0], chunk_size=8, prefix_cache="off", max_model_len=256) as engine:
        launch = engine.runtime.launch_forward

        def forward(slot_id: int, batch: StepBatch) -> None:
            held.append((gauge(engine, "pages_held"), engine.stats()["pages_private"]))
            launch(slot_id, batch)

        engine.runtime.launch_forward = forward
        answers(engine, PROMPTS[:2])
    own, of_table = np.array(held).max(axis=0)
    assert of_table > 240
    assert own <= 2 * (WINDOW + 2 + 16 + 2 * 8)


@pytest.mark.parametrize("way", ["captured", "eager"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_attention_is_told_of_no_page_behind_the_window(
    way: str, page_size: int, checkpoint: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in these pages, no number among them, reaches nothing."""
    monkeypatch.setenv("PETIOLE_NATIVE", "off")
    fake_flashinfer.install(monkeypatch)
    folder, model = checkpoint("gemma3")
    settings = {"page_size": page_size, "prefix_cache": "off", "chunk_size": 32, "speculative_tokens": 3}
    if way == "eager":
        settings["cuda_graphs"] = "off"
    runtime = open_runtime(folder, graph_batch_sizes=(4,), **settings)
    driver = Driver(fake_flashinfer.compute_as_on_cuda(runtime))
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (90, 21, 50)]
    driver.prefill(sequences, [70, 9, 33])
    spoil(runtime, [70, 9, 33], [one.row for one in sequences])
    driver.prefill(sequences)
    spoil(runtime, [90, 21, 50], [one.row for one in sequences])
    history = [one.prompt + one.output for one in sequences]
    drafts = [[7, 8, 9], [5], []]
    got = table(driver.verify(sequences, drafts))
    expected = [
        reference(model, known + more)[-1 - len(more) :] for known, more in zip(history, drafts, strict=True)
    ]
    assert relative_error(got, np.concatenate(expected)) < 1e-4


def spoil(runtime: Any, ends: list[int], rows: list[int]) -> None:
    """No numbers in all positions of the windows' pools but those that the rows' next steps read."""
    cache = runtime._memory.cache
    kept = torch.zeros(cache.windows[0].n_pages * cache.page_size, dtype=torch.bool)
    kept[: cache.page_size] = True
    for row, end in zip(rows, ends, strict=True):
        first = max(0, end - (WINDOW - 1)) // cache.page_size * cache.page_size
        positions = torch.arange(first, end)
        kept[cache.slots(torch.full_like(positions, row), positions, 1)] = True
    for layer, group in enumerate(cache.groups):
        if group:
            cache.keys[layer][~kept] = cache.values[layer][~kept] = torch.nan


@pytest.mark.parametrize("kind", ["captured", "eager"])
def test_a_list_that_begins_too_late_gives_wrong_tokens(
    kind: str, checkpoint: Any, late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken on purpose."""
    module = graphs if kind == "captured" else executor
    counts = module.host_page_counts

    def late_by_one(cache: Any, starts: Any, queries: Any, ends: Any) -> Any:
        return counts(cache, starts + 1, queries, ends)

    monkeypatch.setattr(module, "host_page_counts", late_by_one)
    folder, model = checkpoint("gemma3")
    settings = {"cuda_graphs": "on" if kind == "captured" else "off"}
    with late(folder, chunk_size=8, max_model_len=256, **settings) as engine:
        found = answers(engine)
    assert found != [oracle(model, prompt, N_TOKENS) for prompt in PROMPTS]

"""Attention of rows whose true length only the card knows: right where keys are not split, wrong where they are.
So on CUDA no step is in doubt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from petiole.gpu_worker import EngineError
from petiole.gpu_worker.runtime.interface import DRAFTED, StepBatch
from tests.gpu_worker.models.test_generation import oracle
from tests.gpu_worker.runtime.cuda.test_late_device import N_TOKENS, PROMPTS, answers, late
from tests.support import fake_flashinfer
from tests.support.late_device import LateDevice
from tests.support.split_keys import CHUNK, Row, agree, chunks

__all__ = ["late"]

WIDTH, DRAFTS = 8, 4
QUERIES = (1, 2, 1 + DRAFTS)
IN_DOUBT = 2 * (1 + DRAFTS)
"""So many positions at most lie between what is planned and what is true, with two verifications in flight."""


def lengths(chunk: int) -> Iterator[tuple[int, int]]:
    """Planned lengths about the edges of chunks, and the true ones that each may have."""
    for edge in range(chunk, 4 * chunk + 1, chunk):
        for planned in range(edge - IN_DOUBT, edge + IN_DOUBT):
            for length in range(max(max(QUERIES), planned - IN_DOUBT), planned + 1):
                yield planned, length


@pytest.mark.parametrize("queries", QUERIES)
def test_split_keys_are_merged_right_only_where_plan_and_card_agree(queries: int) -> None:
    rng, chunk = np.random.default_rng(queries), 16
    q = rng.normal(size=(queries, WIDTH))
    k, v = rng.normal(size=(2, 8 * chunk, WIDTH))
    wrong = 0
    for planned, length in lengths(chunk):
        row = Row(q, k, v, planned, length)
        for tensor_cores in (True, False)[: 1 + (queries == 1)]:
            right = agree(planned, length, queries, tensor_cores=tensor_cores, chunk=chunk)
            found = row.merged(chunk, tensor_cores=tensor_cores)
            assert np.allclose(found, row.whole()) == right, (planned, length, tensor_cores)
            wrong += not right
        assert np.allclose(row.merged(8 * chunk), row.whole()), "one chunk is the whole"
    assert wrong


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("queries", QUERIES)
def test_a_pretended_card_gives_nothing_right_that_a_real_one_would_not(
    queries: int, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_flashinfer, "PROCESSORS", 4 if split else 0)
    page_size = 16
    pages = tuple(torch.randn(40, page_size, 1, WIDTH) for _ in range(2))
    q = torch.randn(queries, 1, WIDTH)
    sizes = {"sm_scale": 1.0, "q_data_type": torch.float32, "kv_data_type": torch.float32, "window_left": -1}

    def listed(length: int) -> list[torch.Tensor]:
        n = chunks(length, page_size)
        return [
            torch.tensor(values, dtype=torch.int32)
            for values in ([0, n], list(range(n)), [length - (n - 1) * page_size])
        ]

    def attend(planned: int, length: int) -> torch.Tensor:
        buffers = [torch.zeros(n, dtype=torch.int32) for n in (2, 40, 1)]
        wrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            fake_flashinfer.workspace(),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffers[0],
            paged_kv_indices_buffer=buffers[1],
            paged_kv_last_page_len_buffer=buffers[2],
            backend="fa2",
        )
        wrapper.plan(
            *listed(planned), 1, 1, WIDTH, page_size, disable_split_kv=not split, q_len_per_req=queries, **sizes
        )
        wrapper._land()
        for buffer, true in zip(buffers, listed(length), strict=True):
            buffer[: len(true)] = true
        return wrapper.run(q, pages, out=torch.empty_like(q))

    for planned in (CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3):
        for length in range(planned - IN_DOUBT, planned + 1):
            same = torch.allclose(attend(planned, length), attend(length, length))
            assert same == (not split or agree(planned, length, queries)), (planned, length)


def test_on_a_card_no_step_is_in_doubt(checkpoint: Any, late: Any) -> None:
    """Whether a row's keys are split follows from all rows of its step. So every row verifies exclusively."""
    folder, model = checkpoint("qwen3")
    batches: list[StepBatch] = []
    with late(folder, speculative_tokens=3) as engine:
        assert not engine.runtime.limits.goes_ahead
        launch = engine.runtime.launch_forward

        def forward(slot_id: int, batch: StepBatch) -> None:
            batches.append(batch)
            launch(slot_id, batch)

        engine.runtime.launch_forward = forward
        assert answers(engine) == [oracle(model, prompt, N_TOKENS) for prompt in PROMPTS]
    assert any((batch.outputs > 1).any() for batch in batches)
    assert all(batch.in_doubt is None and DRAFTED not in batch.token_ids for batch in batches)


def test_a_card_that_went_ahead_would_give_wrong_tokens(
    checkpoint: Any, late: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken on purpose: what a verification leaves to its rows' next steps is read before it is there."""
    folder, model = checkpoint("qwen3")
    monkeypatch.setattr(LateDevice, "tasks_wait", True)
    with late(folder, speculative_tokens=3) as engine:
        assert engine.runtime.limits.goes_ahead
        try:
            found = answers(engine)
        except EngineError:
            return
    assert found != [oracle(model, prompt, N_TOKENS) for prompt in PROMPTS]

"""Attention in torch with bidirectional regions, against one product over everything with an explicit mask."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.runtime.cpu.attention import PagedAttention
from petiole.gpu_worker.runtime.interface import NO_UPDATES, PageUpdates, StepBatch
from petiole.gpu_worker.runtime.memory.kv import KVCache, new_kv_cache
from petiole.gpu_worker.runtime.step.inputs import lay_out
from tests.support.plans import each_layer, plan_of

HEADS, WIDTH, LONGEST = 2, 16, 40
PLAN = plan_of(hidden=32, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH, max_position=LONGEST)
PLAN = each_layer(PLAN, mixer=replace(PLAN.mixers[0], mask="prefix"))


def new_cache() -> KVCache:
    cache = new_kv_cache(
        PLAN,
        n_pages=101,
        page_size=1,
        rows=3,
        max_model_len=LONGEST,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    columns = np.tile(np.arange(LONGEST, dtype=np.int32), 2)
    rows = np.repeat(np.array([1, 2], np.int32), LONGEST)
    cache.update(PageUpdates(rows, columns, np.arange(1, 1 + 2 * LONGEST, dtype=np.int32)))
    return cache


def attend(cache: KVCache, parts: list[tuple[int, int]], regions: list[tuple[int, int, int]], qkv: torch.Tensor):
    """`parts`: start and end of the positions of each of the two rows in this step. qkv: [2, LONGEST, 3, H, D]"""
    starts = np.array([start for start, _ in parts], np.int32)
    lengths = np.array([end - start for start, end in parts], np.int32)
    n = int(lengths.sum())
    zeros = np.zeros(2, np.int32)
    bounds = np.array(regions, np.int32) if regions else None
    both, tokens = np.array([1, 2], np.int32), np.zeros(n, np.int32)
    batch = StepBatch("prefill", both, starts, lengths, tokens, zeros, zeros - 1, [], NO_UPDATES, regions=bounds)
    inputs = lay_out(batch, zeros)
    rows, positions = torch.from_numpy(inputs.rows), torch.from_numpy(inputs.positions)
    attention = PagedAttention(
        cache=cache,
        plan=PLAN.mixers,
        rows=torch.from_numpy(inputs.batch_rows),
        starts=starts,
        lengths=lengths,
        slots=[cache.slots(rows, positions)],
        limits=None if inputs.limits is None else torch.from_numpy(inputs.limits),
    )
    q, k, v = qkv[rows - 1, positions].unbind(1)
    table = torch.cat([torch.ones(LONGEST, WIDTH // 2), torch.zeros(LONGEST, WIDTH // 2)], dim=1)
    out = attention.attend(0, q, k, v, Rotation(None, 1e-6, positions, table))
    return out.split(lengths.tolist())


@pytest.mark.parametrize(
    "chunks", [[(0, 30)], [(0, 1), (1, 30)], [(0, 12), (12, 30)], [(0, 12), (12, 20), (20, 30)]]
)
def test_positions_of_a_region_see_all_of_it_and_others_what_is_before_them(chunks: list[tuple[int, int]]) -> None:
    """Of two rows, the first has regions at 0 to 12 and 15 to 20; in some steps, part of a region is cached."""
    qkv = torch.randn(2, LONGEST, 3, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    seen = torch.ones(2, 30, 30, dtype=torch.bool).tril()
    seen[0, :12, :12] = seen[0, 15:20, 15:20] = True
    if chunks[0] == (0, 1):
        seen[0, 0, 1:] = False  # it was computed before the rest
    q, k, v = qkv[:, :30].permute(2, 0, 3, 1, 4)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None]).transpose(1, 2).flatten(2)
    cache, found = new_cache(), [list[torch.Tensor](), list[torch.Tensor]()]
    for start, end in chunks:
        regions = [(0, b, e) for b, e in ((0, 12), (15, 20)) if start < e and b < end and (start, end) != (0, 1)]
        for row, part in enumerate(attend(cache, [(start, end), (start, end)], regions, qkv)):
            found[row].append(part)
    for row in range(2):
        assert torch.allclose(torch.cat(found[row]), expected[row], atol=1e-5)

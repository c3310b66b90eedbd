"""Copies of keys and values between the pool and the host, in the order of the steps, through a ring of blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.harness.checkpoints.decoders import TINY, config
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.memory.copies import PoolCopies
from petiole.gpu_worker.runtime.memory.kv import KVCache, new_kv_cache
from tests.support.families import build_model
from tests.support.late_device import LateDevice

N = 4


def plan_of(family: str, folder: Path) -> ModelPlan:
    build_model(family).save_pretrained(folder)
    return model_of(json.loads((folder / "config.json").read_text())).plan


def pool_of(plan: ModelPlan, page_size: int = 1) -> KVCache:
    cache = new_kv_cache(
        plan,
        n_pages=40 // page_size,
        page_size=page_size,
        rows=2,
        max_model_len=40,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for pools in (cache.keys, cache.values):
        for pool in pools:
            pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(pool.shape[0])))
    return cache


@pytest.fixture
def late() -> tuple[KVCache, LateDevice, PoolCopies]:
    plan, device = model_of(config(TINY)).plan, LateDevice()
    cache = pool_of(plan)
    copies = PoolCopies(cache, plan, device.new_stream("compute"), lambda: device.new_stream("kv"))  # type: ignore[arg-type]
    copies.make_ring(2, N)
    return cache, device, copies


def test_a_copy_has_what_launched_steps_write_and_nothing_of_later_ones(
    late: tuple[KVCache, LateDevice, PoolCopies],
) -> None:
    cache, device, copies = late
    compute, slots = device.streams[0], np.array([7, 3, 9, 20])
    compute.enqueue(lambda: cache.keys[0][3].fill_(5.0))
    copy = copies.to_host(slots)
    assert copy is not None
    compute.enqueue(lambda: cache.keys[0][3].fill_(6.0))
    found = torch.from_numpy(copy.wait()).view(torch.float32)
    width = cache.keys[0][0].numel()
    assert (found[width : 2 * width] == 5.0).all()
    assert not compute.queue or (cache.keys[0][3] == 5.0).all(), "nothing beyond the copy's own event is awaited"


def test_a_full_ring_drops_and_a_block_is_filled_again_only_when_it_is_given_back(
    late: tuple[KVCache, LateDevice, PoolCopies],
) -> None:
    copies = late[2]
    slots = np.arange(N)
    first, second = copies.to_host(slots), copies.to_host(slots + 10)
    assert first is not None
    assert second is not None
    assert copies.to_host(slots) is None
    before = first.wait().copy()
    second.release()
    third = copies.to_host(slots + 20)
    assert third is not None
    assert copies.to_host(slots) is None
    assert not np.array_equal(third.wait(), before)
    assert np.array_equal(first.wait(), before), "it is not given back"


def test_what_is_owed_is_written_before_positions_are_copied_or_overwritten() -> None:
    """In stream order: nothing happens before the stream is there."""
    plan, device = model_of(config(TINY)).plan, LateDevice()
    cache = pool_of(plan)
    cache.keys[0].zero_()
    stream = device.new_stream("compute")
    copies = PoolCopies(cache, plan, stream, lambda: stream, before=lambda: cache.keys[0][3].add_(1.0))  # type: ignore[arg-type]
    copies.make_ring(1, 1)
    copy = copies.to_host(np.array([3]))
    assert copy is not None
    assert not cache.keys[0].any()
    assert (torch.from_numpy(copy.wait()).view(torch.float32)[: cache.keys[0][0].numel()] == 1.0).all()
    copies.from_host(np.array([3]), copies.staging(copies.position_bytes).zero_(), 0)
    device.synchronize()
    assert not cache.keys[0][3].any(), "what is owed does not come behind"


@pytest.mark.parametrize("family", ["llama3", "deepseek-v2", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_copied_comes_back_bit_by_bit(family: str, page_size: int, tmp_path: Path) -> None:
    plan, device = plan_of(family, tmp_path), CpuDevice()
    cache, stream = pool_of(plan, page_size), device.new_stream("compute")
    copies = PoolCopies(cache, plan, stream, lambda: stream)
    copies.make_ring(1, N)
    before = [pool.clone() for pool in (*cache.keys, *cache.values)]
    copy = copies.to_host(np.array([8, 9, 10, 11]))
    assert copy is not None
    staged = copies.staging(N * copies.position_bytes)
    np.asarray(staged)[:] = copy.wait()
    copies.from_host(np.array([21, 22]), staged, 1)
    stream.synchronize()
    for pool, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(pool[21:23], old[9:11])
        rest = [slot for slot in range(len(pool)) if slot not in (21, 22)]
        assert torch.equal(pool[rest], old[rest])
    assert len(copies._runs) <= 2, "few kernels, whatever the number of layers"
    device.close()

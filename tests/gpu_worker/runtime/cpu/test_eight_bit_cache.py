"""Keys and values in eight bits: how the compiled CPU path writes and reads them, and how little both CPU paths'
answers change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.harness.driver import Driver
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.forward import NativeDecoder, native_decoder
from petiole.gpu_worker.runtime.memory.kv import KVCache
from tests.gpu_worker.runtime.cpu.test_native_attention import (
    random_decoder,
    scattered_cache,
    small,
    step,
)
from tests.support.plans import each_mixer

EIGHT_BITS = torch.float8_e4m3fn
compiled = pytest.mark.skipif(load_library() is None, reason="no C compiler")


def config(head_dim: int, window: int = 0) -> ModelPlan:
    return small(6, 3, head_dim, (window,))


def opened(decoder: Decoder, cache: KVCache) -> NativeDecoder:
    native = native_decoder(decoder, cache)
    assert native is not None
    return native


def with_heads_of_all_sizes(decoder: Decoder) -> Decoder:
    """Keys and values from far below the smallest number of eight bits to far above the largest."""
    (layer,) = decoder.layers
    assert isinstance(layer.mixer.qkv, DenseLinear)
    n, k = layer.mixer.qkv.weight.shape
    by = torch.logspace(-5, 4, n)[torch.randperm(n, generator=torch.Generator().manual_seed(1))]
    qkv = DenseLinear(torch.randn(n, k, generator=torch.Generator().manual_seed(2)) * by[:, None])
    mixer = replace(layer.mixer, qkv=qkv, q_norm=None, k_norm=None)
    plan = each_mixer(decoder.plan, q_norm=None, k_norm=None)
    return replace(decoder, plan=plan, layers=(replace(layer, mixer=mixer),))


@compiled
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_what_is_kept_is_the_nearest_number_of_eight_bits(head_dim: int) -> None:
    token_ids, positions, at = step([0, 1], [0, 0], [200, 1])
    kept: dict[torch.dtype, KVCache] = {}
    for dtype in (torch.float32, EIGHT_BITS):
        decoder = with_heads_of_all_sizes(random_decoder(config(head_dim), torch.float32))
        kept[dtype] = scattered_cache(decoder.plan, 1, 2, dtype)
        opened(decoder, kept[dtype]).forward(0, token_ids, positions, at, torch.arange(1))
    slots = kept[torch.float32].slots(at, positions)
    for name in ("keys", "values"):
        exact, found = (getattr(kept[dtype], name)[0][slots] for dtype in (torch.float32, EIGHT_BITS))
        assert exact.abs().min() < 2**-11
        assert exact.abs().max() > 1000
        wanted = exact.clamp(-448, 448).to(EIGHT_BITS)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("queries", [1, 3, 40])
def test_eight_bits_are_read_as_the_same_numbers_in_bfloat16(
    dtype: torch.dtype, page_size: int, window: int, head_dim: int, queries: int
) -> None:
    """The queries see what lies before them, but not one another: in bfloat16 these are not rounded so much."""
    starts = [300, 129, 1]
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)

    def logits(kept: torch.dtype) -> Tensor:
        decoder = random_decoder(config(head_dim, window), dtype)
        cache = scattered_cache(decoder.plan, page_size, len(starts), kept)
        generator = torch.Generator().manual_seed(3)
        for pool in (*cache.keys, *cache.values):
            drawn = codes[torch.randint(len(codes), pool.shape, generator=generator)].view(EIGHT_BITS)
            pool.view(torch.uint8).copy_(drawn.to(kept).view(torch.uint8))
        token_ids, positions, at = step(range(len(starts)), starts, [queries] * len(starts))
        limits = torch.tensor(starts).repeat_interleave(queries)
        hidden = decoder.embed(token_ids).float()
        asked = token_ids, positions, at, torch.arange(len(at))
        return opened(decoder, cache).forward(0, *asked, hidden=hidden, limits=limits).clone()

    assert torch.equal(logits(EIGHT_BITS), logits(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_eight_bits_change_the_scores_of_tokens_little(dtype, checkpoint, open_runtime) -> None:
    sampling = SamplingParams(temperature=0.0, logprobs=320)
    found = []
    for kv_dtype in ("auto", "fp8"):
        driver = Driver(open_runtime(checkpoint("qwen3")[0], dtype=dtype, kv_dtype=kv_dtype))
        sequence = driver.sequence([5 + 7 * i % 300 for i in range(140)], sampling)
        driver.prefill([sequence], [100])
        scores = driver.prefill([sequence]).top_logprobs[0]
        found.append(torch.from_numpy(scores.copy()).float())
    exact, rounded = found
    assert not torch.equal(exact, rounded)
    assert (rounded - exact).abs().mean() < 0.05 * (exact - exact.mean()).abs().mean()

"""The parallel block of Moondream in compiled code: what torch computes, with bidirectional regions and without;
and the same bits alone, in chunks and among others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from petiole.gpu_worker.models.decoder import Forward
from petiole.gpu_worker.models.families.moondream import NAMES
from petiole.gpu_worker.models.loading import LoadOptions, Model, read_decoder
from petiole.gpu_worker.models.moondream.config import HEAD_DIM, text_plan
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.formats.unread import is_beside_codes
from petiole.gpu_worker.runtime.cpu.attention import PagedAttention
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.forward import NativeDecoder, native_decoder
from petiole.gpu_worker.runtime.memory.kv import KVCache
from tests.gpu_worker.runtime.cpu.test_native_attention import MAX_LENGTH, scattered_cache
from tests.support.dtypes import widened

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")

VOCAB = 41
CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dataclass(frozen=True)
class Prompt:
    """A prompt: positions [begin, end) of it see each other."""

    length: int
    begin: int = 0
    end: int = 0

    @property
    def limits(self) -> Tensor:
        limits = torch.arange(1, self.length + 1)
        limits[self.begin : self.end] = self.end
        return limits


def sequences(draw: Any) -> Prompt:
    length = draw(st.sampled_from([127, 128, 129, 256, 257]) | st.integers(1, 300))
    begin = draw(st.integers(0, length - 1))
    return Prompt(length, begin, draw(st.integers(begin, length)))


PROMPTS = st.lists(st.composite(sequences)(), min_size=1, max_size=3)
CONFIGS = st.builds(
    lambda heads, ff, layers: text_plan(
        {"config": {"text": {"dim": HEAD_DIM * heads, "n_heads": heads, "ff_dim": ff, "n_layers": layers,
                             "vocab_size": VOCAB, "max_context": MAX_LENGTH}}}
    ),
    heads=st.integers(1, 3),
    ff=st.sampled_from([18, 64, 130, 320]),
    layers=st.integers(1, 3),
)  # fmt: skip


class Drawn:
    """Large biases, and embeddings of different sizes."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return not is_beside_codes(name)

    def copy(self, name: str, into: Tensor) -> int:
        drawn = torch.randn(into.shape, generator=self._generator) * into.shape[-1] ** -0.5
        by = 8.0 if name.endswith("wte") else 3.0 if name.endswith("bias") else 1.5 if into.ndim > 1 else 1.0
        into.copy_(by * drawn + (into.ndim == 1 and name.endswith("weight")))
        return into.nbytes

    def quantised(self, name: str, outputs: int, inputs: int) -> None:
        return None


def random_decoder(plan: ModelPlan, dtype: torch.dtype) -> MoondreamDecoder:
    text = read_decoder(Drawn(), Model({}, plan, NAMES, read_decoder), LoadOptions(CPU, dtype, MAX_LENGTH))
    return MoondreamDecoder.around(text, vision=None, region=None)


@dataclass(frozen=True)
class Step:
    """Chunks of several prompts: [start, start + n) of row i's."""

    prompts: Sequence[Prompt]
    rows: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]

    def of(self, each: Any) -> Tensor:
        return torch.cat(
            [each(row)[s : s + n] for row, s, n in zip(self.rows, self.starts, self.lengths, strict=True)]
        )

    @property
    def positions(self) -> Tensor:
        return self.of(lambda row: torch.arange(MAX_LENGTH))

    @property
    def at(self) -> Tensor:
        return self.of(lambda row: torch.full((MAX_LENGTH,), row))

    @property
    def limits(self) -> Tensor:
        return self.of(lambda row: self.prompts[row].limits)

    @property
    def token_ids(self) -> Tensor:
        return (self.positions * 7 + self.at * 11) % VOCAB


def whole(prompts: Sequence[Prompt]) -> Step:
    return Step(prompts, range(len(prompts)), [0] * len(prompts), [one.length for one in prompts])


def by_torch(decoder: MoondreamDecoder, cache: KVCache, step: Step) -> tuple[Tensor, Tensor]:
    """Hidden states before the final norm, and logits."""
    attention = PagedAttention(
        cache=cache,
        plan=decoder.plan.mixers,
        rows=torch.tensor(step.rows),
        starts=np.array(step.starts, np.int32),
        lengths=np.array(step.lengths, np.int32),
        slots=[cache.slots(step.at, step.positions)],
        limits=step.limits,
    )
    hidden = decoder.forward(decoder.embed(step.token_ids), Forward(step.positions, attention))
    return hidden, decoder.head_output(hidden)


def by_native(
    native: NativeDecoder, decoder: MoondreamDecoder, step: Step, outputs: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """outputs: None: all positions."""
    hidden = decoder.embed(step.token_ids).float()
    outputs = torch.arange(len(hidden)) if outputs is None else outputs
    logits = native.forward(
        0, step.token_ids, step.positions, step.at, outputs, hidden=hidden, limits=step.limits
    ).clone()
    return hidden[: len(outputs)], logits


def opened(decoder: MoondreamDecoder, cache: KVCache) -> NativeDecoder:
    native = native_decoder(decoder, cache)
    assert native is not None
    return native


@settings(max_examples=40)
@given(config=CONFIGS, page_size=st.sampled_from([1, 16]), prompts=PROMPTS)
def test_it_computes_what_torch_computes(config: ModelPlan, page_size: int, prompts: list[Prompt]) -> None:
    decoder, cache = random_decoder(config, torch.float32), scattered_cache(config, page_size, 3, torch.float32)
    hidden, logits = by_torch(decoder, cache, whole(prompts))
    found = by_native(opened(decoder, cache), decoder, whole(prompts))
    torch.testing.assert_close(found[0], hidden, rtol=0, atol=1e-3)
    torch.testing.assert_close(found[1], logits, rtol=0, atol=1e-3)


@settings(max_examples=15)
@given(config=CONFIGS, prompts=PROMPTS)
def test_in_half_precision_it_is_nearer_to_the_exact_numbers_than_torch(
    config: ModelPlan, prompts: list[Prompt]
) -> None:
    decoder, step = random_decoder(config, torch.bfloat16), whole(prompts)
    exact = by_torch(widened(decoder), scattered_cache(config, 1, 3, torch.float32), step)[1]
    cache = scattered_cache(config, 1, 3, torch.bfloat16)
    torchs = by_torch(decoder, cache, step)[1].float()
    found = by_native(opened(decoder, cache), decoder, step)[1]
    assert (found - exact).norm() < 1.2 * (torchs - exact).norm()


@DTYPES
@settings(max_examples=40)
@given(config=CONFIGS, prompts=PROMPTS, data=st.data())
def test_outputs_get_the_same_bits_whatever_else_is_wanted(
    dtype: torch.dtype, config: ModelPlan, prompts: list[Prompt], data: st.DataObject
) -> None:
    """And so do the keys and values of all positions."""
    decoder, cache = random_decoder(config, dtype), scattered_cache(config, 1, 3, dtype)
    native, step = opened(decoder, cache), whole(prompts)
    hidden, logits = by_native(native, decoder, step)
    kept = [pool.clone() for pool in (*cache.keys, *cache.values)]
    some = data.draw(st.lists(st.integers(0, len(logits) - 1), unique=True, max_size=9).map(sorted), "outputs")
    for pool in (*cache.keys, *cache.values):
        pool.fill_(torch.nan)
    outputs = torch.tensor(some, dtype=torch.int64)
    found = by_native(native, decoder, step, outputs)
    assert torch.equal(found[0], hidden[outputs])
    assert torch.equal(found[1], logits[outputs])
    for now, before in zip((*cache.keys, *cache.values), kept, strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)


@DTYPES
@settings(max_examples=20)
@given(config=CONFIGS, page_size=st.sampled_from([1, 16]), prompts=PROMPTS, chunk=st.sampled_from([1, 5, 64]))
def test_a_prompt_gets_the_same_bits_alone_in_a_batch_and_in_chunks(
    dtype: torch.dtype, config: ModelPlan, page_size: int, prompts: list[Prompt], chunk: int
) -> None:
    decoder, cache = random_decoder(config, dtype), scattered_cache(config, page_size, 3, dtype)
    native = opened(decoder, cache)
    together = by_native(native, decoder, whole(prompts))[1]
    assert together.isfinite().all()
    pieces = []
    for row, one in enumerate(prompts):
        at = 0
        while at < one.length:
            end = min(at + chunk, one.length)
            if one.begin < end < one.end:
                end = max(at, one.begin) if one.begin > at else one.end  # a region is computed in one step
            step = Step(prompts, [row], [at], [end - at])
            pieces.append(by_native(native, decoder, step)[1])
            at = end
    assert torch.equal(torch.cat(pieces), together)

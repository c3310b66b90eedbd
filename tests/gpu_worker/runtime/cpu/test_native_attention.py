"""Queries that meet keys and values where those lie get the same bits as queries for which these are laid out.

How many queries of a row a step holds decides between the two: whole prompts meet laid-out blocks of 128
positions, and their pieces of a few positions do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.loading import LoadOptions, Model, read_decoder
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.formats.unread import is_beside_codes
from petiole.gpu_worker.models.weights.names import LLAMA
from petiole.gpu_worker.runtime.cpu.attention import PagedAttention
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.forward import NativeDecoder, native_decoder
from petiole.gpu_worker.runtime.memory.kv import KVCache, new_kv_cache
from tests.support.plans import plan_of
from tests.support.trials import examples, rest

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")

HIDDEN, INNER, VOCAB, MAX_LENGTH = 34, 18, 37, 400
CPU = torch.device("cpu")


def small(heads: int, kv_heads: int, head_dim: int, windows: Sequence[int]) -> ModelPlan:
    return plan_of(
        vocab=VOCAB,
        hidden=HIDDEN,
        inner=INNER,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        windows=windows,
        max_position=MAX_LENGTH,
    )


CONFIGS = st.builds(
    lambda head_dim, kv_heads, group, windows: small(kv_heads * group, kv_heads, head_dim, windows),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 192, 256]),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16]),
    windows=st.tuples(*[st.sampled_from([0, 1, 5, 100, 127, 128, 129, 200])] * 2),
)
LENGTHS = st.lists(st.sampled_from([127, 128, 129, 255, 256, 257]) | st.integers(1, 300), min_size=1, max_size=3)
PIECES = st.lists(st.sampled_from([1, 2, 3, 4, 8, 9, 40]), min_size=1, max_size=4)


class Drawn:
    """Weights like those of a trained model: norms of heads around 2, so that scores are large."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __contains__(self, name: str) -> bool:
        return not is_beside_codes(name)

    def copy(self, name: str, into: Tensor) -> int:
        drawn = torch.randn(into.shape, generator=self._generator) * into.shape[-1] ** -0.5
        into.copy_(drawn + (2 if "q_norm" in name or "k_norm" in name else 1 if "norm" in name else 0))
        return into.nbytes

    def quantised(self, name: str, outputs: int, inputs: int) -> None:
        return None


def random_decoder(plan: ModelPlan, dtype: torch.dtype) -> Decoder:
    return read_decoder(Drawn(), Model({}, plan, LLAMA, read_decoder), LoadOptions(CPU, dtype, MAX_LENGTH))


def scattered_cache(config: ModelPlan, page_size: int, rows: int, dtype: torch.dtype) -> KVCache:
    """Pages in any order, and nothing in them that may be read."""
    columns = -(-MAX_LENGTH // page_size)
    cache = new_kv_cache(
        config,
        n_pages=rows * columns,
        page_size=page_size,
        rows=rows,
        max_model_len=MAX_LENGTH,
        dtype=dtype,
        device=CPU,
    )
    pages = np.random.default_rng(0).permutation(rows * columns)
    cache.table[:] = torch.from_numpy(pages.reshape(rows, columns))
    for pool in (*cache.keys, *cache.values):
        pool.view(torch.uint8).fill_(0xFF)  # not a number in any type
    return cache


def step(rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids, positions, rows."""
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    at = torch.repeat_interleave(torch.tensor(rows), torch.tensor(lengths))
    return (positions * 7 + at * 11) % VOCAB, positions, at


def by_torch(decoder: Decoder, cache: KVCache, lengths: Sequence[int]) -> Tensor:
    rows, starts = range(len(lengths)), np.zeros(len(lengths), np.int32)
    token_ids, positions, at = step(rows, starts.tolist(), lengths)
    attention = PagedAttention(
        cache=cache,
        plan=decoder.plan.mixers,
        rows=torch.tensor(rows),
        starts=starts,
        lengths=np.array(lengths, np.int32),
        slots=[cache.slots(at, positions)],
    )
    return decoder.head_output(decoder.forward(decoder.embed(token_ids), Forward(positions, attention)))


def in_one_step(native: NativeDecoder, lengths: Sequence[int]) -> list[Tensor]:
    token_ids, positions, at = step(range(len(lengths)), [0] * len(lengths), lengths)
    logits = native.forward(0, token_ids, positions, at, torch.arange(len(at)))
    return list(logits.clone().split(list(lengths)))


def in_pieces(native: NativeDecoder, lengths: Sequence[int], pieces: Iterable[int]) -> list[Tensor]:
    done, found, sizes = [0] * len(lengths), [list[Tensor]() for _ in lengths], cycle(pieces)
    while rows := [row for row, n in enumerate(lengths) if done[row] < n]:
        starts = [done[row] for row in rows]
        taken = [min(next(sizes), lengths[row] - done[row]) for row in rows]
        token_ids, positions, at = step(rows, starts, taken)
        logits = native.forward(0, token_ids, positions, at, torch.arange(len(at))).clone()
        for row, n, part in zip(rows, taken, logits.split(taken), strict=True):
            done[row] += n
            found[row].append(part)
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("dtype", rest([torch.bfloat16, torch.float32]), ids=str)
@settings(max_examples=examples(40))
@given(config=CONFIGS, page_size=st.sampled_from([1, 16]), lengths=LENGTHS, pieces=PIECES)
def test_a_few_queries_get_the_same_bits_as_many(
    dtype: torch.dtype, config: ModelPlan, page_size: int, lengths: list[int], pieces: list[int]
) -> None:
    cache = scattered_cache(config, page_size, len(lengths), dtype)
    native = native_decoder(random_decoder(config, dtype), cache)
    assert native is not None
    few = in_pieces(native, lengths, pieces)
    many = in_one_step(native, lengths)
    assert torch.cat(many).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(few, many, strict=True))


@settings(max_examples=examples(40))
@given(config=CONFIGS, page_size=st.sampled_from([1, 16]), lengths=LENGTHS)
def test_many_queries_get_what_torch_computes(config: ModelPlan, page_size: int, lengths: list[int]) -> None:
    """Up to rounding: the scores are large, so an embedding's last bit alone moves some logits by 3e-5."""
    decoder = random_decoder(config, torch.float32)
    cache = scattered_cache(config, page_size, len(lengths), torch.float32)
    wanted = by_torch(decoder, cache, lengths)
    native = native_decoder(decoder, cache)
    assert native is not None
    torch.testing.assert_close(torch.cat(in_one_step(native, lengths)), wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kv_heads", [3, 4, 8, 96])
@pytest.mark.parametrize("window", [0, 100])
def test_heads_that_are_read_together_get_the_same_bits_as_heads_read_one_by_one(
    dtype: torch.dtype, kv_heads: int, window: int
) -> None:
    """A row alone leaves its heads to all threads; each of many rows is read by one."""
    rows = 64
    config = small(2 * kv_heads, kv_heads, 64, (window,))
    cache = scattered_cache(config, 1, rows, dtype)
    native = native_decoder(random_decoder(config, dtype), cache)
    assert native is not None
    starts = [(5 * row) % 140 for row in range(rows)]
    for row, start in enumerate(starts):
        if start:
            token_ids, positions, at = step([row], [0], [start])
            native.forward(0, token_ids, positions, at, torch.arange(1))

    def decode(rows: Sequence[int]) -> Tensor:
        token_ids, positions, at = step(rows, [starts[row] for row in rows], [1] * len(rows))
        return native.forward(0, token_ids, positions, at, torch.arange(len(at))).clone()

    alone = torch.cat([decode([row]) for row in range(rows)])
    assert torch.equal(decode(range(rows)), alone)

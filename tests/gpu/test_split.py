"""Decode attention over rows that are cut into pieces, against float64: on CUDA, or in Triton's interpreter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from petiole.gpu_worker.runtime.cuda.attention.flashinfer import AttentionKind, host_page_counts
from petiole.gpu_worker.runtime.cuda.attention.split import SplitWrapper
from petiole.gpu_worker.runtime.cuda.fused.split.attend import cut
from petiole.gpu_worker.runtime.cuda.fused.split.pieces import MOST_PIECES, PIECE, TILE, Pieces
from tests.gpu.test_fused import DEVICE, some  # skips this module where Triton does not run
from tests.support import fake_flashinfer as plain

DTYPE, NEAR = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float16, 2e-3)
"""The interpreter multiplies no bfloat16."""

EIGHT_BITS = torch.float8_e4m3fn
LENGTHS = (1, TILE - 1, 2 * PIECE + 5, PIECE, 3, PIECE + 1)


def kind_of(
    heads: int, kv_heads: int, width: int = 64, window: int = 0, softcap: float = 0.0, scale: float = 0.2
) -> AttentionKind:
    return AttentionKind(heads, kv_heads, width, scale, window, softcap)


@dataclass
class Step:
    """Rows of random queries, keys and values, whose pages lie anywhere in the pool. Page 0 holds no number."""

    kind: AttentionKind
    lengths: tuple[int, ...] = LENGTHS
    page_size: int = 1
    queries: int = 1
    stored: torch.dtype = DTYPE
    longest: int = 4 * PIECE
    programs: int = 5
    joined: torch.Tensor = field(init=False)
    """Queries and what a product has beside them: rows lie apart."""

    @property
    def q(self) -> torch.Tensor:
        return self.joined[:, : self.kind.heads]

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(sum(self.lengths) + self.queries)
        self.indptr, self.last = host_page_counts(np.array(self.lengths, np.int32), self.page_size)
        n, kind = int(self.indptr[-1]), self.kind
        self.indices = torch.randperm(n, generator=draw).int() + 1
        shape = n + 1, self.page_size, kind.kv_heads, kind.head_dim
        self.pages = [torch.randn(shape, generator=draw).to(self.stored) for _ in range(2)]
        for pool in self.pages:
            pool[0] = math.nan
        wide = len(self.lengths) * self.queries, kind.heads + 2, kind.head_dim
        self.joined = torch.randn(wide, generator=draw).to(DTYPE)

    def rows(self, first: int, end: int) -> Step:
        """Some of the rows, as a step of their own."""
        one = Step(self.kind, self.lengths[first:end], self.page_size, self.queries, self.stored)
        one.pages, one.joined = self.pages, self.joined[first * self.queries : end * self.queries]
        one.indices = self.indices[self.indptr[first] : self.indptr[end]]
        return one

    def run(self, summed: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs, and logarithms of sums, on the CPU. What nothing has written is no number."""
        kind, rows = self.kind, len(self.lengths)
        pieces = Pieces.empty(rows, self.longest, torch.device(DEVICE))
        outputs = len(pieces.listed) * self.queries * kind.heads
        parts, sums = (torch.full((n,), math.nan, device=DEVICE) for n in (outputs * kind.head_dim, outputs))
        sizes = kind.heads, kind.kv_heads, kind.head_dim, kind.scale, kind.window, kind.softcap
        indices = self.indices.to(DEVICE)
        wrapper = SplitWrapper(
            *sizes, self.queries, self.page_size, indices, pieces, parts, sums, programs=self.programs
        )
        wrapper.plan(*(torch.from_numpy(array).to(DEVICE) for array in (self.indptr, self.last)))
        out = torch.full((rows * self.queries, kind.heads, kind.head_dim), math.nan, dtype=DTYPE, device=DEVICE)
        pages = self.pages[0].to(DEVICE), self.pages[1].to(DEVICE)
        q = self.joined.to(DEVICE)[:, : kind.heads]
        found = wrapper.run(q, pages, out=out, return_lse=summed)
        return out.cpu(), found[1].cpu() if summed else None

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        kind, outs, sums = self.kind, [], []
        for row, n in enumerate(self.lengths):
            listed = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
            k, v = (pool[listed].flatten(0, 1)[:n].double().transpose(0, 1) for pool in self.pages)
            k, v = (x.repeat_interleave(kind.heads // kind.kv_heads, 0) for x in (k, v))
            q = self.q[row * self.queries : (row + 1) * self.queries].double().transpose(0, 1)
            scores = q @ k.transpose(1, 2) * kind.scale
            if kind.softcap:
                scores = kind.softcap * torch.tanh(scores / kind.softcap)
            position, last = torch.arange(n), torch.arange(n - self.queries, n)[:, None]
            seen = position <= last
            if kind.window:
                seen &= position > last - kind.window
            scores = scores.masked_fill(~seen, -math.inf)
            outs.append((scores.softmax(-1) @ v).transpose(0, 1))
            sums.append(scores.logsumexp(-1).t() / math.log(2))
        return torch.cat(outs), torch.cat(sums)


def agrees(step: Step) -> None:
    out, _ = step.run()
    assert out.isfinite().all(), "every output is written, and nothing of page 0"
    expected, _ = step.expected()
    for found, wanted in zip(out.double(), expected, strict=True):
        assert (found - wanted).norm() / wanted.norm() < NEAR


@pytest.mark.parametrize("stored", [DTYPE, EIGHT_BITS], ids=str)
@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_any_length_agree_with_float64(page_size, stored):
    agrees(Step(kind_of(4, 2), page_size=page_size, stored=stored))


@pytest.mark.parametrize("stored", [DTYPE, EIGHT_BITS], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 3), (8, 2), (7, 1), (8, 1), (16, 1)], ids=str)
def test_queries_that_share_a_head_of_keys(heads, kv_heads, stored):
    agrees(Step(kind_of(heads, kv_heads), (5, PIECE + 70), stored=stored))


@pytest.mark.parametrize("width", some([128, 256]))
def test_wide_heads(width):
    agrees(Step(kind_of(4, 2, width, scale=width**-0.5), (9, PIECE + 70)))
    agrees(Step(kind_of(4, 2, width, scale=width**-0.5), (9, PIECE + 70), stored=EIGHT_BITS))


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(("window", "softcap"), [(0, 2.0), (40, 0.0), (PIECE + 30, 2.0)])
def test_windows_and_capped_scores(window, softcap, queries):
    lengths = (3, 39, 43, 2 * PIECE, 3 * PIECE + 1)
    agrees(Step(kind_of(4, 2, window=window, softcap=softcap), lengths, queries=queries))


def test_several_queries_of_a_row_see_no_later_position():
    """A piece may hold positions that only the last query sees."""
    agrees(Step(kind_of(8, 2), (4, 5, PIECE + 1, 2 * PIECE + 2), page_size=16, queries=4))


def test_one_long_row_among_short_ones():
    long = (MOST_PIECES + 1) * PIECE
    step = Step(kind_of(2, 1), (3, long, 1, 7), longest=2 * long, stored=EIGHT_BITS)
    agrees(step)


def test_sums_of_exponentials_for_sinks():
    step = Step(kind_of(4, 2, softcap=9.0))
    _, sums = step.run(summed=True)
    assert torch.allclose(sums.double(), step.expected()[1], atol=1e-2 if DEVICE == "cuda" else 1e-3)


@pytest.mark.parametrize("programs", [1, 7, 300])
@pytest.mark.parametrize("stored", [DTYPE, EIGHT_BITS], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(stored, programs):
    step = Step(kind_of(4, 2), stored=stored, programs=programs)
    together, sums = step.run(summed=True)
    for row in range(len(step.lengths)):
        alone, own = step.rows(row, row + 1).run(summed=True)
        assert torch.equal(alone, together[row : row + 1])
        assert torch.equal(own, sums[row : row + 1])


@pytest.mark.parametrize(("window", "queries"), [(0, 1), (700, 1), (300, 4)])
def test_the_list_of_pieces(window, queries):
    """As plain Python makes it: every position of a row once, the longest pieces first."""
    draw = np.random.default_rng(0)
    for n in (1, 7, 33):
        lengths = np.concatenate([[40_000], draw.integers(queries, 3000, n)])[-n:].astype(np.int32)
        indptr, last = (torch.from_numpy(array) for array in host_page_counts(lengths, 16))
        found, expected = (Pieces.empty(n, 65_536, torch.device(place)) for place in (DEVICE, "cpu"))
        cut(indptr.to(DEVICE), last.to(DEVICE), 16, window, queries, found)
        plain.cut(indptr, last, 16, window, queries, expected)
        assert torch.equal(found.listed.cpu(), expected.listed)
        several = expected.of_rows[2] > 1
        assert torch.equal(found.of_rows.cpu()[1:], expected.of_rows[1:])
        assert torch.equal(found.of_rows.cpu()[0, several], expected.of_rows[0, several])
        assert torch.equal(found.count.cpu(), expected.count)

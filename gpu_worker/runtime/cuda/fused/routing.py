"""Which experts each position takes, in one launch, and the pairs of a position and an expert in the order of
experts, in another: see `models.parts.routing`. The host waits for nothing, so both can be captured."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.parts.routing import LEAST_SUM
from petiole.gpu_worker.models.plan import Router

MOST_RANKED = 2**14
"""So many pairs find their places by comparing each with all others. Torch sorts more, in more launches."""

_SCORES = {"softmax": 0, "sigmoid": 1, "chosen": 2}
_BLOCK, _AT_ONCE = 8, 256  # pairs of a program, and those that it compares them with at a time


def has_kernel(plan: Router) -> bool:
    """Whether `choose_experts` knows this router: one without groups of experts."""
    return plan.groups in (1, plan.best_groups)


def choose_experts(
    plan: Router, logits: Tensor, correction: Tensor | None, scales: Tensor | None, real: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `Kernels.choose_experts`; for a router that `has_kernel`."""
    n, experts = logits.shape
    chosen = torch.empty((n, plan.chosen), dtype=torch.int64, device=logits.device)
    shares = torch.empty((n, plan.chosen), dtype=torch.float32, device=logits.device)
    if not n:
        return chosen, shares
    block = triton.next_power_of_2(experts)
    _choose[(n,)](
        logits.contiguous(),
        logits if correction is None else correction,
        logits if scales is None else scales,
        logits if real is None else real,
        chosen,
        shares,
        experts,
        plan.factor,
        LEAST_SUM,
        CHOSEN=plan.chosen,
        SCORE=_SCORES[plan.score],
        NORMALISED=plan.normalised,
        CORRECTED=correction is not None,
        SCALED=scales is not None,
        MASKED=real is not None,
        EXPERTS=block,
        num_warps=1 if block <= 256 else 4,
    )
    return chosen, shares


@triton.jit
def _choose(
    logits,
    correction,
    scales,
    real,
    chosen,
    shares,
    experts,
    factor,
    least_sum,
    CHOSEN: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALISED: tl.constexpr,
    CORRECTED: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Chooses the experts of one position. Logits that are no numbers are the worst; equal ones: the lower expert
    comes first."""
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    there = expert < experts
    logit = tl.load(logits + row * experts + expert, mask=there, other=float("-inf"))
    score = logit
    if SCORE == 0:
        score = tl.exp(logit - tl.max(logit, 0))
        score /= tl.sum(score, 0)
    elif SCORE == 1:
        score = 1 / (1 + tl.exp(-logit))
    wanted = score
    if CORRECTED:
        wanted += tl.load(correction + expert, mask=there, other=0.0)
    wanted = tl.where(wanted > -3e38, wanted, -3e38)
    taken = expert < 0
    for _ in tl.static_range(CHOSEN):
        best = tl.argmax(tl.where(there & ~taken, wanted, float("-inf")), 0)
        taken = taken | (expert == best)
    if SCORE == 2:
        score = tl.exp(logit - tl.max(tl.where(taken, logit, float("-inf")), 0))
        score /= tl.sum(tl.where(taken, score, 0.0), 0)
    if NORMALISED:
        score /= tl.sum(tl.where(taken, score, 0.0), 0) + least_sum
    score *= factor
    if SCALED:
        score *= tl.load(scales + expert, mask=there, other=0.0)
    place = row * CHOSEN + tl.cumsum(taken.to(tl.int32), 0) - 1
    name = expert
    if MASKED:
        name = tl.where(tl.load(real + row) != 0, expert, experts)
    tl.store(chosen + place, name.to(tl.int64), mask=taken)
    tl.store(shares + place, score, mask=taken)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of a position and one of its layers, sorted by layer.

    taken: int64 [positions, chosen], the layers; those beyond the last one stand for none. order: int64 [pairs],
    where each of the sorted pairs lies unsorted; those that take no layer come last. bounds: int32 [layers + 1],
    where the pairs of each layer begin."""

    taken: Tensor
    order: Tensor
    bounds: Tensor

    @property
    def layers(self) -> int:
        return len(self.bounds) - 1

    @property
    def chosen(self) -> int:
        return self.taken.shape[1]


def sort_pairs(taken: Tensor, counts: Tensor) -> Pairs:
    """taken: int64 [positions, chosen], from 0 to the number of layers, which stands for none. counts: int64
    [layers]; the positions that take each layer are added."""
    n, layers = taken.numel(), len(counts)
    if n > MOST_RANKED:
        found, order = taken.flatten().sort(stable=True)
        every = torch.arange(layers + 1, device=taken.device)
        bounds = torch.searchsorted(found, every, out_int32=True)
        counts.add_(bounds.diff())
        return Pairs(taken, order, bounds)
    order = torch.empty(n, dtype=torch.int64, device=taken.device)
    bounds = torch.empty(layers + 1, dtype=torch.int32, device=taken.device)
    blocks = triton.cdiv(n, _BLOCK)
    _rank[(blocks + triton.cdiv(layers + 1, _BLOCK),)](
        taken.contiguous(), order, bounds, counts, n, layers, blocks, BLOCK=_BLOCK, AT_ONCE=_AT_ONCE, num_warps=4
    )
    return Pairs(taken, order, bounds)


@triton.jit(do_not_specialize=["n", "blocks"])
def _rank(taken, order, bounds, counts, n, layers, blocks, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """The first programs find the places of pairs. The others count the pairs of earlier layers: where their own
    layers begin."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    of_pair = place < blocks * BLOCK
    at = tl.where(of_pair, place, place - blocks * BLOCK)
    pair, layer = of_pair & (at < n), ~of_pair & (at <= layers)
    own = tl.where(of_pair, tl.load(taken + at, mask=pair, other=0).to(tl.int32), at)
    earlier = tl.where(of_pair, at, 0)
    before, alike = tl.zeros([BLOCK, AT_ONCE], tl.int32), tl.zeros([BLOCK, AT_ONCE], tl.int32)
    for begin in range(0, n, AT_ONCE):
        other = begin + tl.arange(0, AT_ONCE)
        theirs = tl.load(taken + other, mask=other < n, other=2**31 - 1).to(tl.int32)
        same = (theirs[None, :] == own[:, None]).to(tl.int32)
        before += tl.where(other[None, :] < earlier[:, None], same, 0)
        before += (theirs[None, :] < own[:, None]).to(tl.int32)
        alike += same
    rank = tl.sum(before, 1)
    tl.store(order + rank, at.to(tl.int64), mask=pair)
    tl.store(bounds + at, rank, mask=layer)
    known = layer & (at < layers)
    tl.store(counts + at, tl.load(counts + at, mask=known, other=0) + tl.sum(alike, 1), mask=known)

"""From logits to tokens on CUDA, in one launch that reads a row a few times and sorts nothing.

Top-k and top-p are thresholds: a token stays if less than `k` tokens, or less than `p` of the mass, lie strictly
above it. So equal logits stay or go together, and what stays of a row depends on that row alone. The threshold is
searched for among floats ordered as integers, eight marks a pass:

    f(t): count or mass of the logits above t      f(lo) >= limit > f(hi)      lo < threshold <= hi

until one value is left between the bounds. The noise is that of `noise.gumbel`, made where it is used.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_worker.runtime.sampling import Choice

_BLOCK = 8192
_WARPS = 16


def choose(logits: Tensor, choice: Choice) -> Tensor:
    """int64 [O] from float32 [O, V]; see `sampling.choose`."""
    logits = logits.contiguous()
    n, width = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(width))
    filters = (choice.top_k, choice.top_p, choice.min_p)
    _choose[(n,)](
        logits,
        tokens,
        choice.temperature,
        choice.keys,
        tokens if choice.top_k is None else choice.top_k,
        *(choice.temperature if t is None else t for t in filters[1:]),
        width,
        *(int(t is not None) for t in filters),
        BLOCK=block,
        num_warps=_WARPS,
    )
    return tokens


@triton.jit(do_not_specialize=["has_top_k", "has_top_p", "has_min_p"])  # one compilation for all combinations
def _choose(
    logits,
    tokens,
    temperatures,
    keys,
    top_ks,
    top_ps,
    min_ps,
    width,
    has_top_k,
    has_top_p,
    has_min_p,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    scores = logits + row.to(tl.int64) * width
    temperature = tl.load(temperatures + row)
    scale = tl.where(temperature > 0, temperature, 1.0)
    floor = tl.full([], float("-inf"), tl.float32)
    largest, token = floor, tl.full([], 0, tl.int32)
    if (temperature <= 0) | (has_top_k + has_top_p + has_min_p != 0):
        largest, token = _best(scores, width, scale, floor, 0, 0, False, BLOCK)
    if temperature > 0:
        if has_top_k != 0:
            k = tl.load(top_ks + row)
            if k > 0:
                floor = _threshold(scores, width, scale, largest, floor, k.to(tl.float32), False, BLOCK // 2)
        if has_top_p != 0:
            p = tl.load(top_ps + row)
            if p < 1:
                limit = tl.maximum(p * _mass(scores, width, scale, largest, floor, BLOCK), 1e-30)
                floor = _threshold(scores, width, scale, largest, floor, limit, True, BLOCK // 2)
        if has_min_p != 0:
            floor = tl.maximum(floor, largest + tl.log(tl.load(min_ps + row)))
        first, second = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
        _, token = _best(scores, width, scale, floor, first, second, True, BLOCK)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _best(scores, width, scale, floor, first, second, NOISY: tl.constexpr, BLOCK: tl.constexpr):
    """(the largest score of those not below `floor`, the lowest token that has it)"""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    owner = lane
    for start in range(0, width, BLOCK):
        token = start + lane
        x = tl.load(scores + token, mask=token < width, other=float("-inf")) / scale
        if NOISY:
            x = tl.where(x >= floor, x + _gumbel(token, first, second), float("-inf"))
        better = x > best
        best = tl.where(better, x, best)
        owner = tl.where(better, token, owner)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, owner, width - 1), 0)


@triton.jit
def _mass(scores, width, scale, largest, floor, BLOCK: tl.constexpr):
    """Of the scores not below `floor`, where the largest has 1."""
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        token = start + lane
        x = tl.load(scores + token, mask=token < width, other=float("-inf")) / scale
        total += tl.where(x >= floor, tl.exp(x - largest), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _threshold(scores, width, scale, largest, floor, limit, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The least score v, not below `floor`, with f(v) < limit."""
    lane, mark = tl.arange(0, BLOCK), tl.arange(0, 8)
    hi, lo = _ordered(largest), _ordered(floor) - 1
    marks = _ordered(largest - tl.exp2(mark.to(tl.float32) - 1))  # most of the mass lies near the largest
    while hi > lo + 1:
        above = tl.zeros([8, BLOCK], tl.float32)
        least = tl.full([BLOCK], 2147483647, tl.int32)
        most = tl.full([BLOCK], -2147483648, tl.int32)
        for start in range(0, width, BLOCK):
            token = start + lane
            x = tl.load(scores + token, mask=token < width, other=float("-inf")) / scale
            at = _ordered(x)
            weight = tl.exp(x - largest) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            weight = tl.where(token < width, weight, 0.0)
            above += tl.where(at[None, :] > marks[:, None], weight[None, :], 0.0)
            inside = (token < width) & (at > lo) & (at <= hi)
            least = tl.minimum(least, tl.where(inside, at, 2147483647))
            most = tl.maximum(most, tl.where(inside, at, -2147483648))
        enough = tl.sum(above, 1) >= limit
        lo, hi = (
            tl.maximum(tl.maximum(lo, tl.min(least, 0) - 1), tl.max(tl.where(enough, marks, -2147483648), 0)),
            tl.minimum(tl.minimum(hi, tl.max(most, 0)), tl.min(tl.where(enough, 2147483647, marks), 0)),
        )
        width_left = hi.to(tl.int64) - lo
        marks = (lo + width_left * (mark + 1) // 9).to(tl.int32)
    return _unordered(hi)


@triton.jit
def _ordered(x):
    """float32 -> int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(bits):
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _gumbel(token, first, second):
    x = token.to(tl.uint32) * 0x9E3779B1 + first.to(tl.uint32)
    x = _mix(_mix(x) ^ second.to(tl.uint32))
    u = tl.minimum(((x >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    # -log1p(-u): a series where 1 - u would lose too much of a small u
    series = u * 0.125 + 0.14285715
    for divisor in tl.static_range(6, 0, -1):
        series = series * u + 1.0 / divisor
    return -tl.log(tl.where(u < 0.125, series * u, -tl.log(1.0 - u)))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)

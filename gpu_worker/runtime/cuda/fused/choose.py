"""From logits to tokens on CUDA, in two launches that read a row once and sort nothing.

The first launch spreads each row over many blocks. The second has one block for each row, which reads their
results:

    _scan, a block for each 4,096 logits                          _pick, a block for each row
    greedy, or nothing filtered: the best of each chunk        ─► the best of these
    filtered: largest logit and mass of each group of 32       ─► the groups that matter, and then their logits

Top-k and top-p are thresholds: a token stays if fewer than `k` tokens, or less than `p` of the mass, lie strictly
above it. So equal logits stay or go together. The result of a row depends on that row alone, because the batch
does not change the order of its sums. A pass of the search compares eight marks, among floats ordered as integers:

    f(t): count or mass of the logits above t      f(lo) >= limit > f(hi)      lo < threshold <= hi

The search ends when one value is left between the bounds. Before it searches logits, it searches the largest logit
of each group, less exactly. For top-k: if k groups have a logit above a cut, then at least k logits are above the
cut, and all of these lie in such groups. For top-p alone, the masses of the groups give the cut. If the logits
above it do not have enough mass, the cut is lowered. Typically some tens of groups are left, in the worst case
all.

A group is not a run of neighbouring logits, because neighbours (the digits, say) are often likely together. The
noise is that of `noise.gumbel`, computed where it is used."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.runtime.cuda.supported import tried
from petiole.gpu_worker.runtime.step.sampling import SamplingMetadata

_DEPTH, _LANES = 32, 128
"""A chunk is a matrix of logits, row by row; a group is one of its columns."""

_BLOCK, _WARPS = 1024, 16
"""How many groups, or logits of groups, a search reads at a time."""

_NOTHING = tl.constexpr(-2139095042)
"""Below all floats, ordered as integers; minus infinity is one above it."""


def choose(logits: Tensor, choice: SamplingMetadata) -> Tensor:
    """int64 [O] from [O, V] in float32, bfloat16 or float16; see `sampling.choose`."""
    logits = logits.contiguous()
    n, width = logits.shape
    chunks = triton.cdiv(width, _DEPTH * _LANES)
    groups = chunks * _LANES
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    figures = torch.empty((n, 2, groups), dtype=torch.float32, device=logits.device)
    places = torch.empty((n, 2, groups), dtype=torch.int32, device=logits.device)
    filters = (choice.top_k, choice.top_p, choice.min_p)
    given = (
        choice.temperature,
        choice.keys,
        tokens if choice.top_k is None else choice.top_k,
        *(choice.temperature if t is None else t for t in filters[1:]),
        width,
        *(int(t is not None) for t in filters),
    )
    _scan[(n, chunks)](logits, figures, places, *given, DEPTH=_DEPTH, LANES=_LANES, num_warps=4)
    _pick[(n,)](
        logits,
        tokens,
        figures,
        places,
        *given,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        DEPTH=_DEPTH,
        LANES=_LANES,
        BLOCK=_BLOCK,
        SHORT=tried("rows"),
        num_warps=_WARPS,
    )
    return tokens


_FLAGS = ["has_top_k", "has_top_p", "has_min_p"]  # one compilation for all combinations


@triton.jit(do_not_specialize=_FLAGS)
def _scan(
    logits,
    figures,
    places,
    temperatures,
    keys,
    top_ks,
    top_ps,
    min_ps,
    width,
    has_top_k,
    has_top_p,
    has_min_p,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """For each chunk: its best score and the lowest token that has the score; or, for each of its groups, the
    largest score and the mass, relative to that score's. figures: [row, 2, groups]; places: [row, 2, groups]."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    groups = tl.num_programs(1) * LANES
    temperature = tl.load(temperatures + row)
    k, p, least = _filters(row, top_ks, top_ps, min_ps, has_top_k, has_top_p, has_min_p)
    lane = tl.arange(0, LANES)
    token = chunk * (DEPTH * LANES) + tl.arange(0, DEPTH)[:, None] * LANES + lane[None, :]
    x = _scores(logits + row * width, token, token < width, temperature)
    found = figures + row * 2 * groups
    if (temperature > 0) & ((k > 0) | (p < 1) | (least > 0)):
        largest = tl.max(x, 0)
        mass = tl.sum(tl.exp(x - _finite(largest)[None, :]), 0)
        tl.store(found + chunk * LANES + lane, largest)
        tl.store(found + groups + chunk * LANES + lane, mass)
    else:
        if temperature > 0:
            x += _gumbel(token, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
        best = tl.max(tl.max(x, 0), 0)
        owner = tl.min(tl.min(tl.where(x == best, token, width - 1), 0), 0)
        tl.store(found + chunk, best)
        tl.store(places + row * 2 * groups + chunk, owner)


@triton.jit(do_not_specialize=_FLAGS)
def _pick(
    logits,
    tokens,
    figures,
    places,
    temperatures,
    keys,
    top_ks,
    top_ps,
    min_ps,
    width,
    has_top_k,
    has_top_p,
    has_min_p,
    chunks,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
):
    """The row's token, from the results of `_scan`. `places` then lists the groups whose logits matter. SHORT:
    behind these, it lists the tokens of these groups that matter, if there is room for all."""
    row = tl.program_id(0).to(tl.int64)
    groups = chunks * LANES
    temperature = tl.load(temperatures + row)
    k, p, least = _filters(row, top_ks, top_ps, min_ps, has_top_k, has_top_p, has_min_p)
    scores, found, listed = logits + row * width, figures + row * 2 * groups, places + row * 2 * groups
    if (temperature > 0) & ((k > 0) | (p < 1) | (least > 0)):
        largest = _largest(found, groups, BLOCK)
        floor = largest + tl.log(least)  # minus infinity if there is no min-p
        ranked, massed = k > 0, p < 1
        by_mass = massed & (k <= 0)
        lo, limit = _ordered(floor) - 1, k.to(tl.float32)
        if ranked | massed:
            if by_mass:
                limit = tl.maximum(p * _mass_of_groups(found, groups, largest, BLOCK), 1e-30)
            at = (found, found, groups, width, temperature, largest, False)
            lo = _search(scores, at, _NOTHING, limit, by_mass, True, False, DEPTH, LANES, BLOCK)
            if by_mass:
                lo = _lower(lo, 1.0)
        n, step = tl.full([], -1, tl.int32), tl.full([], 4.0, tl.float32)
        while n < 0:
            n = _list(found, listed, groups, lo, BLOCK)
            if by_mass & (lo > _NOTHING):
                at = (found, listed, n * DEPTH, width, temperature, largest, False)
                if _mass(scores, at, lo, False, DEPTH, LANES, BLOCK) < limit:
                    lo = _lower(lo, step)
                    step *= 4
                    n = tl.full([], -1, tl.int32)
        at = (found, listed, n * DEPTH, width, temperature, largest, False)
        if SHORT:
            n_tokens = _list_tokens(scores, at, listed + groups, groups, lo, DEPTH, LANES, BLOCK)
            short = n_tokens <= groups
            listed += tl.where(short, groups, 0)
            at = (found, listed, tl.where(short, n_tokens, n * DEPTH), width, temperature, largest, short)
        for stage in range(2):  # top-k, then top-p
            if tl.where(stage == 0, ranked, massed):
                if (stage == 1) & ranked:
                    limit = tl.maximum(p * _mass(scores, at, lo, SHORT, DEPTH, LANES, BLOCK), 1e-30)
                lo = _search(scores, at, lo, limit, stage == 1, False, SHORT, DEPTH, LANES, BLOCK)
        lo = tl.maximum(lo, _ordered(floor) - 1)
        first, second = tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1)
        token = _draw(scores, at, lo, first, second, SHORT, DEPTH, LANES, BLOCK)
    else:
        chunk = tl.arange(0, CHUNKS)
        best = tl.load(found + chunk, mask=chunk < chunks, other=float("-inf"))
        owner = tl.load(listed + chunk, mask=chunk < chunks, other=width - 1)
        token = tl.min(tl.where(best == tl.max(best, 0), owner, width - 1), 0)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _filters(row, top_ks, top_ps, min_ps, has_top_k, has_top_p, has_min_p):
    """(top-k, top-p, min-p) of a row; 0, 1, 0 if the step has none."""
    k, p, least = tl.full([], 0, tl.int64), tl.full([], 1, tl.float32), tl.full([], 0, tl.float32)
    if has_top_k != 0:
        k = tl.load(top_ks + row)
    if has_top_p != 0:
        p = tl.load(top_ps + row)
    if has_min_p != 0:
        least = tl.load(min_ps + row)
    return k, p, least


@triton.jit
def _scores(logits, token, there, temperature):
    """Logits divided by the temperature; minus infinity for missing tokens and for NaN."""
    x = tl.load(logits + token, mask=there, other=float("-inf")).to(tl.float32)
    x /= tl.where(temperature > 0, temperature, 1.0)
    return tl.where(x > float("-inf"), x, float("-inf"))


@triton.jit
def _listed_tokens(
    listed,
    start,
    size,
    width,
    short,
    SHORT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(tokens of the listed groups, whether they exist), from the `start`-th of `size` on. short: the list is of
    tokens; looked at only if SHORT."""
    at = start + tl.arange(0, BLOCK)
    if SHORT:
        group = tl.load(listed + tl.where(short, at, at // DEPTH), mask=at < size, other=0)
    else:
        group = tl.load(listed + at // DEPTH, mask=at < size, other=0)
    token = group // LANES * (DEPTH * LANES) + at % DEPTH * LANES + group % LANES
    if SHORT:
        token = tl.where(short, group, token)
    return token, (at < size) & (token < width)


@triton.jit
def _largest(found, groups, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, groups, BLOCK):
        at = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(found + at, mask=at < groups, other=float("-inf")))
    return tl.max(best, 0)


@triton.jit
def _mass_of_groups(found, groups, largest, BLOCK: tl.constexpr):
    """The mass of the whole row, relative to that of its largest score."""
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, groups, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(found + at, mask=at < groups, other=float("-inf"))
        mass = tl.load(found + groups + at, mask=at < groups, other=0.0)
        total += mass * tl.exp(x - _finite(largest))
    return tl.sum(total, 0)


@triton.jit
def _list(found, listed, groups, lo, BLOCK: tl.constexpr):
    """List the groups with a score above `lo`, in order. Returns how many there are."""
    n = tl.full([], 0, tl.int32)
    tl.debug_barrier()  # the list before this one has been read
    for start in range(0, groups, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(found + at, mask=at < groups, other=float("-inf"))
        wanted = ((at < groups) & (_ordered(x) > lo)).to(tl.int32)
        tl.store(listed + n + tl.cumsum(wanted, 0) - 1, at, mask=wanted != 0)
        n += tl.sum(wanted, 0)
    tl.debug_barrier()
    return n


@triton.jit
def _list_tokens(scores, at, tokens, room, lo, DEPTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """List the tokens of the listed groups with a score above `lo`, as far as there is room. Returns how many
    there are."""
    _, listed, size, width, temperature, _, short = at
    n = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        token, there = _listed_tokens(listed, start, size, width, short, False, DEPTH, LANES, BLOCK)
        x = _scores(scores, token, there, temperature)
        wanted = (there & (_ordered(x) > lo)).to(tl.int32)
        place = n + tl.cumsum(wanted, 0) - 1
        tl.store(tokens + place, token, mask=(wanted != 0) & (place < room))
        n += tl.sum(wanted, 0)
    tl.debug_barrier()
    return n


@triton.jit
def _mass(scores, at, lo, SHORT: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the listed scores above `lo`, relative to that of the row's largest score."""
    _, listed, size, width, temperature, largest, short = at
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        token, there = _listed_tokens(listed, start, size, width, short, SHORT, DEPTH, LANES, BLOCK)
        x = _scores(scores, token, there, temperature)
        total += tl.where(there & (_ordered(x) > lo), tl.exp(x - _finite(largest)), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _draw(
    scores,
    at,
    lo,
    first,
    second,
    SHORT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The listed token above `lo` with the best noisy score; of equal scores, the lowest token."""
    _, listed, size, width, temperature, _, short = at
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    owner = tl.full([BLOCK], 2147483647, tl.int32)
    for start in range(0, size, BLOCK):
        token, there = _listed_tokens(listed, start, size, width, short, SHORT, DEPTH, LANES, BLOCK)
        x = _scores(scores, token, there, temperature)
        there &= _ordered(x) > lo
        x = tl.where(there, x + _gumbel(token, first, second), float("-inf"))
        better = there & ((x > best) | ((x == best) & (token < owner)))
        best, owner = tl.where(better, x, best), tl.where(better, token, owner)
    owner = tl.min(tl.where(best == tl.max(best, 0), owner, 2147483647), 0)
    return tl.minimum(owner, width - 1)


@triton.jit
def _search(
    scores,
    at,
    lo,
    limit,
    by_mass,
    OF_GROUPS: tl.constexpr,
    SHORT: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The largest ordered `lo` with f(lo) >= limit. Of groups, a smaller `lo` suffices if at most a block's
    groups, or few more than necessary, lie above it."""
    found, listed, size, width, temperature, largest, short = at
    mark = tl.arange(0, 8)
    hi = _ordered(largest)
    lo += tl.full([], 0, tl.int32)
    marks = _ordered(largest - tl.exp2(mark.to(tl.float32) - 1))  # most of the mass lies near the largest
    if SHORT:  # below `lo`, nothing is listed
        marks = tl.maximum(marks, lo)
    n_lo, n_hi = (
        tl.full([], 2147483647, tl.int32),
        tl.full([], 0, tl.int32),
    )  # how many groups are above `lo` and `hi`
    while (hi > lo + 1) & (n_lo > tl.maximum(BLOCK // DEPTH, n_hi + n_hi // 2)):
        above = tl.zeros([8, BLOCK], tl.float32)
        counts = tl.zeros([8, BLOCK], tl.int32)
        least = tl.full([BLOCK], 2147483647, tl.int32)
        most = tl.full([BLOCK], -2147483648, tl.int32)
        for start in range(0, size, BLOCK):
            if OF_GROUPS:
                place = start + tl.arange(0, BLOCK)
                there = place < size
                x = tl.load(found + place, mask=there, other=float("-inf"))
                mass = tl.load(found + size + place, mask=there, other=0.0) * tl.exp(x - _finite(largest))
            else:
                token, there = _listed_tokens(listed, start, size, width, short, SHORT, DEPTH, LANES, BLOCK)
                x = _scores(scores, token, there, temperature)
                mass = tl.exp(x - _finite(largest))
            value = _ordered(x)
            weight = tl.where(by_mass, mass, 1.0)
            higher = there[None, :] & (value[None, :] > marks[:, None])
            above += tl.where(higher, weight[None, :], 0.0)
            if OF_GROUPS:
                counts += higher.to(tl.int32)
            inside = there & (value > lo) & (value <= hi)
            least = tl.minimum(least, tl.where(inside, value, 2147483647))
            most = tl.maximum(most, tl.where(inside, value, -2147483648))
        enough = tl.sum(above, 1) >= limit
        if OF_GROUPS:
            n = tl.sum(counts, 1)
            n_lo = tl.minimum(n_lo, tl.min(tl.where(enough, n, 2147483647), 0))
            n_hi = tl.maximum(n_hi, tl.max(tl.where(enough, 0, n), 0))
        lo, hi = (
            tl.maximum(tl.maximum(lo, tl.min(least, 0) - 1), tl.max(tl.where(enough, marks, -2147483648), 0)),
            tl.minimum(tl.minimum(hi, tl.max(most, 0)), tl.min(tl.where(enough, 2147483647, marks), 0)),
        )
        width_left = hi.to(tl.int64) - lo
        marks = (lo + width_left * (mark + 1) // 9).to(tl.int32)
    return tl.minimum(lo, hi - 1)


@triton.jit
def _lower(lo, by):
    """`lo` lowered by `by`; `_NOTHING` if `by` is so large that no score lies below."""
    x = (lo ^ ((lo >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where((lo <= _NOTHING + 1) | (by > 64), _NOTHING, _ordered(x - by))


@triton.jit
def _finite(x):
    return tl.where(x > float("-inf"), x, 0.0)


@triton.jit
def _ordered(x):
    """float32 -> int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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

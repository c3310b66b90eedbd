"""The kernels of decode attention over rows that are cut into pieces.

The warps of a program do not meet within a piece. Each has keys and a softmax of its own, and their sums are
added at the end of the piece. Keys are the left operand of the tensor cores. The queries that share a head of
keys, padded to eight or sixteen, are the right one. While a program computes with a tile of keys, the next tiles
are on their way to shared memory, sixteen bytes a copy, and so are the places of those behind them.

Eight-bit keys and values are read as pairs, of sixteen bits. Masks and shifts make each byte the float16 that is
worth 2**-8 of it, on every card. The tensor cores take the even elements and the odd ones in turn.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from petiole.gpu_worker.runtime.cuda.fused.layers import overlapped
from petiole.gpu_worker.runtime.cuda.fused.split import pieces as limits
from petiole.gpu_worker.runtime.cuda.fused.split.pieces import Pieces, SplitLayers

_LOG2_E = 1.4426950408889634
_WORTH = 2.0**8
"""What a float16 that `_halves` makes is multiplied by."""

_WARPS = 4
_STAGES, _STAGES_OF_WIDE_HEADS = 5, 3
"""Of the loop over tiles: two tiles are on their way, or one, and the places of as many more. A tile of keys and
values with heads of 128 takes 32 KiB."""

_REGISTERS = 168
"""Of a thread, see `attention.split.programs_at_once`. Triton 3.6 takes 230 without need."""

_COLUMNS = 128
"""Elements of a head that a program of `_merge` computes."""

_ROWS = 8
"""Rows that a program of `_cut` lists."""

_HALVES = """{ .reg .b32 s, t, w, x; mov.b32 w, $2;
shl.b32 x, w, 8; and.b32 s, x, 0x80008000; shr.u32 t, x, 1; lop3.b32 $0, t, 0x3f803f80, s, 0xea;
and.b32 s, w, 0x80008000; shr.u32 t, w, 1; lop3.b32 $1, t, 0x3f803f80, s, 0xea; }"""
"""PTX that makes two pairs of float8_e4m3fn two float16 of the low bytes and two of the high ones."""


def cut(indptr: Tensor, last_page_len: Tensor, page_size: int, window: int, queries: int, pieces: Pieces) -> None:
    """Write the pieces of rows whose pages `indptr` bounds, int32 [rows + 1]; last_page_len: int32 [rows]. Each
    row has at least as many positions as queries."""
    rows = len(last_page_len)
    _cut[(triton.cdiv(rows, _ROWS),)](
        indptr,
        last_page_len,
        pieces.listed,
        pieces.of_rows,
        pieces.count,
        rows,
        page_size,
        window + queries - 1 if window else 0,
        FIELDS=limits.FIELDS,
        PIECE=limits.PIECE,
        PIECES=limits.MOST_PIECES,
        TILE=limits.TILE,
        ROWS=_ROWS,
        ALL=triton.next_power_of_2(rows),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["rows", "seen"])
def _cut(
    indptr,
    last_page_len,
    listed,
    of_rows,
    count,
    rows,
    page_size,
    seen,
    FIELDS: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
):
    """seen: positions that the queries of a row see; 0: all."""
    other, row = tl.arange(0, ALL), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    _, _, _, other_each, other_n, other_rest = _pieces_of(
        indptr, last_page_len, other, rows, page_size, seen, PIECE, PIECES, TILE
    )
    first_page, length, start, each, n, rest = _pieces_of(
        indptr, last_page_len, row, rows, page_size, seen, PIECE, PIECES, TILE
    )
    earlier, others = other[None, :] < row[:, None], tl.where(other < rows, 1, 0)[None, :]
    longer, as_long = other_each[None, :] > each[:, None], other_each[None, :] == each[:, None]
    before = tl.where(longer | (as_long & earlier), other_n[None, :] - others, 0)
    place = tl.sum(before + tl.where(other_rest[None, :] > each[:, None], others, 0), 1)
    longer, as_long = other_rest[None, :] > rest[:, None], other_rest[None, :] == rest[:, None]
    before = tl.where(longer | (as_long & earlier), others, 0)
    last = tl.sum(before + tl.where(other_each[None, :] >= rest[:, None], other_n[None, :] - others, 0), 1)
    real = row < rows
    tl.store(of_rows + row, place, mask=real)
    tl.store(of_rows + rows + row, last, mask=real)
    tl.store(of_rows + 2 * rows + row, n, mask=real)
    piece = tl.arange(0, PIECES)[None, :]
    there = piece < n[:, None]
    at = listed + tl.where(piece < n[:, None] - 1, place[:, None] + piece, last[:, None]) * FIELDS
    begin = start[:, None] + piece * each[:, None]
    tl.store(at, tl.broadcast_to(row[:, None], begin.shape), mask=there)
    tl.store(at + 1, begin, mask=there)
    tl.store(at + 2, tl.minimum(begin + each[:, None], length[:, None]), mask=there)
    tl.store(at + 3, tl.broadcast_to(length[:, None], begin.shape), mask=there)
    tl.store(at + 4, tl.broadcast_to(first_page[:, None], begin.shape), mask=there)
    tl.store(at + 5, tl.broadcast_to(n[:, None], begin.shape), mask=there)
    if tl.program_id(0) == 0:
        tl.store(count, tl.sum(other_n, 0))


@triton.jit
def _pieces_of(
    indptr,
    last_page_len,
    row,
    rows,
    page_size,
    seen,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The place of each row's first page, its length, the first position that its queries see, and what
    `pieces.piece_length` says of it: how long its pieces are, how many there are, and how long the last one is."""
    real = row < rows
    first_page = tl.load(indptr + row, mask=real, other=0)
    pages = tl.load(indptr + row + 1, mask=real, other=0) - first_page
    length = (pages - 1) * page_size + tl.load(last_page_len + row, mask=real, other=0)
    start = tl.maximum(length - seen, 0) if seen > 0 else length * 0
    positions = tl.maximum(length - start, 1)
    longest = tl.maximum(tl.cdiv(tl.cdiv(positions, PIECES), TILE) * TILE, PIECE)
    each = tl.cdiv(tl.cdiv(positions, tl.cdiv(positions, longest)), TILE) * TILE
    n = tl.cdiv(positions, each)
    return first_page, length, start, each, tl.where(real, n, 0), positions - (n - 1) * each


def attend(layers: SplitLayers, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sums: Tensor | None) -> None:
    """See `attention.split.SplitWrapper.run`. sums: float32 [rows * queries, heads]."""
    queries, pieces, width = layers.queries, layers.pieces, layers.width
    keys, values = pages
    in_pairs = keys.dtype == torch.float8_e4m3fn
    if in_pairs:
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    group, units = layers.heads // layers.kv_heads, keys.shape[3]
    assert q.stride()[1:] == out.stride()[1:] == (width, 1)
    assert out.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    worth = _WORTH if in_pairs else 1.0
    scale = layers.scale * worth
    scale *= 2.0 * _LOG2_E / layers.softcap if layers.softcap else _LOG2_E
    rows, wide = max(8, triton.next_power_of_2(group * queries)), units > 128
    constants = {
        "KV_HEADS": layers.kv_heads,
        "GROUP": group,
        "QUERIES": queries,
        "WIDTH": width,
        "SUMS": sums is not None,
    }
    launch = overlapped(q)
    _attend[(layers.programs,)](
        q,
        keys,
        values,
        layers.indices,
        pieces.listed,
        pieces.count,
        out,
        out if sums is None else sums,
        layers.parts,
        layers.sums,
        q.stride(0),
        layers.kv_heads * units,
        scale,
        layers.softcap * _LOG2_E,
        layers.window,
        CAPPED=layers.softcap > 0,
        WINDOWED=layers.window > 0 and queries > 1,
        UNITS=units,
        ROWS=rows,
        PAGE=layers.page_size,
        FIELDS=limits.FIELDS,
        LANES=_WARPS,
        WORTH=worth,
        KEYS=limits.TILE // _WARPS,
        ASSEMBLY="" if triton.knobs.runtime.interpret else _HALVES,
        num_warps=_WARPS,
        num_stages=_STAGES_OF_WIDE_HEADS if wide else _STAGES,
        maxnreg=None if wide or rows > 8 else _REGISTERS,
        **constants,
        **launch,
    )
    n_rows, columns = pieces.of_rows.shape[1], min(width, _COLUMNS)
    _merge[(n_rows, layers.heads * queries, width // columns)](
        layers.parts,
        layers.sums,
        pieces.of_rows,
        out,
        out if sums is None else sums,
        n_rows,
        PIECES=limits.MOST_PIECES,
        AT_ONCE=16,
        COLUMNS=columns,
        num_warps=1,
        **constants,
        **launch,
    )


@triton.jit
def _attend(
    q,
    keys,
    values,
    pages,
    listed,
    count,
    out,
    out_sums,
    parts,
    part_sums,
    q_row,
    position_units,
    scale,
    cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    UNITS: tl.constexpr,
    ROWS: tl.constexpr,
    PAGE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SUMS: tl.constexpr,
    FIELDS: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    WORTH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """UNITS: of sixteen bits, of a head; ROWS: GROUP * QUERIES, padded. A lane is a warp's keys of a tile."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    in_pairs: tl.constexpr = UNITS < WIDTH
    apart: tl.constexpr = WIDTH // UNITS
    heads: tl.constexpr = KV_HEADS * GROUP
    lane, key, r, unit = tl.arange(0, LANES), tl.arange(0, KEYS), tl.arange(0, ROWS), tl.arange(0, UNITS)
    of_head = r // GROUP * q_row + r % GROUP * WIDTH
    real = r < GROUP * QUERIES
    for item in range(tl.program_id(0), tl.load(count) * KV_HEADS, tl.num_programs(0)):
        head, piece = item % KV_HEADS, listed + item // KV_HEADS * FIELDS
        row, begin, end, length = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2), tl.load(piece + 3)
        listed_pages = pages + tl.load(piece + 4)
        queries = q + row * QUERIES * q_row + head * GROUP * WIDTH
        even = _queries(queries, of_head, real, unit, keys, 0, apart, LANES)
        odd = _queries(queries, of_head, real, unit, keys, 1, apart, LANES) if in_pairs else even
        most = tl.full([LANES, ROWS], float("-inf"), tl.float32)
        weights = tl.zeros([LANES, ROWS], tl.float32)
        total = tl.zeros([LANES, UNITS, ROWS], tl.float32)
        other = tl.zeros([LANES, UNITS, ROWS], tl.float32) if in_pairs else 0.0
        for start in range(begin, end, LANES * KEYS):
            position = start + lane[:, None] * KEYS + key[None, :]
            known = tl.minimum(position, end - 1)  # beyond the end, the last key again, whose weight is then none
            slot = tl.load(listed_pages + known // PAGE).to(tl.int64) * PAGE + known % PAGE
            place = slot * position_units + head * UNITS
            k = tl.load(keys + place[:, :, None] + unit[None, None, :])
            v = tl.load(values + place[:, None, :] + unit[None, :, None])
            if in_pairs:
                low, high = _halves(k, ASSEMBLY)
                score = tl.dot(high, odd, tl.dot(low, even)) * scale
            else:
                score = tl.dot(k, even) * scale
            if CAPPED:
                score = cap - 2.0 * cap / (tl.exp2(score) + 1.0)  # cap * tanh
            seen = (position < end)[:, :, None]
            if QUERIES > 1:
                last = (length - QUERIES + r // GROUP)[None, None, :]
                seen = seen & (position[:, :, None] <= last)
                if WINDOWED:
                    seen = seen & (position[:, :, None] > last - window)
            score = tl.where(seen, score, float("-inf"))
            largest = tl.maximum(most, tl.max(score, 1))
            base = tl.where(largest == float("-inf"), 0.0, largest)
            weight = tl.exp2(score - base[:, None, :])
            shrunk = tl.exp2(most - base)
            weights, most = weights * shrunk + tl.sum(weight, 1), largest
            if in_pairs:
                low, high = _halves(v, ASSEMBLY)
                weight = weight.to(tl.float16)
                total = tl.dot(low, weight, total * shrunk[:, None, :])
                other = tl.dot(high, weight, other * shrunk[:, None, :])
            else:
                total = tl.dot(v, weight.to(v.dtype), total * shrunk[:, None, :])
        largest = tl.max(most, 0)
        base = tl.where(largest == float("-inf"), 0.0, largest)
        share = tl.exp2(most - base[None, :])
        sum_of_weights = tl.sum(weights * share, 0)
        some = sum_of_weights > 0.0  # a query may see nothing of a piece
        divisor = tl.where(some, sum_of_weights, 1.0)
        logarithm = tl.where(some, base + tl.log2(divisor), float("-inf"))
        share *= (WORTH / divisor)[None, :]
        if tl.load(piece + 5) == 1:
            to_row = out + row.to(tl.int64) * QUERIES * heads * WIDTH + head * GROUP * WIDTH
            of_output = (r // GROUP * heads + r % GROUP) * WIDTH
            _store(to_row, of_output, real, unit, total, share, 0, apart)
            if in_pairs:
                _store(to_row, of_output, real, unit, other, share, 1, apart)
            if SUMS:
                at = row * QUERIES * heads + head * GROUP + r // GROUP * heads + r % GROUP
                tl.store(out_sums + at, logarithm, mask=real)
        else:
            part = item * (GROUP * QUERIES) + r.to(tl.int64)
            _store(parts, part * WIDTH, real, unit, total, share, 0, apart)
            if in_pairs:
                _store(parts, part * WIDTH, real, unit, other, share, 1, apart)
            tl.store(part_sums + part, logarithm, mask=real)


@triton.jit
def _queries(queries, of_head, real, unit, keys, FIRST: tl.constexpr, APART: tl.constexpr, LANES: tl.constexpr):
    """[lanes, units, rows], in the type of the keys; of pairs, float16."""
    at = queries + of_head[None, :] + (unit[:, None] * APART + FIRST)
    found = tl.load(at, mask=real[None, :], other=0.0)
    if keys.dtype.element_ty == tl.int16:
        found = tl.clamp(found.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return tl.broadcast_to(found[None, :, :], [LANES, found.shape[0], found.shape[1]])


@triton.jit
def _halves(pairs, ASSEMBLY: tl.constexpr):
    """What the low and the high bytes stand for, divided by 2**8, float16. See `_HALVES`."""
    if ASSEMBLY == "":
        return _half(pairs << 8), _half(pairs)
    else:
        return tl.inline_asm_elementwise(
            ASSEMBLY, "=r,=r,r", args=[pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )


@triton.jit
def _half(high):
    return ((high & -32768) | ((high >> 1) & 0x3F80)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _store(target, of_row, real, unit, total, share, FIRST: tl.constexpr, APART: tl.constexpr):
    """The sum over the four lanes of total, [lanes, units, rows], times share, [lanes, rows]."""
    lanes = tl.permute(total * share[:, None, :], (1, 2, 0))
    even, odd = tl.split(tl.reshape(lanes, [lanes.shape[0], lanes.shape[1], 2, 2]))
    a, b = tl.split(even)
    c, d = tl.split(odd)
    at = target + of_row[None, :] + (unit[:, None] * APART + FIRST)
    tl.store(at, ((a + b) + (c + d)).to(target.dtype.element_ty), mask=real[None, :])


@triton.jit(do_not_specialize=["rows"])
def _merge(
    parts,
    part_sums,
    of_rows,
    out,
    out_sums,
    rows,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    WIDTH: tl.constexpr,
    SUMS: tl.constexpr,
    PIECES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, r = which // (GROUP * QUERIES), which % (GROUP * QUERIES)
    n = tl.load(of_rows + 2 * rows + row)
    if n > 1:
        place, last = tl.load(of_rows + row), tl.load(of_rows + rows + row)
        every, column = tl.arange(0, PIECES), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        of_every = part_sums + _part(every, n, place, last, head, r, KV_HEADS, GROUP * QUERIES)
        logarithm = tl.load(of_every, mask=every < n, other=float("-inf"))
        largest = tl.max(logarithm, 0)
        sum_of_weights = tl.sum(tl.exp2(logarithm - largest), 0)
        total = tl.zeros([COLUMNS], tl.float32)
        for first in range(0, n, AT_ONCE):
            piece = first + tl.arange(0, AT_ONCE)
            at, there = _part(piece, n, place, last, head, r, KV_HEADS, GROUP * QUERIES), piece < n
            weight = tl.exp2(tl.load(part_sums + at, mask=there, other=float("-inf")) - largest)
            part = tl.load(parts + at[:, None] * WIDTH + column[None, :], mask=there[:, None], other=0.0)
            total += tl.sum(part * weight[:, None], 0)
        to = (row * QUERIES + r // GROUP) * (KV_HEADS * GROUP) + head * GROUP + r % GROUP
        tl.store(out + to * WIDTH + column, (total / sum_of_weights).to(out.dtype.element_ty))
        if SUMS:
            tl.store(out_sums + to, largest + tl.log2(sum_of_weights))


@triton.jit
def _part(piece, n, place, last, head, r, KV_HEADS: tl.constexpr, QUERIES: tl.constexpr):
    """Which part a piece of a row has written for a query of a head of keys."""
    item = tl.where(piece < n - 1, place + piece, last) * KV_HEADS + head
    return item.to(tl.int64) * QUERIES + r

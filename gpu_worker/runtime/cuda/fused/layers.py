"""The work of a decoder layer between its projections and its attention, in one launch, on CUDA; page lists; and
the scaling of rows to eight bits."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.runtime.device.cuda import capability

_PAIRS = 512
"""Pairs of elements that a program turns: of up to eight heads."""
FP8_MAX = tl.constexpr(448.0)


def overlapped(x: Tensor) -> dict[str, bool]:
    """Launch options, on the device of x, of a kernel that reads and writes nothing before its `gdc_wait`.

    From Hopper on, such a kernel may start while the previous kernel ends (programmatic dependent launch).
    """
    hopper = capability(x.device) >= (9, 0)
    return {"OVERLAPPED": True, "launch_pdl": True} if hopper else {"OVERLAPPED": False}


def has_small_memory(place: torch.device) -> bool:
    """Whether a block of this card has only 99 KiB of shared memory: 3090, A10, L4, 4090, 5090."""
    return capability(place) in ((8, 6), (8, 9), (12, 0), (12, 1))


def rotate_and_store(
    q: Tensor, k: Tensor, v: Tensor | None, rotation: Rotation, keys: Tensor, values: Tensor, slots: Tensor
) -> None:
    """Rotate q in place, if anything is rotated; keys[slots[t]] = k[t] rotated, values[slots[t]] = v[t], in the
    cache's type, cut to its range. Norm and rotation are computed in float32. v None: values are the stored keys.

    q: [T, Hq, D], k, v: [T, Hkv, D], rows of any stride, heads dense; keys, values: [slots, Hkv, D], contiguous;
    slots: int64 [T].
    """
    n, n_heads, width = q.shape
    n_kv_heads, table, stored = k.shape[1], rotation.table, v is not None
    v, block = k if v is None else v, triton.next_power_of_2(width // 2)
    heads = max(1, min(8, _PAIRS // block))
    assert all(x.stride()[1:] == (width, 1) for x in (q, k, v))
    assert table is None or table.is_contiguous()
    _check_sizes(q, k, v, rotation, keys, values)
    if keys.dtype == torch.float8_e4m3fn:  # as bits: cards before 8.9 have no such type
        keys, values = keys.view(torch.uint8), values.view(torch.uint8)
    q_norm, k_norm = rotation.norms or (q, q)
    _rotate_and_store[(n, triton.cdiv(n_heads, heads) + triton.cdiv(n_kv_heads, heads))](
        q,
        k,
        v,
        q_norm,
        k_norm,
        rotation.positions,
        q if table is None else table,
        keys,
        values,
        slots,
        n_heads,
        n_kv_heads,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        rotation.eps,
        NORMED=rotation.norms is not None,
        VALUES=stored,
        HALF=width // 2,
        TURNED=0 if table is None else table.shape[1] // 2,
        NEAR=rotation.neighbours,
        BLOCK=block,
        HEADS=heads,
        num_warps=4,
        **overlapped(q),
    )


def _check_sizes(q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, keys: Tensor, values: Tensor) -> None:
    """The kernel would write beyond a slot, or read another position's angles."""
    width, of_keys = q.shape[2], k.shape[1:]
    fits = of_keys == v.shape[1:] == keys.shape[1:] == values.shape[1:] and of_keys[1] == width
    if not fits or not len(rotation.positions) == len(q) == len(k) == len(v):
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v, rotation.positions, keys, values))
        raise ValueError(f"queries, keys, values, positions and the pools of both: must fit, got {shapes}")
    norms, table = rotation.norms or (), rotation.table
    fits = table is None or (table.shape[1] <= width and table.shape[1] % 2 == 0)
    if not fits or any(norm.shape != (width,) for norm in norms):
        shapes = ", ".join("none" if x is None else str(list(x.shape)) for x in (table, *norms))
        raise ValueError(f"rotary table and norms: must have at most, and exactly, {width} columns, got {shapes}")


@triton.jit
def _rotate_and_store(
    q,
    k,
    v,
    q_norm,
    k_norm,
    positions,
    table,
    keys,
    values,
    slots,
    n_heads,
    n_kv_heads,
    q_row,
    k_row,
    v_row,
    eps,
    NORMED: tl.constexpr,
    VALUES: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """A head is HALF pairs of elements. TURNED pairs turn: element i with i + TURNED; NEAR: element 2 i with
    2 i + 1. The rest of the head are pairs, too, which do not turn."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = table + tl.load(positions + row).to(tl.int64) * (2 * TURNED)
    n_groups = tl.cdiv(n_heads, HEADS)
    if group < n_groups:
        at, apart, used = _places(group, n_heads, HALF, TURNED, NEAR, BLOCK, HEADS)
        x = q + row * q_row
        low, high = _rotated(x, at, apart, used, q_norm, angles, eps, NORMED, HALF, TURNED, NEAR, BLOCK)
        _store_pairs(x, at, apart, used, low, high)
    else:
        at, apart, used = _places(group - n_groups, n_kv_heads, HALF, TURNED, NEAR, BLOCK, HEADS)
        place = tl.load(slots + row) * n_kv_heads * (2 * HALF)
        if VALUES:
            low, high = _pairs(v + row * v_row, at, apart, used)
            _store_pairs(values + place, at, apart, used, low, high)
        low, high = _rotated(
            k + row * k_row, at, apart, used, k_norm, angles, eps, NORMED, HALF, TURNED, NEAR, BLOCK
        )
        _store_pairs(keys + place, at, apart, used, low, high)


@triton.jit
def _firsts(TURNED: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr):
    """Where the first element of each pair of a head lies."""
    pair = tl.arange(0, BLOCK)
    return tl.where(pair < TURNED, pair * (2 if NEAR else 1), pair + TURNED)


@triton.jit
def _apart(HALF: tl.constexpr, TURNED: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr):
    """How far the elements of each pair of a head lie apart."""
    return tl.where(tl.arange(0, BLOCK) < TURNED, 1 if NEAR else TURNED, HALF - TURNED)


@triton.jit
def _places(
    group,
    n_heads,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The places of the first elements of all pairs of a group of heads in a row of dense heads, how far their
    second elements lie apart, and which of the pairs exist."""
    head, pair = group * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    at = head[:, None] * (2 * HALF) + _firsts(TURNED, NEAR, BLOCK)[None, :]
    return at, _apart(HALF, TURNED, NEAR, BLOCK)[None, :], (head < n_heads)[:, None] & (pair < HALF)[None, :]


@triton.jit
def _rotated(
    x,
    at,
    apart,
    used,
    norm,
    angles,
    eps,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
    TURNED: tl.constexpr,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first and second elements, float32 [heads, BLOCK], of the pairs at `at`, normed and rotated."""
    pair = tl.arange(0, BLOCK)
    inside, turned = pair < HALF, pair < TURNED
    low, high = _pairs(x, at, apart, used)
    if NORMED:
        first = norm + _firsts(TURNED, NEAR, BLOCK)
        square = tl.sum(low * low + high * high, 1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        low = low * scale * tl.load(first, mask=inside, other=0.0).to(tl.float32)[None, :]
        second = tl.load(first + _apart(HALF, TURNED, NEAR, BLOCK), mask=inside, other=0.0)
        high = high * scale * second.to(tl.float32)[None, :]
    cos = tl.load(angles + pair, mask=turned, other=1.0)[None, :]
    sin = tl.load(angles + TURNED + pair, mask=turned, other=0.0)[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _pairs(x, at, apart, used):
    low = tl.load(x + at, mask=used, other=0.0).to(tl.float32)
    return low, tl.load(x + at + apart, mask=used, other=0.0).to(tl.float32)


@triton.jit
def _store_pairs(target, at, apart, used, low, high):
    if target.dtype.element_ty == tl.uint8:
        low, high = _in_eight_bits(low), _in_eight_bits(high)
    tl.store(target + at, low.to(target.dtype.element_ty), mask=used)
    tl.store(target + at + apart, high.to(target.dtype.element_ty), mask=used)


@triton.jit
def _in_eight_bits(x):
    """The bits of the float8_e4m3fn that is nearest to a float32, of two the even one; beyond the range, the
    largest. Below the least normal one, 2**-6, these are multiples of 2**-9: adding 1.5 * 2**23 rounds to one."""
    number = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(number & 0x7FFFFFFF, 0x43E00000)  # of FP8_MAX
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) >> 20) - (120 << 3)
    small = (magnitude.to(tl.float32, bitcast=True) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    bits = tl.where(magnitude < 0x3C800000, small, normal)
    bits = tl.where((number & 0x7FFFFFFF) > 0x7F800000, 0x7F, bits)  # not a number
    return (bits | (number >> 24) & 0x80).to(tl.uint8)


def write_pages(tables: Tensor, rows: Tensor, columns: Tensor, pages: Tensor) -> None:
    """tables[:, rows, columns] = pages; all int32. tables: [groups, rows, columns]; rows, columns: [N]; pages:
    [groups, N], rows of any stride; equal places have equal pages."""
    n, block = len(rows), 256
    _write_pages[(triton.cdiv(n, block), len(tables))](
        tables, rows, columns, pages, n, *tables.stride()[:2], pages.stride(0), BLOCK=block, num_warps=4
    )


@triton.jit
def _write_pages(tables, rows, columns, pages, n, size, width, apart, BLOCK: tl.constexpr):
    i, group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    used = i < n
    row = tl.load(rows + i, mask=used, other=0).to(tl.int64)
    column, page = tl.load(columns + i, mask=used, other=0), tl.load(pages + group * apart + i, mask=used, other=0)
    tl.store(tables + group * size + row * width + column, page, mask=used)


def gather_pages(table: Tensor, rows: Tensor, firsts: Tensor, indptr: Tensor, pages: Tensor) -> None:
    """pages[indptr[i] : indptr[i + 1]] = the pages of row `rows[i]` from column `firsts[i]` on; all int32.

    table: [rows, columns]; rows: [B], of any stride; firsts: [B]; indptr: [B + 1]; pages: at least indptr[B] long.
    """
    _gather_pages[(len(rows),)](
        table, rows, firsts, indptr, pages, table.stride(0), rows.stride(0), BLOCK=1024, num_warps=4
    )


@triton.jit
def _gather_pages(table, rows, firsts, indptr, pages, columns, apart, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(rows + i * apart).to(tl.int64)
    own = table + row * columns + tl.load(firsts + i)
    first, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    for start in range(0, end - first, BLOCK):
        column = start + tl.arange(0, BLOCK)
        used = column < end - first
        tl.store(pages + first + column, tl.load(own + column, mask=used), mask=used)


def token_slots(tables: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """int64 [groups, T]: the KV slots of the given positions of the given rows; see `KVCache.slots`."""
    n, groups, block = len(rows), len(tables), 256
    slots = torch.empty((groups, n), dtype=torch.int64, device=tables.device)
    _token_slots[(triton.cdiv(n, block), groups)](
        tables, rows, positions, slots, n, page_size, *tables.stride()[:2], BLOCK=block, num_warps=4
    )
    return slots


@triton.jit(do_not_specialize=["n"])
def _token_slots(tables, rows, positions, slots, n, page_size, size, columns, BLOCK: tl.constexpr):
    i, group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    used = i < n
    row = tl.load(rows + i, mask=used, other=0).to(tl.int64)
    position = tl.load(positions + i, mask=used, other=0).to(tl.int64)
    own = tables + group * size + row * columns
    page = tl.load(own + position // page_size, mask=used, other=0).to(tl.int64)
    tl.store(slots + group * n + i, page * page_size + position % page_size, mask=used)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [T, in], float32 [T, 1]) whose product is x, bfloat16 or float16 [T, in]."""
    x = x.contiguous()
    n, width = x.shape
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = torch.empty((n, 1), dtype=torch.float32, device=x.device)
    _quantize_rows[(n,)](x, values, scales, width, BLOCK=triton.next_power_of_2(width), num_warps=8)
    return values, scales


@triton.jit
def _quantize_rows(x, values, scales, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    used = column < width
    wide = tl.load(x + row * width + column, mask=used, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), 1e-12) / FP8_MAX
    tl.store(scales + row, scale)
    tl.store(values + row * width + column, (wide / scale).to(tl.float8e4nv), mask=used)

"""Of a decoder layer, on CUDA: norm and rotation of queries and keys in one launch, and what eight bits need."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_HEADS = 8
FP8_MAX = tl.constexpr(448.0)


def rotate(
    q: Tensor,
    k: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    positions: Tensor,
    table: Tensor,
) -> None:
    """In place: norm, where the model has `norms` of q and k, and rotary embedding, both in float32.

    q: [T, Hq, D], k: [T, Hkv, D], of any strides with the last dimension dense; positions: integers [T]; table:
    float32 [positions, D], cosines and then sines.
    """
    n, n_heads, width = q.shape
    n_kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == 1
    assert table.is_contiguous()
    q_norm, k_norm = norms or (table, table)
    _rotate[(n, triton.cdiv(n_heads, _HEADS) + triton.cdiv(n_kv_heads, _HEADS))](
        q,
        k,
        q_norm,
        k_norm,
        positions,
        table,
        n_heads,
        n_kv_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        eps,
        NORMED=norms is not None,
        HALF=width // 2,
        BLOCK=triton.next_power_of_2(width // 2),
        HEADS=_HEADS,
        num_warps=4,
    )


@triton.jit
def _rotate(
    q,
    k,
    q_norm,
    k_norm,
    positions,
    table,
    n_heads,
    n_kv_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    eps,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row)
    n_groups = tl.cdiv(n_heads, HEADS)
    if group < n_groups:
        _rotate_heads(
            q + row * q_row, q_head, n_heads, group, q_norm, position, table, eps, NORMED, HALF, BLOCK, HEADS
        )
    else:
        group -= n_groups
        _rotate_heads(
            k + row * k_row, k_head, n_kv_heads, group, k_norm, position, table, eps, NORMED, HALF, BLOCK, HEADS
        )


@triton.jit
def _rotate_heads(
    x,
    stride,
    n_heads,
    group,
    norm,
    position,
    table,
    eps,
    NORMED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
):
    head, column = group * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    used = column < HALF
    at = x + head[:, None] * stride + column[None, :]
    mask = (head < n_heads)[:, None] & used[None, :]
    low = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORMED:
        square = tl.sum(low * low + high * high, 1) / (2 * HALF)
        scale = tl.rsqrt(square + eps)[:, None]
        low = low * scale * tl.load(norm + column, mask=used, other=0.0).to(tl.float32)[None, :]
        high = high * scale * tl.load(norm + HALF + column, mask=used, other=0.0).to(tl.float32)[None, :]
    angles = table + position.to(tl.int64) * (2 * HALF)
    cos = tl.load(angles + column, mask=used, other=0.0)[None, :]
    sin = tl.load(angles + HALF + column, mask=used, other=0.0)[None, :]
    tl.store(at, (low * cos - high * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (high * cos + low * sin).to(x.dtype.element_ty), mask=mask)


def gather_pages(table: Tensor, rows: Tensor, indptr: Tensor, pages: Tensor) -> None:
    """pages[indptr[i] : indptr[i + 1]] = the first pages of row `rows[i]`; all int32.

    table: [rows, columns]; rows: [B]; indptr: [B + 1]; pages: at least indptr[B] long.
    """
    _gather_pages[(len(rows),)](table, rows, indptr, pages, table.stride(0), BLOCK=1024, num_warps=4)


@triton.jit
def _gather_pages(table, rows, indptr, pages, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(rows + i).to(tl.int64)
    first, end = tl.load(indptr + i), tl.load(indptr + i + 1)
    for start in range(0, end - first, BLOCK):
        column = start + tl.arange(0, BLOCK)
        used = column < end - first
        tl.store(pages + first + column, tl.load(table + row * columns + column, mask=used), mask=used)


def token_slots(table: Tensor, rows: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """int64 [T]: where in the pool the given positions of the given rows lie; see `KVCache.slots`."""
    n = len(rows)
    slots = torch.empty(n, dtype=torch.int64, device=table.device)
    block = 256
    _token_slots[(triton.cdiv(n, block),)](
        table, rows, positions, slots, n, page_size, table.stride(0), BLOCK=block, num_warps=4
    )
    return slots


@triton.jit(do_not_specialize=["n"])
def _token_slots(table, rows, positions, slots, n, page_size, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    used = i < n
    row = tl.load(rows + i, mask=used, other=0).to(tl.int64)
    position = tl.load(positions + i, mask=used, other=0).to(tl.int64)
    page = tl.load(table + row * columns + position // page_size, mask=used, other=0).to(tl.int64)
    tl.store(slots + i, page * page_size + position % page_size, mask=used)


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


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """keys[slots[t]] = k[t], and the values likewise, in the cache's type, cut to its range.

    k, v: [T, Hkv, D], heads dense; keys, values: [slots, Hkv, D], contiguous; slots: int64 [T].
    """
    n, heads, width = k.shape
    size = heads * width
    assert k.stride(1) == v.stride(1) == width
    _store_kv[(n,)](
        k, v, keys, values, slots, k.stride(0), v.stride(0), size, BLOCK=triton.next_power_of_2(size), num_warps=4
    )


@triton.jit
def _store_kv(k, v, keys, values, slots, k_row, v_row, size, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    used = column < size
    slot = tl.load(slots + row)
    _store(k + row * k_row, keys + slot * size, column, used)
    _store(v + row * v_row, values + slot * size, column, used)


@triton.jit
def _store(source, target, column, used):
    x = tl.load(source + column, mask=used, other=0.0)
    if target.dtype.element_ty == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    tl.store(target + column, x.to(target.dtype.element_ty), mask=used)

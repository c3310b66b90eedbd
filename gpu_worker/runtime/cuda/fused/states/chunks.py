"""The gated delta rule of long rows in chunks, with products of matrices, on CUDA.

A row of CHUNK positions or more is cut into chunks. With G the sum of g up to a position of a chunk, S the
matrix before it and u the changes (`models/parts/recurrent/delta_rule.py`):

    (1 + A) u = beta * (v - exp(G) k.S)     A_ij = beta_i exp(G_i - G_j) (k_i.k_j), for j < i
    o = exp(G) q.S + P u                    P_ij = exp(G_i - G_j) (q_i.k_j), for j <= i
    S = exp(G_last) S + sum over j of exp(G_last - G_j) k_j (x) u_j

P and the inverses of 1 + A are computed for all chunks at once (Yang et al., "Gated Delta Networks", 2024, call
that the UT transform). Only what depends on S follows the chunks of a row one after the other. Shorter rows, such
as those that decode, are followed position by position as ever (`states`), and so are all rows where snapshots are
rounded: that takes more registers than a block has.

This passed its tests on an H100, and nobody has timed it: it is chosen by PETIOLE_EXACT=off alone.

Sums have another order than position by position, and products with S are of numbers in tf32, which have 11 bits:
what a row computes depends a little on where its prompt is cut. The inverses would suffer most from that. Their
products take three products in tf32 each, which is nearly float32.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.parts.recurrent.states import Rounded
from petiole.gpu_worker.runtime.cuda.fused.states.recurrent import apply_delta_rule, key_heads_of

CHUNK = 32
"""Positions. Of longer chunks a block's registers would not hold what it multiplies."""

_VALUES = 16  # dimensions of a head's values that a block follows
_KEYS = tl.constexpr(32)  # of keys, that it multiplies at a time
_ROWS = tl.constexpr(128)  # of a step, that a block looks at together
_OF_SQUARES, _OF_STATES = tl.constexpr("tf32x3"), tl.constexpr("tf32")
_LEVELS = tl.constexpr(CHUNK.bit_length() - 1)


def apply_delta_rule_in_chunks(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    matrices: Tensor,
    rounded: Rounded | None,
    places: Tensor,
    bounds: Tensor,
    copies: Tensor,
    *,
    tiled: bool = False,
) -> Tensor:
    """As `states.apply_delta_rule`, up to the order of sums. The host decides nothing but by shapes."""
    n, rows = len(qkv), len(places)
    given = qkv, g, beta, matrices, rounded, places, bounds, copies
    if n < CHUNK or n == rows or rounded is not None:  # n == rows: decodes
        return apply_delta_rule(*given, tiled=tiled)
    outputs = apply_delta_rule(*given, tiled=tiled, most=CHUNK - 1)
    key_heads, (heads, key_dim, value_dim) = key_heads_of(qkv, g, beta, matrices), matrices.shape[1:]
    sizes = {
        "EACH": heads // key_heads,
        "RUN": 1 if tiled else heads // key_heads,
        "KEYS": max(16, triton.next_power_of_2(key_dim)),
        "CHUNK": CHUNK,
        "num_warps": 4,
        "num_stages": 1,
    }
    chunks = triton.cdiv(n, CHUNK) + min(rows, n // CHUNK)  # of each row the last one may be short
    squares = torch.empty((chunks, heads, 2, CHUNK, CHUNK), dtype=torch.float32, device=qkv.device)
    _square[(chunks, heads)](qkv, g, beta, squares, bounds, rows, key_heads, key_dim, value_dim, **sizes)
    _follow[(rows, heads, triton.cdiv(value_dim, _VALUES))](
        qkv, g, beta, squares, matrices, outputs, places, bounds, copies,
        key_heads, key_dim, value_dim, VALUES=_VALUES, **sizes,
    )  # fmt: skip
    return outputs


@triton.jit
def _chunks_of_rows(bounds, row, rows, CHUNK: tl.constexpr):
    """How many each of these rows has; none beyond the last row."""
    first = tl.load(bounds + row, mask=row < rows, other=0)
    n = tl.load(bounds + row + 1, mask=row < rows, other=0) - first
    return tl.where(n >= CHUNK, (n + CHUNK - 1) // CHUNK, 0)


@triton.jit
def _chunks_before(bounds, row, CHUNK: tl.constexpr):
    """How many the rows before this one have."""
    before = 0
    for start in range(0, row, _ROWS):
        before += tl.sum(_chunks_of_rows(bounds, start + tl.arange(0, _ROWS), row, CHUNK), 0)
    return before


@triton.jit
def _row_of(chunk, bounds, rows, CHUNK: tl.constexpr):
    """The row that has a chunk, or the number of rows."""
    row, before = 0, 0
    for start in range(0, rows, _ROWS):
        some = start + tl.arange(0, _ROWS)
        of_rows = _chunks_of_rows(bounds, some, rows, CHUNK)
        passed = (some < rows) & (before + tl.cumsum(of_rows, 0) <= chunk)
        row += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(of_rows, 0)
    return row


@triton.jit
def _read(qkv, t, channels, at, used):
    """A chunk's positions at some channels: zeros beyond the row's end."""
    return tl.load(qkv + (t.to(tl.int64) * channels)[:, None] + at[None, :], mask=used, other=0.0)


@triton.jit
def _fading(total, earlier):
    """exp(G_i - G_j), or 0 unless j is earlier."""
    return tl.exp(tl.where(earlier, total[:, None] - total[None, :], float("-inf")))


@triton.jit(do_not_specialize=["rows"])
def _square(
    qkv,
    g,
    beta,
    squares,
    bounds,
    rows,
    key_heads,
    key_dim,
    value_dim,
    EACH: tl.constexpr,
    RUN: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """1 / (1 + A) and P of a chunk. The inverses of blocks on the diagonal are joined in pairs:

    1 / (a 0)  =  (     1/a       0 )
        (b c)     (-1/c b 1/a   1/c )
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    heads = key_heads * EACH
    channels, of_keys = (2 * key_dim + EACH * value_dim) * key_heads, key_heads * key_dim
    row = _row_of(chunk, bounds, rows, CHUNK)
    if row >= rows:
        return
    before = _chunks_before(bounds, row, CHUNK)
    first, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    i = tl.arange(0, CHUNK)
    t = first + (chunk - before) * CHUNK + i
    of_row = t < end
    position = t.to(tl.int64) * heads + head
    total = tl.cumsum(tl.load(g + position, mask=of_row, other=0.0), 0)
    share = tl.load(beta + position, mask=of_row, other=0.0)
    a, found = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for begin in range(0, KEYS, _KEYS):
        key = begin + tl.arange(0, _KEYS)
        used = of_row[:, None] & (key < key_dim)[None, :]
        at = head // RUN % key_heads * key_dim + key
        names = _read(qkv, t, channels, of_keys + at, used)
        asked = _read(qkv, t, channels, at, used)
        a += tl.dot(names, tl.trans(names), input_precision=_OF_SQUARES)
        found += tl.dot(asked, tl.trans(names), input_precision=_OF_SQUARES)
    a *= share[:, None] * _fading(total, i[:, None] > i[None, :])
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for level in tl.static_range(_LEVELS):  # blocks of 1, 2, 4, ... positions
        of_i, of_j = i[:, None] >> level, i[None, :] >> level
        b = tl.where((of_i % 2 == 1) & (of_j == of_i - 1), a, 0.0)
        joined = tl.dot(inverse, b, input_precision=_OF_SQUARES)
        inverse -= tl.dot(joined, inverse, input_precision=_OF_SQUARES)
    at = squares + (chunk.to(tl.int64) * heads + head) * 2 * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    tl.store(at, inverse)
    tl.store(at + CHUNK * CHUNK, found * _fading(total, i[:, None] >= i[None, :]))


@triton.jit
def _follow(
    qkv,
    g,
    beta,
    squares,
    matrices,
    outputs,
    places,
    bounds,
    copies,
    key_heads,
    key_dim,
    value_dim,
    VALUES: tl.constexpr,
    EACH: tl.constexpr,
    RUN: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    heads = key_heads * EACH
    first, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    if end - first < CHUNK:
        return
    chunk = _chunks_before(bounds, row, CHUNK)
    channels, of_keys = (2 * key_dim + EACH * value_dim) * key_heads, key_heads * key_dim
    i, key, value = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    of_key, of_value = key < key_dim, value < value_dim
    used = of_key[:, None] & of_value[None, :]
    at = key[:, None] * value_dim + value[None, :]
    own = matrices + (tl.load(places + row).to(tl.int64) * heads + head) * key_dim * value_dim + at
    stored = tl.load(own, mask=used, other=0.0)
    for start in range(first, end, CHUNK):
        t = start + i
        of_row = t < end
        known, shown = of_row[:, None] & of_key[None, :], of_row[:, None] & of_value[None, :]
        names = _read(qkv, t, channels, of_keys + head // RUN % key_heads * key_dim + key, known)
        asked = _read(qkv, t, channels, head // RUN % key_heads * key_dim + key, known)
        wanted = _read(qkv, t, channels, 2 * of_keys + head * value_dim + value, shown)
        position = t.to(tl.int64) * heads + head
        total = tl.cumsum(tl.load(g + position, mask=of_row, other=0.0), 0)
        share = tl.load(beta + position, mask=of_row, other=0.0)
        kept = tl.exp(total)[:, None]
        missing = share[:, None] * (wanted - kept * tl.dot(names, stored, input_precision=_OF_STATES))
        square = (
            squares + (chunk.to(tl.int64) * heads + head) * 2 * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
        )
        change = tl.dot(tl.load(square), missing, input_precision=_OF_STATES)
        found = kept * tl.dot(asked, stored, input_precision=_OF_STATES)
        found += tl.dot(tl.load(square + CHUNK * CHUNK), change, input_precision=_OF_STATES)
        tl.store(outputs + position[:, None] * value_dim + value[None, :], found, mask=shown)
        if tl.max(tl.load(copies + t, mask=of_row, other=-1), 0) >= 0:
            for after in range(start, tl.minimum(start + CHUNK, end)):
                copy = tl.load(copies + after).to(tl.int64)
                if copy >= 0:
                    now = _advanced(stored, names, change, total, t, after)
                    to = matrices + (copy * heads + head) * key_dim * value_dim + at
                    tl.store(to, now, mask=used)
        stored = _advanced(stored, names, change, total, t, start + CHUNK - 1)
        chunk += 1
    tl.store(own, stored, mask=used)


@triton.jit
def _advanced(stored, names, change, total, t, last):
    """S after position `last` of a chunk."""
    reached = tl.sum(tl.where(t == last, total, 0.0), 0)
    left = tl.exp(tl.where(t <= last, reached - total, float("-inf")))
    changes = tl.dot(tl.trans(names * left[:, None]), change, input_precision=_OF_STATES)
    return tl.exp(reached) * stored + changes

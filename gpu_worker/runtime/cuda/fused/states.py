"""What layers with a state do beside their products, in three launches, on CUDA.

Each row of a step is followed from position to position, as it was and will be in other steps: a sequence gets the
same numbers wherever it is cut, and prefills and decodes compute alike. Threads divide channels, heads and
dimensions of values, which know nothing of each other.

The rows of a step lie one after the other among its T positions: row i has those from bounds[i] to bounds[i + 1].
`places`, [B], has the place of each row's state, `copies`, [T], the place to which the state after a position is
copied, or -1. These, like `bounds`, are int32.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.parts.recurrent.states import RUN, Rounded

_CHANNELS = 256
_VALUES = RUN  # dimensions of a head's values that a block follows


def convolve(
    x: Tensor,
    kernel: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    places: Tensor,
    bounds: Tensor,
    of: Tensor,
    copies: Tensor,
) -> Tensor:
    """float32 [T, channels]: a causal convolution of each channel over the stored inputs and x; then stores the
    last inputs of each row.

    x: [T, channels], of any row stride; kernel: [channels, width]; bias: [channels]; inputs: [places, width - 1,
    channels], contiguous; of: int32 [T], the index of each position's row.
    """
    n, channels = x.shape
    width = kernel.shape[1]
    if inputs.shape[1:] != (width - 1, channels) or len(kernel) != channels or x.stride(1) != 1:
        shapes = ", ".join(str(list(each.shape)) for each in (x, kernel, inputs))
        raise ValueError(f"inputs, kernel and stored inputs of a convolution: must fit, got {shapes}")
    assert inputs.is_contiguous()
    assert kernel.is_contiguous()
    mixed = torch.empty((n, channels), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(channels, _CHANNELS)
    sizes = {"WIDTH": width, "BLOCK": _CHANNELS, "num_warps": 4}
    _convolve[(n, blocks)](
        x, kernel, x if bias is None else bias, inputs, mixed, places, bounds, of, copies, channels, x.stride(0),
        BIASED=bias is not None, **sizes,
    )  # fmt: skip
    if width > 1:
        _store_inputs[(len(places), blocks)](x, inputs, places, bounds, channels, x.stride(0), **sizes)
    return mixed


@triton.jit
def _input(x, stored, t, back, first, x_row, channels, channel, used, WIDTH: tl.constexpr):
    """The input `back` positions before t: of the step, or stored."""
    since = t - first
    of_step = tl.where(since >= back, channels, 0)  # as many channels are read there
    own = tl.load(x + (t - back).to(tl.int64) * x_row + channel, mask=channel < of_step, other=0.0)
    at = (WIDTH - 1 + since - back).to(tl.int64) * channels
    behind = (channel >= of_step) & used
    return tl.where(behind, tl.load(stored + at + channel, mask=behind, other=0.0), own)


@triton.jit
def _convolve(
    x,
    kernel,
    bias,
    inputs,
    mixed,
    places,
    bounds,
    of,
    copies,
    channels,
    x_row,
    BIASED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = channel < channels
    row = tl.load(of + t)
    first, size = tl.load(bounds + row), (WIDTH - 1) * channels
    stored = inputs + tl.load(places + row).to(tl.int64) * size
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(WIDTH):
        value = _input(x, stored, t, WIDTH - 1 - k, first, x_row, channels, channel, used, WIDTH)
        weight = tl.load(kernel + channel * WIDTH + k, mask=used, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * weight
    if BIASED:
        total += tl.load(bias + channel, mask=used, other=0.0).to(tl.float32)
    tl.store(mixed + t.to(tl.int64) * channels + channel, total, mask=used)
    copy = tl.load(copies + t).to(tl.int64)
    if copy >= 0:
        for k in tl.static_range(WIDTH - 1):
            value = _input(x, stored, t, WIDTH - 2 - k, first, x_row, channels, channel, used, WIDTH)
            tl.store(inputs + copy * size + k * channels + channel, value, mask=used)


@triton.jit
def _store_inputs(x, inputs, places, bounds, channels, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Each is read before another one takes its place: later ones move to earlier places."""
    row, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = channel < channels
    first, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    stored = inputs + tl.load(places + row).to(tl.int64) * (WIDTH - 1) * channels
    if end > first:
        for k in tl.static_range(WIDTH - 1):
            value = _input(x, stored, end - 1, WIDTH - 2 - k, first, x_row, channels, channel, used, WIDTH)
            tl.store(stored + k * channels + channel, value, mask=used)


def apply_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    matrices: Tensor,
    rounded: Rounded | None,
    places: Tensor,
    bounds: Tensor,
    copies: Tensor,
    *,
    most: int = 2**31 - 1,
) -> Tensor:
    """`delta_rule`, position by position: float32 [T, value_heads, value_dim]; advances the matrices of the rows.
    Rows of more than `most` positions are left out: their outputs are anything.

    q, k: float32 [T, key_heads, key_dim]; v: float32 [T, value_heads, value_dim]; g, beta: float32 [T,
    value_heads]; matrices: float32 [places, value_heads, key_dim, value_dim], contiguous; rounded: see
    `LayerState`.
    """
    (key_heads, key_dim), (value_heads, value_dim) = q.shape[1:], v.shape[1:]
    if k.shape != q.shape or matrices.shape[1:] != (value_heads, key_dim, value_dim) or value_heads % key_heads:
        shapes = ", ".join(str(list(each.shape)) for each in (q, k, v, matrices))
        raise ValueError(f"queries, keys, values and matrices: must fit, got {shapes}")
    q, k, v, g, beta = (part.contiguous() for part in (q, k, v, g, beta))
    assert matrices.is_contiguous()
    outputs = torch.empty_like(v)
    codes, scales = (matrices, matrices) if rounded is None else (rounded.codes, rounded.scales)
    _apply_delta_rule[(len(places), value_heads, triton.cdiv(value_dim, _VALUES))](
        q, k, v, g, beta, matrices, codes, scales, outputs, places, bounds, copies,
        len(matrices), key_heads, key_dim, value_dim, most,
        ROUNDED=rounded is not None, EACH=value_heads // key_heads, KEYS=triton.next_power_of_2(key_dim),
        VALUES=_VALUES, num_warps=4 if rounded is None else 8,
    )  # fmt: skip
    return outputs


@triton.jit
def _apply_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    matrices,
    codes,
    scales,
    outputs,
    places,
    bounds,
    copies,
    n_places,
    key_heads,
    key_dim,
    value_dim,
    most,
    ROUNDED: tl.constexpr,
    EACH: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    heads = key_heads * EACH
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    of_key, of_value = key < key_dim, value < value_dim
    used = of_key[:, None] & of_value[None, :]
    size = key_dim * value_dim
    at = key[:, None] * value_dim + value[None, :]
    first, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    if end - first > most:
        return
    own = matrices + (tl.load(places + row).to(tl.int64) * heads + head) * size + at
    stored = tl.load(own, mask=used, other=0.0)
    for t in range(first, end):
        position = tl.cast(t, tl.int64) * heads + head
        shared = (tl.cast(t, tl.int64) * key_heads + head // EACH) * key_dim
        asked = tl.load(q + shared + key, mask=of_key, other=0.0)
        name = tl.load(k + shared + key, mask=of_key, other=0.0)
        wanted = tl.load(v + position * value_dim + value, mask=of_value, other=0.0)
        stored *= tl.exp(tl.load(g + position))
        change = tl.load(beta + position) * (wanted - tl.sum(name[:, None] * stored, 0))
        stored += name[:, None] * change[None, :]
        tl.store(outputs + position * value_dim + value, tl.sum(asked[:, None] * stored, 0), mask=of_value)
        copy = tl.load(copies + t).to(tl.int64)
        if copy >= 0:
            if ROUNDED:
                to = ((copy - n_places) * heads + head) * size
                scale = tl.max(tl.abs(stored), 1) / 127.0
                code = tl.floor(stored / tl.maximum(scale, 1e-37)[:, None] + 0.5)
                tl.store(codes + to + at, code.to(tl.int8), mask=used)
                run = to // VALUES + key * (value_dim // VALUES) + tl.program_id(2)
                tl.store(scales + run, scale, mask=of_key)
            else:
                tl.store(matrices + (copy * heads + head) * size + at, stored, mask=used)
    if end > first:
        tl.store(own, stored, mask=used)

"""What layers with a state do between their products, but for the last norm, on CUDA: a short convolution in one
launch, a delta net in two.

Each row of a step is followed from position to position, as it was and will be in other steps: a sequence gets the
same numbers wherever it is cut, and prefills and decodes compute alike. Threads divide channels, heads and
dimensions of values, which know nothing of each other.

The rows of a step lie one after the other among its T positions: row i has those from bounds[i] to bounds[i + 1].
`places`, [B], has the place of each row's state, `of`, [T], the index of each position's row, `copies`, [T], the
place to which the state after a position is copied, or -1. These, like `bounds`, are int32. Results at
positions behind the last row are anything.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.models.parts.recurrent.delta_inputs import EPS, DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.states import RUN, Rounded
from petiole.gpu_worker.models.plan import DeltaNet

_CHANNELS = 256
_VALUES = RUN  # dimensions of a head's values that a block follows
_EPS = tl.constexpr(EPS)


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
    channels], contiguous.
    """
    n, channels = x.shape
    _check_convolution(x, channels, kernel, inputs)
    mixed = torch.empty((n, channels), dtype=torch.float32, device=x.device)
    _convolve[(n, triton.cdiv(channels, _CHANNELS))](
        x, kernel, x if bias is None else bias, inputs, mixed, places, bounds, of, copies, channels, x.stride(0),
        BIASED=bias is not None, WIDTH=kernel.shape[1], BLOCK=_CHANNELS, num_warps=4,
    )  # fmt: skip
    return mixed


def prepare(
    plan: DeltaNet,
    weights: DeltaNetWeights,
    projected: Tensor,
    gates: Tensor,
    inputs: Tensor,
    places: Tensor,
    bounds: Tensor,
    of: Tensor,
    copies: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """What the delta rule reads: queries, keys and values one after the other, float32 [T, channels]; g and beta,
    float32 [T, value_heads] each. See `delta_inputs.rule_heads` and `rule_gates`. The convolution reads and then
    replaces the stored inputs, as in `convolve`.

    projected: [T, outputs of the projection of the inputs]; gates: [T, 2 * value_heads]; of any row stride.
    """
    n, heads, parts = len(projected), plan.value_heads, plan.parts
    _check_convolution(projected, plan.channels, weights.convolution, inputs)
    if projected.shape[1] != sum(plan.input_sizes) or gates.shape != (n, 2 * heads):
        shapes = ", ".join(str(list(each.shape)) for each in (projected, gates))
        raise ValueError(f"projected inputs and gates of a delta net: must fit, got {shapes}")
    assert gates.stride(1) == 1
    qkv = torch.empty((n, plan.channels), dtype=torch.float32, device=projected.device)
    g, beta = (torch.empty((n, heads), dtype=torch.float32, device=projected.device) for _ in range(2))
    _prepare[(n, 2 * plan.key_heads + heads + 1)](
        projected, gates, weights.convolution, weights.fading, weights.bias, inputs, qkv, g, beta,
        places, bounds, of, copies, plan.channels, projected.stride(0), gates.stride(0),
        parts["queries"].first, parts["keys"].first, parts["values"].first, parts["a"].first,
        parts["keys"].apart, parts["values"].apart, parts["a"].apart,
        plan.key_heads, plan.key_dim, plan.value_dim, plan.key_dim**-0.5,
        EACH=plan.each, WIDTH=plan.kernel, num_warps=1,
        BLOCK=triton.next_power_of_2(max(plan.key_dim, plan.value_dim)),
    )  # fmt: skip
    return qkv, g, beta


def _check_convolution(x: Tensor, channels: int, kernel: Tensor, inputs: Tensor) -> None:
    if inputs.shape[1:] != (kernel.shape[1] - 1, channels) or len(kernel) != channels or x.stride(1) != 1:
        shapes = ", ".join(str(list(each.shape)) for each in (x, kernel, inputs))
        raise ValueError(f"inputs, kernel and stored inputs of a convolution: must fit, got {shapes}")
    assert inputs.is_contiguous()
    assert kernel.is_contiguous()


@triton.jit
def _row_of(t, of, bounds, places, inputs, channels, WIDTH: tl.constexpr):
    """From where to where the row of a position goes, and where its stored inputs lie."""
    row = tl.load(of + t)
    stored = inputs + tl.load(places + row).to(tl.int64) * (WIDTH - 1) * channels
    return tl.load(bounds + row), tl.load(bounds + row + 1), stored


@triton.jit
def _end_of_block(t, first, end, WIDTH: tl.constexpr):
    """Block t computes the positions from t to here, of a row that has those from first to end.

    Only the first WIDTH - 1 positions of a row read its stored inputs. One block computes all of these and then
    stores the row's last inputs, so no other block reads what it overwrites.
    """
    begins = tl.where(t == first, first + WIDTH - 1, t)
    return tl.minimum(tl.where(t - first >= WIDTH - 1, t + 1, begins), end)


@triton.jit
def _input(x, stored, t, back, first, x_row, column, channels, channel, used, WIDTH: tl.constexpr):
    """The input `back` positions before t: of the step, or stored. Channels are columns of x."""
    since = t - first
    of_step, behind = tl.where(used, since, -1) >= back, tl.where(used, since, back) < back
    own = tl.load(x + tl.cast(t - back, tl.int64) * x_row + column, mask=of_step, other=0.0)
    at = (WIDTH - 1 + since - back).to(tl.int64) * channels
    return tl.where(behind, tl.load(stored + at + channel, mask=behind, other=0.0), own)


@triton.jit
def _convolved(x, kernel, stored, t, first, x_row, column, channels, channel, used, WIDTH: tl.constexpr):
    total = tl.zeros(channel.shape, tl.float32)
    for k in tl.static_range(WIDTH):
        value = _input(x, stored, t, WIDTH - 1 - k, first, x_row, column, channels, channel, used, WIDTH)
        weight = tl.load(kernel + channel * WIDTH + k, mask=used, other=0.0).to(tl.float32)
        total += value.to(tl.float32) * weight
    return total


@triton.jit
def _put_inputs(to, x, stored, t, first, x_row, column, channels, channel, used, WIDTH: tl.constexpr):
    """Put the last inputs after position t to `to`, which may be `stored`: inputs move to earlier places, so each
    is read before another one takes its place."""
    for k in tl.static_range(WIDTH - 1):
        value = _input(x, stored, t, WIDTH - 2 - k, first, x_row, column, channels, channel, used, WIDTH)
        tl.store(to + k * channels + channel, value, mask=used)


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
    block, channel = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = channel < channels
    first, end, stored = _row_of(block, of, bounds, places, inputs, channels, WIDTH)
    for t in range(block, _end_of_block(block, first, end, WIDTH)):
        copy = tl.load(copies + t).to(tl.int64)
        total = _convolved(x, kernel, stored, t, first, x_row, channel, channels, channel, used, WIDTH)
        if BIASED:
            total += tl.load(bias + channel, mask=used, other=0.0).to(tl.float32)
        tl.store(mixed + tl.cast(t, tl.int64) * channels + channel, total, mask=used)
        if copy >= 0:
            to = inputs + copy * (WIDTH - 1) * channels
            _put_inputs(to, x, stored, t, first, x_row, channel, channels, channel, used, WIDTH)
    if (block == first) & (first < end):
        _put_inputs(stored, x, stored, end - 1, first, x_row, channel, channels, channel, used, WIDTH)


@triton.jit
def _prepare(
    x,
    gates,
    kernel,
    fading,
    bias,
    inputs,
    qkv,
    g,
    beta,
    places,
    bounds,
    of,
    copies,
    channels,
    x_row,
    gates_row,
    queries,
    keys,
    values,
    a,
    keys_apart,
    values_apart,
    gates_apart,
    key_heads,
    key_dim,
    value_dim,
    scale,
    EACH: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block computes one head of queries, keys or values; the block behind the last head computes the gates."""
    block, head, lane = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    value_head, value_heads = head - 2 * key_heads, key_heads * EACH
    if value_head == value_heads:
        position = block.to(tl.int64) * value_heads
        of_position = gates + block.to(tl.int64) * gates_row
        _prepare_gates(
            of_position, fading, bias, g + position, beta + position, value_heads, a, gates_apart, EACH, BLOCK
        )
    else:
        of_queries, of_keys = head < key_heads, value_head < 0
        used = lane < tl.where(of_keys, key_dim, value_dim)
        of_values = values + value_head // EACH * values_apart + value_head % EACH * value_dim
        column = tl.where(of_queries, queries + head * keys_apart, keys + (head - key_heads) * keys_apart)
        column = tl.where(of_keys, column, of_values) + lane
        channel = tl.where(of_keys, head * key_dim, 2 * key_heads * key_dim + value_head * value_dim) + lane
        first, end, stored = _row_of(block, of, bounds, places, inputs, channels, WIDTH)
        for t in range(block, _end_of_block(block, first, end, WIDTH)):
            copy = tl.load(copies + t).to(tl.int64)
            total = _convolved(x, kernel, stored, t, first, x_row, column, channels, channel, used, WIDTH)
            total = total / (1.0 + tl.exp(-total))
            total *= tl.where(of_keys, tl.rsqrt(tl.sum(total * total, 0) + _EPS), 1.0)
            total *= tl.where(of_queries, scale, 1.0)
            tl.store(qkv + tl.cast(t, tl.int64) * channels + channel, total, mask=used)
            if copy >= 0:
                to = inputs + copy * (WIDTH - 1) * channels
                _put_inputs(to, x, stored, t, first, x_row, column, channels, channel, used, WIDTH)
        if (block == first) & (first < end):
            _put_inputs(stored, x, stored, end - 1, first, x_row, column, channels, channel, used, WIDTH)


@triton.jit
def _prepare_gates(gates, fading, bias, g, beta, heads, a, apart, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """g and beta of one position. a: where the a of the first head of keys begins; b begins at 0."""
    for start in range(0, heads, BLOCK):
        head = start + tl.arange(0, BLOCK)
        used = head < heads
        column = head // EACH * apart + head % EACH
        b = tl.load(gates + column, mask=used, other=0.0).to(tl.float32)
        tl.store(beta + head, 1.0 / (1.0 + tl.exp(-b)), mask=used)
        decay = tl.load(gates + a + column, mask=used, other=0.0).to(tl.float32)
        decay += tl.load(bias + head, mask=used, other=0.0)
        tl.store(g + head, tl.load(fading + head, mask=used, other=0.0) * _softplus(decay), mask=used)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)). What the sum with 1 rounds away is divided out, so that small results are exact, too."""
    e = tl.exp(-tl.abs(x))
    total = 1.0 + e
    kept = tl.where(total == 1.0, 1.0, total - 1.0)
    return tl.maximum(x, 0.0) + tl.where(total == 1.0, e, tl.log(total) * (e / kept))


def apply_delta_rule(
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
    most: int = 2**31 - 1,
) -> Tensor:
    """`delta_rule`, position by position: float32 [T, value_heads, value_dim]; advances the matrices of the rows.
    Rows of more than `most` positions are left out: their outputs are anything. tiled: see `DeltaNet`.

    qkv, g, beta: see `prepare`, contiguous; matrices: float32 [places, value_heads, key_dim, value_dim],
    contiguous; rounded: see `LayerState`.
    """
    key_heads = key_heads_of(qkv, g, beta, matrices)
    value_heads, key_dim, value_dim = matrices.shape[1:]
    outputs = torch.empty((len(qkv), value_heads, value_dim), dtype=torch.float32, device=qkv.device)
    codes, scales = (matrices, matrices) if rounded is None else (rounded.codes, rounded.scales)
    _apply_delta_rule[(len(places), value_heads, triton.cdiv(value_dim, _VALUES))](
        qkv, g, beta, matrices, codes, scales, outputs, places, bounds, copies,
        len(matrices), key_heads, key_dim, value_dim, most,
        ROUNDED=rounded is not None, EACH=value_heads // key_heads, RUN=1 if tiled else value_heads // key_heads,
        KEYS=triton.next_power_of_2(key_dim), VALUES=_VALUES, num_warps=4 if rounded is None else 8,
    )  # fmt: skip
    return outputs


def key_heads_of(qkv: Tensor, g: Tensor, beta: Tensor, matrices: Tensor) -> int:
    """How many heads of keys there are, if all these are the inputs of one delta rule."""
    value_heads, key_dim, value_dim = matrices.shape[1:]
    key_heads, left = divmod(qkv.shape[1] - value_heads * value_dim, 2 * key_dim)
    fit = key_heads > 0 and left == 0 and value_heads % key_heads == 0
    if not fit or not g.shape == beta.shape == (len(qkv), value_heads):
        shapes = ", ".join(str(list(each.shape)) for each in (qkv, g, beta, matrices))
        raise ValueError(f"queries, keys and values, gates and matrices: must fit, got {shapes}")
    assert all(part.is_contiguous() for part in (qkv, g, beta, matrices))
    return key_heads


@triton.jit
def _apply_delta_rule(
    qkv,
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
    RUN: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    heads = key_heads * EACH
    key, value = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    of_key, of_value = key < key_dim, value < value_dim
    used = of_key[:, None] & of_value[None, :]
    channels, of_keys = (2 * key_dim + EACH * value_dim) * key_heads, key_heads * key_dim
    size = key_dim * value_dim
    at = key[:, None] * value_dim + value[None, :]
    first, end = tl.load(bounds + row), tl.load(bounds + row + 1)
    if end - first > most:
        return
    own = matrices + (tl.load(places + row).to(tl.int64) * heads + head) * size + at
    stored = tl.load(own, mask=used, other=0.0)
    queries, values = qkv + head // RUN % key_heads * key_dim, qkv + 2 * of_keys + head * value_dim
    for t in range(first, end):
        position = tl.cast(t, tl.int64) * heads + head
        of_position = tl.cast(t, tl.int64) * channels
        asked = tl.load(queries + of_position + key, mask=of_key, other=0.0)
        name = tl.load(queries + of_keys + of_position + key, mask=of_key, other=0.0)
        wanted = tl.load(values + of_position + value, mask=of_value, other=0.0)
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

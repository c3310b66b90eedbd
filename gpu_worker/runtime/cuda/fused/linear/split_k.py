"""The linear layers of a decode step of up to 64 rows, with the norms and activations around them, for most
families.

Beside `linear.decode`, whose norms are one factor of a product, one more small kernel a norm computes what stands
between two products. So it computes each kind of norm as torch does, also those behind a product; and products
that are added to the residual may be cut along their inputs, because that kernel adds their parts:

    norm ─► qkv ─► attention ─► out, in shares ─► add, norm ─► gate, up, act · mul ─► down, in shares ─► add, norm

    add, norm; a block a row: y = the sum of the shares, + biases;  y = norm behind the product(y), if there is one
                              residual = scalar * (residual + factor * y)
                              inputs of the next products = next norms(residual)

Of parallel branches, both products leave their shares to one such kernel. While it runs, the programs of the next
product are there already (programmatic dependent launch) and have asked for their first weights.

Each program reads all rows. With 64 rows it would read more bytes of rows than of weights if it computed few
outputs of all inputs, so it computes more outputs of fewer inputs.

How a product is cut depends on its sizes alone, so a row's sums are in float32, in an order that depends on no
other row.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import FeedForward, Norm
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear
from petiole.gpu_worker.models.weights.stacked import outputs_of
from petiole.gpu_worker.runtime.cuda.fused.layers import has_small_memory, overlapped
from petiole.gpu_worker.runtime.cuda.fused.linear import coded, dense
from petiole.gpu_worker.runtime.cuda.fused.linear.decode import Block
from petiole.gpu_worker.runtime.cuda.supported import tried

FEW_ROWS, MOST_ROWS = 16, 64
"""Rows are padded to one of these, and a row's bits are the same beside any others up to it."""


class ProductBlocks(NamedTuple):
    """What programs compute at a time: `wide` in products that write their results, or `narrow` if these have few
    outputs; `deep` in products that leave shares."""

    wide: Block
    narrow: Block
    deep: Block


_NARROW = Block(64, 128, 3, 4, 512)

BLOCKS: dict[str, ProductBlocks] = {
    "64 outputs": ProductBlocks(_NARROW, _NARROW, _NARROW),
    "128 outputs": ProductBlocks(Block(128, 64, 4, 4, 512), _NARROW, Block(128, 64, 4, 4, 512)),
    "128 by 128": ProductBlocks(Block(128, 128, 3, 8, 512), _NARROW, Block(128, 128, 3, 8, 512)),
    "256 outputs": ProductBlocks(Block(256, 64, 4, 8, 256), _NARROW, Block(128, 64, 4, 4, 512)),
    "small": ProductBlocks(*[Block(64, 64, 5, 4, 256)] * 3),
}
"""Candidates, which no card has timed: `bench.gpu --only layers` measures them. Two blocks of up to 113 KiB, of
one kernel and of the next, lie in a multiprocessor's shared memory together. "small" fits into the 99 KiB of a
block on cards of the compute capabilities 8.6 and 8.9."""

PROGRAMS, MOST_SHARES, LEAST_INPUTS = 64, 8, 256
"""A product has at least so many programs if it can: its blocks are narrow, or there are more shares, of at least
so many inputs."""

_LEAST = 64
"""The outputs and the inputs of the smallest block. With fewer outputs, the tensor cores' instructions for warp
groups do not fit."""


def blocks_for(device: torch.device) -> ProductBlocks:
    return BLOCKS["small" if has_small_memory(device) else "128 outputs"]


def fits(decoder: Decoder) -> bool:
    """Whether `forward` can compute this model: bfloat16, with weights in whole blocks. Parallel branches have no
    norms behind them."""
    layers = [*zip(decoder.plan.layers, decoder.layers, strict=True)]
    return (
        decoder.dtype == torch.bfloat16
        and not any(
            plan.parallel and (plan.mixer_out_norm or plan.feed_forward_out_norm) is not None for plan, _ in layers
        )
        and all(
            in_whole_blocks(linear)
            for _, layer in layers
            for linear in (layer.attention.qkv, layer.attention.out, layer.dense.gate_up, layer.dense.down)
        )
    )


def in_whole_blocks(linear: Linear) -> bool:
    if not isinstance(linear, DenseLinear):
        return tried("codes") and coded.weight_of(linear) is not None and outputs_of(linear) % _LEAST == 0
    weight = linear.weight
    return weight.is_contiguous() and weight.shape[0] % _LEAST == weight.shape[1] % _LEAST == 0


@dataclass(frozen=True, slots=True)
class FusedNorm:
    """A norm with its weights, as in `parts.norms`."""

    plan: Norm
    weights: NormWeights


@dataclass(frozen=True, slots=True)
class Shares:
    """What is to be added to the residual: the sum of `sums`, float32 [shares, T, hidden], and of the biases of at
    most two products, behind a norm if there is one, times `factor`. scalar: [1], a factor of the sum."""

    sums: Tensor
    biases: tuple[Tensor, ...]
    factor: float = 1.0
    norm: FusedNorm | None = None
    scalar: Tensor | None = None


def forward(decoder: Decoder, hidden: Tensor, step: Forward, blocks: ProductBlocks | None = None) -> Tensor:
    """See `Decoder.forward`: at most `MOST_ROWS` rows, of a model that `fits`, without adapters."""
    hidden = decoder.first_inputs(hidden, step)
    blocks = blocks_for(hidden.device) if blocks is None else blocks
    layers = [*zip(decoder.plan.layers, decoder.layers, strict=True)]
    mixing = [_known(plan.mixer_norm, layer.mixer_norm) for plan, layer in layers]
    feeding = [_known(plan.feed_forward_norm, layer.feed_forward_norm) for plan, layer in layers]
    x, y = add_norm(hidden, None, *_first_norms(decoder, 0, mixing, feeding))
    for i, (plan, layer) in enumerate(layers):
        mixed = decoder.attend(i, product(x, layer.attention.qkv, blocks), step)
        to_add: list[tuple[Tensor, Linear]] = [(mixed, layer.attention.out)]
        if not plan.parallel:
            norm = _known(plan.mixer_out_norm, layer.mixer_out_norm)
            y, _ = add_norm(hidden, shares(to_add, blocks, plan.residual, norm), feeding[i])
            to_add = []
        to_add.append((product(y, layer.dense.gate_up, blocks, plan.dense), layer.dense.down))
        norm = _known(plan.feed_forward_out_norm, layer.feed_forward_out_norm)
        added = replace(shares(to_add, blocks, plan.residual, norm), scalar=layer.scalar)
        x, y = add_norm(hidden, added, *_first_norms(decoder, i + 1, mixing, feeding))
    return hidden


def _known(plan: Norm | None, weights: NormWeights | None) -> FusedNorm | None:
    """As in torch, a norm without its weights' place computes nothing."""
    return None if plan is None or weights is None else FusedNorm(plan, weights)


def _first_norms(
    decoder: Decoder, i: int, mixing: list[FusedNorm | None], feeding: list[FusedNorm | None]
) -> tuple[FusedNorm | None, FusedNorm | None]:
    """The norms of what layer i reads at its beginning: of its mixer, and of a feed-forward in parallel that has
    its own. None after the last layer."""
    if i == len(mixing):
        return None, None
    return mixing[i], feeding[i] if decoder.plan.layers[i].parallel else None


def product(x: Tensor, linear: Linear, blocks: ProductBlocks, activation: FeedForward | None = None) -> Tensor:
    """linear(x), [T, in] -> [T, out], with T up to `MOST_ROWS`; then what stands between a feed-forward's two
    products, if `activation` is one."""
    outputs, codes = outputs_of(linear), coded.weight_of(linear)
    gated = activation is not None and activation.gated
    y = x.new_empty((len(x), outputs // 2 if gated else outputs))
    act = "none" if activation is None else activation.activation
    if codes is not None:
        coded.launch(coded.block_for(len(x), outputs), x, *codes, y, activation=act, gated=gated)
        return y
    _launch(_wide(linear, blocks), 1, x, _dense(linear), y, 0, act, gated)
    return y


def write_logits(
    x: Tensor, head: DenseLinear, logits: Tensor, tokens: Tensor, blocks: ProductBlocks | None = None
) -> None:
    """logits = head(x), [T, out], and tokens, int64 [T], the likeliest of each row, the lowest of equal ones.
    The head `writes` this many rows."""
    block = _wide(head, blocks_for(x.device) if blocks is None else blocks)
    programs = head.weight.shape[0] // block.outputs
    best = torch.empty((len(x), programs), dtype=torch.float32, device=x.device)
    owners = torch.empty_like(best, dtype=torch.int32)
    _launch(block, 1, x, head, logits, 0, "none", gated=False, best=(best, owners))
    _likeliest[(len(x),)](
        best,
        owners,
        tokens,
        programs,
        head.weight.shape[0],
        PROGRAMS=triton.next_power_of_2(programs),
        num_warps=4,
        **overlapped(x),
    )


def writes(head: Linear, n: int) -> bool:
    """Whether `write_logits` computes this head for n rows."""
    return isinstance(head, DenseLinear) and n <= MOST_ROWS and in_whole_blocks(head)


def shares(
    products: Sequence[tuple[Tensor, Linear]],
    blocks: ProductBlocks,
    factor: float = 1.0,
    norm: FusedNorm | None = None,
) -> Shares:
    """The products of these rows with these layers, not yet added to one another."""
    cuts = [_cut_codes(linear, len(x)) or _cut(linear, blocks.deep) for x, linear in products]
    (x, linear), *_ = products
    sums = x.new_empty((sum(n for _, n in cuts), len(x), outputs_of(linear)), dtype=torch.float32)
    first = 0
    for (x, linear), (own, n) in zip(products, cuts, strict=True):
        codes = coded.weight_of(linear)
        if codes is not None and isinstance(own, coded.CodedBlock):
            coded.launch(own, x, codes[0], None, sums[first], shares=n)
        elif isinstance(own, Block):
            without_bias = DenseLinear(_dense(linear).weight)
            _launch(own, n, x, without_bias, sums[first], sums.stride(0), "none", gated=False)
        first += n
    biases = tuple(bias for _, linear in products if (bias := _bias(linear)) is not None)
    return Shares(sums, biases, factor, norm)


def _bias(linear: Linear) -> Tensor | None:
    codes = coded.weight_of(linear)
    return _dense(linear).bias if codes is None else codes[1]


def _dense(linear: Linear) -> DenseLinear:
    assert isinstance(linear, DenseLinear)
    return linear


def _whole(linear: Linear, block: Block) -> Block:
    """The block, made smaller so that it divides the weight."""
    outputs, inputs = _dense(linear).weight.shape
    while outputs % block.outputs:
        block = block._replace(outputs=block.outputs // 2, warps=max(4, block.warps // 2))
    while inputs % block.inputs:
        block = block._replace(inputs=block.inputs // 2)
    return block


def _wide(linear: Linear, blocks: ProductBlocks) -> Block:
    """The block of a product that writes its results."""
    many = _dense(linear).weight.shape[0] // blocks.wide.outputs >= PROGRAMS
    return _whole(linear, blocks.wide if many else blocks.narrow)


def _cut_codes(linear: Linear, rows: int) -> tuple[coded.CodedBlock, int] | None:
    codes = coded.weight_of(linear)
    if codes is None:
        return None
    block = coded.block_for(rows, codes[0].form.outputs)
    return block, coded.shares_for(block, codes[0].form)


def _cut(linear: Linear, block: Block) -> tuple[Block, int]:
    """The block, and the number of shares: by the weight's sizes alone."""
    block, (outputs, inputs), n = _whole(linear, block), _dense(linear).weight.shape, 1
    while n < MOST_SHARES and n * (outputs // block.outputs) < 2 * PROGRAMS:
        if inputs % (2 * n * block.inputs) or inputs // (2 * n) < LEAST_INPUTS:
            break
        n *= 2
    return block, n


def _launch(
    block: Block,
    n_shares: int,
    x: Tensor,
    linear: DenseLinear,
    y: Tensor,
    y_share: int,
    activation: str,
    gated: bool,
    best: tuple[Tensor, Tensor] | None = None,
) -> None:
    weight, bias = linear.weight, linear.bias
    n, (outputs, inputs) = len(x), weight.shape
    assert n <= MOST_ROWS
    assert x.stride(1) == y.stride(1) == 1
    assert x.shape[1] == inputs
    dense.product[(outputs // block.outputs, n_shares)](
        x,
        weight,
        y,
        weight if bias is None else bias,
        y,
        weight,
        y,
        y,
        *((y, y) if best is None else best),
        n,
        inputs,
        y.shape[1],
        x.stride(0),
        y.stride(0),
        y_share,
        0.0,
        1,
        NORMED=False,
        ACTIVATION=activation,
        GATED=gated,
        ADDED=False,
        BIASED=bias is not None,
        ROWS=FEW_ROWS if n <= FEW_ROWS else MOST_ROWS,
        OUTPUTS=block.outputs,
        INPUTS=block.inputs,
        BLOCKS=1,
        EARLY=min(block.early, 1 << (inputs // n_shares).bit_length() - 1),
        SHARES=n_shares,
        BEST=best is not None,
        num_warps=block.warps,
        num_stages=block.stages,
        **overlapped(x),
    )


def add_norm(
    residual: Tensor, added: Shares | None, first: FusedNorm | None, second: FusedNorm | None = None
) -> tuple[Tensor, Tensor]:
    """Adds the shares to the residual, in place. Returns the first and the second norm of the sum, each [T,
    hidden]; without a first norm the residual itself, without a second one the first result."""
    n, width = residual.shape
    assert residual.is_contiguous()
    norms = (None if added is None else added.norm, first, second)
    x, y = (None if norm is None else torch.empty_like(residual) for norm in (first, second))
    biases = (() if added is None else added.biases) + (None, None)
    if added is not None or x is not None or y is not None:
        _add_norm[(n,)](
            residual,
            None if added is None else added.sums,
            *biases[:2],
            None if added is None else added.scalar,
            x,
            y,
            *(None if norm is None else norm.weights.weight for norm in norms),
            *(None if norm is None else norm.weights.bias for norm in norms),
            *(0.0 if norm is None else norm.plan.eps for norm in norms),
            1.0 if added is None else added.factor,
            n,
            width,
            *("" if norm is None else norm.plan.kind for norm in norms),
            SHARES=0 if added is None else len(added.sums),
            WIDTH=triton.next_power_of_2(width),
            num_warps=8,
            **overlapped(residual),
        )
    x = residual if x is None else x
    return x, x if y is None else y


@triton.jit(do_not_specialize=["n"])
def _add_norm(
    residual,
    sums,
    first_bias,
    second_bias,
    scalar,
    x,
    y,
    behind_weight,
    x_weight,
    y_weight,
    behind_bias,
    x_bias,
    y_bias,
    behind_eps,
    x_eps,
    y_eps,
    factor,
    n,
    width,
    BEHIND: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    SHARES: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One row. BEHIND, X, Y: the kinds of the norms; "": there is none."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, WIDTH)
    there = at < width
    row = tl.program_id(0).to(tl.int64) * width
    value = tl.load(residual + row + at, mask=there, other=0.0).to(tl.float32)
    if SHARES > 0:
        total = tl.load(sums + row + at, mask=there, other=0.0)
        for share in tl.static_range(1, SHARES):
            total += tl.load(sums + share * n.to(tl.int64) * width + row + at, mask=there, other=0.0)
        if first_bias is not None:
            total += tl.load(first_bias + at, mask=there, other=0.0).to(tl.float32)
        if second_bias is not None:
            total += tl.load(second_bias + at, mask=there, other=0.0).to(tl.float32)
        if BEHIND != "":
            total = _normed(total, at, there, width, behind_weight, behind_bias, behind_eps, BEHIND)
        rounded = (value + factor * total).to(residual.dtype.element_ty)
        if scalar is not None:
            rounded = (rounded.to(tl.float32) * tl.load(scalar).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + row + at, rounded, mask=there)
        value = rounded.to(tl.float32)
    if X != "":
        normed = _normed(value, at, there, width, x_weight, x_bias, x_eps, X)
        tl.store(x + row + at, normed.to(x.dtype.element_ty), mask=there)
    if Y != "":
        normed = _normed(value, at, there, width, y_weight, y_bias, y_eps, Y)
        tl.store(y + row + at, normed.to(y.dtype.element_ty), mask=there)


@triton.jit
def _normed(value, at, there, width, weight, bias, eps, KIND: tl.constexpr):
    """The norm of a row, float32; see `plan.Norm`."""
    if KIND == "layer":
        value = tl.where(there, value - tl.sum(value, 0) / width, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    if weight is not None:
        value *= tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return value


@triton.jit
def _likeliest(best, owners, tokens, programs, width, PROGRAMS: tl.constexpr, OVERLAPPED: tl.constexpr):
    """Of one row, from what the head's programs have found; some token, if the logits are no numbers."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.arange(0, PROGRAMS)
    row = tl.program_id(0) * programs
    value = tl.load(best + row + at, mask=at < programs, other=float("-inf"))
    owner = tl.load(owners + row + at, mask=at < programs, other=2147483647)
    token = tl.min(tl.where(value == tl.max(value, 0), owner, 2147483647), 0)
    tl.store(tokens + tl.program_id(0), tl.minimum(token, width - 1).to(tl.int64))

"""The linear layers of a decode step, with the norms and activations around them, for the few rows of a small
batch.

Such a product takes as long as reading its weights. Every kernel between two products adds a start and an end in
which nothing is read. So here a layer consists of four products and its attention:

    norm ─► qkv ─► attention ─► out, added to the residual ─► norm ─► gate, up ─► silu · mul ─► down, added

A norm costs no kernel and no pass: the product that writes the residual also writes it times the next norm's
weight, and each of its blocks writes its part of each row's sum of squares. The product that follows reads these,
and the norm's factor of a row is one factor of all its outputs.

Weights are the left operand of the tensor cores, and the rows, padded to 16, the right one. On Hopper a kernel
starts while the previous kernel ends (programmatic dependent launch), and asks for its first weights before it
waits for the outputs of the previous kernel.

Each program reads all rows. With more than 16 rows it would read as many bytes of rows as of weights; such batches
are for the usual kernels. A row's sums are in float32, in an order that depends on no other row.
"""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.parts.norms import NormWeights, weight_of
from petiole.gpu_worker.models.plan import Norm
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear
from petiole.gpu_worker.models.weights.stacked import outputs_of
from petiole.gpu_worker.runtime.cuda.fused.layers import has_small_memory, overlapped
from petiole.gpu_worker.runtime.cuda.fused.linear import coded, dense
from petiole.gpu_worker.runtime.cuda.supported import tried

MOST_ROWS = 16


class Block(NamedTuple):
    """What a program computes at a time: outputs by inputs, in this many stages; early: the inputs whose weights
    it asks for before it waits."""

    outputs: int
    inputs: int
    stages: int
    warps: int
    early: int


WIDE = Block(64, 128, 6, 4, 512)
"""For products that read the residual, which have several times more outputs than those that are added to it."""

NARROW = Block(16, 512, 4, 2, 1024)
"""For products that are added to the residual: with more outputs there would be too few programs."""

NARROW_HALF = Block(16, 256, 6, 2, 1024)
"""The same for inputs that do not divide into whole blocks. All three are the quickest of 58 that were tried on an
H100."""


def fits(decoder: Decoder) -> bool:
    """Whether `forward` can compute this model: bfloat16, with weights in whole blocks."""
    linears = [
        linear
        for layer in decoder.layers
        for linear in (layer.attention.qkv, layer.attention.out, layer.dense.gate_up, layer.dense.down)
    ]
    return decoder.dtype == torch.bfloat16 and all(map(_reads, linears))


def _reads(linear: Linear) -> bool:
    if isinstance(linear, DenseLinear):
        outputs, inputs = linear.weight.shape
        return linear.weight.is_contiguous() and outputs % NARROW.outputs == inputs % NARROW_HALF.inputs == 0
    return tried("codes") and coded.weight_of(linear) is not None


@dataclass(frozen=True, slots=True)
class FusedResidual:
    """What layers add to, and what their next norm needs.

    value: [T, hidden]. scaled: the value times the norm's weight. squares: float32 [MOST_ROWS, blocks], each row's
    sums of squares of a block's outputs. eps: the norm's."""

    value: Tensor
    scaled: Tensor
    squares: Tensor
    eps: float


def forward(decoder: Decoder, hidden: Tensor, step: Forward) -> Tensor:
    """See `Decoder.forward`: at most `MOST_ROWS` rows, of a model that `fits`, without adapters."""
    norms = [
        _norm(*norm)
        for plan, layer in zip(decoder.plan.layers, decoder.layers, strict=True)
        for norm in ((plan.mixer_norm, layer.mixer_norm), (plan.feed_forward_norm, layer.feed_forward_norm))
    ]
    norms.append(norms[0])  # nobody reads what the last product writes for it
    stream = begin(hidden, norms[0])
    for i, layer in enumerate(decoder.layers):
        qkv = product(stream, layer.attention.qkv)
        stream = added(decoder.attend(i, qkv, step), layer.attention.out, stream, norms[2 * i + 1])
        inner = product(stream, layer.dense.gate_up, gated=True)
        stream = added(inner, layer.dense.down, stream, norms[2 * i + 2])
    return hidden


def _norm(plan: Norm | None, weights: NormWeights | None) -> tuple[Tensor, float]:
    assert plan is not None
    return weight_of(weights), plan.eps


def begin(hidden: Tensor, norm: tuple[Tensor, float]) -> FusedResidual:
    """The residual at a model's first layer; norm: the weight and eps of the RMS norm that comes next."""
    n, width = hidden.shape
    weight, eps = norm
    scaled = torch.empty_like(hidden)
    squares = torch.empty((MOST_ROWS, width // NARROW.outputs), dtype=torch.float32, device=hidden.device)
    _begin[(width // NARROW.outputs,)](
        hidden,
        scaled,
        squares,
        weight,
        n,
        hidden.stride(0),
        width,
        squares.stride(0),
        ROWS=MOST_ROWS,
        OUTPUTS=NARROW.outputs,
        num_warps=1,
        **overlapped(hidden),
    )
    return FusedResidual(hidden, scaled, squares, eps)


def product(x: Tensor | FusedResidual, linear: Linear, *, gated: bool = False) -> Tensor:
    """linear(x), [T, in] -> [T, out], with T up to `MOST_ROWS`; of a residual, linear(norm(x)).

    `gated`: silu of the first half of the outputs times the second half."""
    value, outputs = x.value if isinstance(x, FusedResidual) else x, outputs_of(linear)
    y = torch.empty((len(value), outputs // 2 if gated else outputs), dtype=value.dtype, device=value.device)
    _launch(_block_for(linear, len(value), added=False), x, linear, y, None, gated)
    return y


def added(x: Tensor, linear: Linear, to: FusedResidual, norm: tuple[Tensor, float]) -> FusedResidual:
    """Adds linear(x) to the residual, in place; norm: the weight and eps of the RMS norm that comes next."""
    (weight, eps), block, width = norm, _block_for(linear, len(to.value), added=True), to.value.shape[1]
    sums = to.squares.new_empty((MOST_ROWS, width // block.outputs))
    after = FusedResidual(to.value, torch.empty_like(to.value), sums, eps)
    _launch(block, x, linear, to.value, (after, weight), False)
    return after


def _block_for(linear: Linear, rows: int, *, added: bool) -> Block | coded.CodedBlock:
    if not isinstance(linear, DenseLinear):
        return coded.block_for(rows, outputs_of(linear))
    return NARROW if added or linear.weight.shape[0] % WIDE.outputs else WIDE


def _launch(
    block: Block | coded.CodedBlock,
    x: Tensor | FusedResidual,
    linear: Linear,
    y: Tensor,
    then: tuple[FusedResidual, Tensor] | None,
    gated: bool,
) -> None:
    of_residual = isinstance(x, FusedResidual)
    rows, squares, eps = (x.scaled, x.squares, x.eps) if isinstance(x, FusedResidual) else (x, y, 0.0)
    scaled, sums, norm = (y, y, y) if then is None else (then[0].scaled, then[0].squares, then[1])
    activation = "silu" if gated else "none"
    assert len(rows) <= MOST_ROWS
    assert rows.stride(1) == y.stride(1) == 1
    if isinstance(block, coded.CodedBlock):
        found = coded.weight_of(linear)
        assert found is not None
        coded.launch(
            block,
            rows,
            *found,
            y,
            squares if of_residual else None,
            eps,
            None if then is None else (norm, scaled, sums),
            activation,
            gated=gated,
        )
        return
    assert isinstance(linear, DenseLinear)
    weight, bias = linear.weight, linear.bias
    n, (outputs, inputs) = len(rows), weight.shape
    if inputs % block.inputs:
        block = NARROW_HALF
    stages = min(block.stages, 5) if has_small_memory(rows.device) else block.stages
    dense.product[(outputs // block.outputs,)](
        rows,
        weight,
        y,
        weight if bias is None else bias,
        squares,
        norm,
        scaled,
        sums,
        y,
        y,
        n,
        inputs,
        y.shape[1],
        rows.stride(0),
        y.stride(0),
        0,
        eps,
        squares.shape[1] if of_residual else 1,
        NORMED=of_residual,
        ACTIVATION=activation,
        GATED=gated,
        ADDED=then is not None,
        BIASED=bias is not None,
        ROWS=MOST_ROWS,
        OUTPUTS=block.outputs,
        INPUTS=block.inputs,
        BLOCKS=triton.next_power_of_2(squares.shape[1]) if of_residual else 1,
        EARLY=block.early,
        SHARES=1,
        BEST=False,
        num_warps=block.warps,
        num_stages=stages,
        **overlapped(rows),
    )


@triton.jit(do_not_specialize=["n"])
def _begin(
    x,
    scaled,
    squares,
    norm,
    n,
    x_row,
    width,
    blocks,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    row, at = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = (row < n)[:, None]
    value = tl.load(x + row[:, None] * x_row + at[None, :], mask=there, other=0.0).to(tl.float32)
    found = value * tl.load(norm + at).to(tl.float32)[None, :]
    tl.store(scaled + row[:, None] * width + at[None, :], found.to(scaled.dtype.element_ty), mask=there)
    tl.store(squares + row * blocks + tl.program_id(0), tl.sum(value * value, 1))

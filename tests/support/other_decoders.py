"""Decoders of text that differ from a known one in one thing each, with drawn weights: by their plan, their
weights, or their class.

`KNOWN`: fast paths compute these. `PLANS`: plans that a fast path computes or refuses, as its table of values
says. `UNKNOWN`: fast paths refuse these, because no plan says what they compute. `FUSED_ONLY`: compiled code
computes these, and fused products do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.loading import LoadOptions, Model, read_decoder
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import (
    Experts,
    FeedForward,
    Growth,
    ModelPlan,
    Norm,
    PerLayerInput,
    Rotary,
    Router,
)
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear, Linear, quantize_int8
from petiole.gpu_worker.models.weights.names import LINEARS, LLAMA, LinearName
from petiole.gpu_worker.models.weights.quantization import int4_form, quantise_int4
from petiole.gpu_worker.models.weights.quantized import CodedLinear
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from tests.support.plans import Drawn, each_feed_forward, each_layer, each_mixer, plan_of

CPU = torch.device("cpu")
MAX_LENGTH = 32
PLAN = plan_of(windows=(0, 5, 0), max_position=MAX_LENGTH, tied_head=False)
Variant = Callable[[Decoder], Any]
Kernels = type[TorchKernels] | type[FlashInferKernels]


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def linear(outputs: int, inputs: int, seed: int = 0) -> DenseLinear:
    return DenseLinear(weights(outputs, inputs, seed=seed) * 2 * inputs**-0.5)


def norm(width: int, seed: int = 0) -> NormWeights:
    return NormWeights(1 + 0.3 * weights(width, seed=seed))


def decoder_of(plan: ModelPlan, kernels: Kernels = TorchKernels) -> Decoder:
    """New weights each time: compiled code takes them over."""
    options = LoadOptions(CPU, torch.float32, MAX_LENGTH + 1, kernels=kernels())
    return read_decoder(Drawn(spread=2.0), Model({}, plan, LLAMA, read_decoder), options)


def known_decoder(kernels: Kernels = TorchKernels) -> Decoder:
    return decoder_of(PLAN, kernels)


def planned(change: Callable[[ModelPlan], ModelPlan]) -> Variant:
    """A decoder whose plan is changed, with the weights that it asks for."""
    return lambda decoder: decoder_of(change(decoder.plan), type(decoder.kernels))


def as_class(kind: type[Decoder], decoder: Decoder, **changes: Any) -> Decoder:
    return kind(**{f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)} | changes)


# ------------------------------------------------------------ known


def each_weights(decoder: Decoder, change: Callable[[LayerWeights], LayerWeights]) -> Decoder:
    return replace(decoder, layers=tuple(map(change, decoder.layers)))


def in_place_of(layer: LayerWeights, name: LinearName, linear: Linear) -> LayerWeights:
    """A layer with another product."""
    if name in ("qkv", "out"):
        return replace(layer, mixer=replace(layer.mixer, **{name: linear}))  # type: ignore[arg-type]
    return replace(layer, feed_forward=replace(layer.feed_forward, **{name: linear}))  # type: ignore[arg-type]


def in_int8(layer: LayerWeights) -> LayerWeights:
    for name in LINEARS:
        part: Any = layer.mixer if name in ("qkv", "out") else layer.feed_forward
        values, scale = quantize_int8(getattr(part, name).weight)
        layer = in_place_of(layer, name, Int8Linear(values, scale))
    return layer


def in_int4(layer: LayerWeights) -> LayerWeights:
    for name in LINEARS:
        part: Any = layer.mixer if name in ("qkv", "out") else layer.feed_forward
        weight = getattr(part, name).weight
        coded = int4_form(*weight.shape).empty(lambda shape, dtype: torch.empty(shape, dtype=dtype))
        quantise_int4(weight, coded)
        layer = in_place_of(layer, name, CodedLinear(coded))
    return layer


def another_eps(plan: ModelPlan) -> ModelPlan:
    norm = Norm(eps=0.3)
    plan = each_layer(replace(plan, norm=norm), mixer_norm=norm, feed_forward_norm=norm)
    return each_mixer(plan, q_norm=norm, k_norm=norm)


def other_windows(plan: ModelPlan) -> ModelPlan:
    sized = zip(plan.layers, (3, 0, 9), strict=True)
    return replace(plan, layers=tuple(replace(one, mixer=replace(one.mixer, window=n)) for one, n in sized))


def in_one_layer(plan: ModelPlan, **changes: Any) -> ModelPlan:
    first, *others = plan.layers
    return replace(plan, layers=(replace(first, **changes), *others))


YARN = Rotary(64, kind="yarn", factor=4.0, original_max_position=8)

KNOWN: dict[str, Variant] = {
    "as it is": lambda decoder: decoder,
    "biases": planned(lambda plan: each_feed_forward(each_mixer(plan, qkv_bias=True, out_bias=True), bias=True)),
    "no norms of heads": planned(lambda plan: each_mixer(plan, q_norm=None, k_norm=None)),
    "another eps": planned(another_eps),
    "other windows": planned(other_windows),
    "yarn": planned(lambda plan: each_mixer(plan, rotary=YARN)),
    "another scale": planned(lambda plan: each_mixer(plan, scale=0.5)),
    "a tied head": planned(lambda plan: replace(plan, tied_head=True)),
}

# ------------------------------------------------------------ what other plans say

LAYER_NORM = Norm("layer", bias=True)
GROUPED = Router(9, 2, "sigmoid", normalised=True, factor=1.5, correction=True, groups=3, best_groups=2)
PLANS: dict[str, Variant] = {
    name: planned(change)
    for name, change in {
        "two more norms": lambda plan: each_layer(plan, mixer_out_norm=Norm(), feed_forward_out_norm=Norm()),
        "norms behind alone": lambda plan: each_layer(
            plan, mixer_norm=None, feed_forward_norm=None, mixer_out_norm=Norm(), feed_forward_out_norm=Norm()
        ),
        "norms behind the residual": lambda plan: each_layer(plan, post_norm=True),
        "attention and MLP side by side": lambda plan: each_layer(plan, parallel=True, feed_forward_norm=None),
        "side by side, a norm each": lambda plan: each_layer(plan, parallel=True),
        "norms with a bias": lambda plan: each_layer(plan, mixer_norm=LAYER_NORM),
        "norms without a weight": lambda plan: each_layer(plan, mixer_norm=Norm(weight=False)),
        "norms of 1 + w": lambda plan: each_layer(plan, mixer_norm=Norm(offset=1.0)),
        "an eps in one place": lambda plan: each_layer(plan, mixer_norm=Norm(eps=0.3)),
        "a residual factor": lambda plan: each_layer(plan, residual=0.22),
        "a scalar": lambda plan: each_layer(plan, scalar=True),
        "gelu": lambda plan: each_feed_forward(plan, activation="gelu"),
        "gelu_tanh": lambda plan: each_feed_forward(plan, activation="gelu_tanh"),
        "relu": lambda plan: each_feed_forward(plan, activation="relu"),
        "no gate, relu": lambda plan: each_feed_forward(plan, gated=False, activation="relu"),
        "no gate": lambda plan: each_feed_forward(plan, gated=False),
        "no gate, gelu_tanh": lambda plan: each_feed_forward(plan, gated=False, activation="gelu_tanh"),
        "clamped": lambda plan: each_feed_forward(plan, clamp=0.5),
        "a slope of silu": lambda plan: each_feed_forward(plan, slope=1.7),
        "an offset of ups": lambda plan: each_feed_forward(plan, up_offset=1.0),
        "experts alone": lambda plan: each_layer(
            plan, feed_forward=None, experts=Experts(Router(6, 2, normalised=True), FeedForward(48))
        ),
        "experts with biases": lambda plan: in_one_layer(
            plan,
            feed_forward=None,
            experts=Experts(
                Router(5, 3, "chosen", bias=True),
                FeedForward(48, bias=True, clamp=0.7, slope=1.7, up_offset=1.0),
            ),
        ),
        "experts beside": lambda plan: each_layer(plan, experts=Experts(GROUPED, FeedForward(32))),
        "experts beside, with a gate": lambda plan: each_layer(
            plan, experts=Experts(Router(4, 2), FeedForward(32), dense_gate=True), feed_forward_out_norm=Norm()
        ),
        "experts of the stream": lambda plan: each_layer(
            plan,
            experts=Experts(
                Router(5, 2, normalised=True, of_stream=True, expert_scales=True),
                FeedForward(32, "gelu_tanh"),
                norm=Norm(),
                out_norm=Norm(),
                dense_out_norm=Norm(),
            ),
        ),
        "a wider MLP in one layer": lambda plan: in_one_layer(
            plan, feed_forward=replace(plan.layers[0].feed_forward, inner=192)
        ),
        "normed values": lambda plan: each_mixer(plan, v_norm=Norm(weight=False)),
        "a norm of queries alone": lambda plan: each_mixer(plan, k_norm=None),
        "norms of all heads together": lambda plan: each_mixer(plan, norm_whole=True),
        "a layer without rotation": lambda plan: in_one_layer(
            plan, mixer=replace(plan.layers[0].mixer, rotary=None)
        ),
        "two rotations": lambda plan: in_one_layer(plan, mixer=replace(plan.layers[0].mixer, rotary=YARN)),
        "half of a head rotated": lambda plan: each_mixer(plan, rotary=Rotary(32)),
        "neighbours rotated": lambda plan: each_mixer(plan, rotary=Rotary(64, neighbours=True)),
        "a part of the pairs": lambda plan: each_mixer(
            plan, rotary=Rotary(64, kind="proportional", fraction=0.25)
        ),
        "capped scores": lambda plan: each_mixer(plan, softcap=2.0),
        "sinks": lambda plan: each_mixer(plan, sinks=True),
        "an output gate": lambda plan: each_mixer(plan, output_gate=True),
        "keys of another layer": lambda plan: replace(
            plan, layers=(*plan.layers[:2], replace(plan.layers[2], mixer=replace(plan.mixers[2], keys_of=0)))
        ),
        "values from keys": lambda plan: each_mixer(plan, values_are_keys=True),
        "queries that grow": lambda plan: each_mixer(plan, query_growth=Growth(0.5, 4)),
        "other heads in one layer": lambda plan: in_one_layer(
            plan, mixer=replace(plan.mixers[0], heads=2, kv_heads=1, head_dim=128, rotary=Rotary(128))
        ),
        "a scaled embedding": lambda plan: replace(plan, embedding_factor=8.0),
        "a norm of the embedding": lambda plan: replace(plan, embedding_norm=Norm()),
        "learned positions": lambda plan: replace(plan, learned_positions=MAX_LENGTH + 1),
        "token types": lambda plan: replace(plan, token_types=2),
        "scaled logits": lambda plan: replace(plan, logits_factor=0.5),
        "capped logits": lambda plan: replace(plan, logits_softcap=3.0),
        "a bias of the head": lambda plan: replace(plan, head_bias=True),
        "a tied head with a bias": lambda plan: replace(plan, tied_head=True, head_bias=True),
        "no last norm": lambda plan: replace(plan, norm=None),
        "per-layer inputs": lambda plan: replace(
            plan, per_layer=PerLayerInput(16, plan.vocab_size, Norm(), Norm(), embedding_factor=4.0, factor=0.7)
        ),
    }.items()
}
"""Torch computes each of these, and another model with each."""

# ------------------------------------------------------------ what no plan says


class Bare(Decoder):
    """A subclass that changes nothing: nobody can see that."""


class Multiplied(Decoder):
    def _fed_forward(self, i: int, x: Tensor, stream: Tensor, step: Forward) -> Tensor:
        return 0.22 * Decoder._fed_forward(self, i, x, stream, step)


class Scaled(Decoder):
    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        mixer = self.plan.mixers[i]
        qkv = torch.cat([qkv[:, : -mixer.kv_size], 3 * qkv[:, -mixer.kv_size :]], dim=-1)
        return Decoder.attend(self, i, qkv, step)


class ThreeAxes(Decoder):
    """Each third of the frequencies turns by another axis. In text, all axes are one."""

    images = None
    sections = (12, 10, 10)

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        axes = step.positions if step.positions.ndim == 2 else step.positions.expand(3, -1)
        table = self.tables[0]
        assert table is not None
        cos, sin = (half.split(self.sections, dim=-1) for half in table.chunk(2, dim=-1))
        halves = [
            torch.cat([one[axis.long()] for axis, one in zip(axes, half, strict=True)], dim=-1)
            for half in (cos, sin)
        ]
        turned = as_class(Decoder, self, tables=(torch.cat(halves, dim=-1).contiguous(),) * len(self.layers))
        positions = torch.arange(len(hidden), dtype=step.positions.dtype)
        return turned.forward(hidden, replace(step, positions=positions))


class Embedding(Decoder):
    def embed(self, token_ids: Tensor) -> Tensor:
        return Decoder.embed(self, token_ids) * 8


class Capped(Decoder):
    def head_output(self, hidden: Tensor) -> Tensor:
        return torch.tanh(Decoder.head_output(self, hidden) / 3) * 3


class Clamped(Decoder):
    """Overrides a part that only the plain forward calls."""

    def _apply(self, i: int, name: LinearName, linear: Linear, x: Tensor, step: Forward) -> Tensor:
        return Decoder._apply(self, i, name, linear, x, step).clamp(-0.5, 0.5)


@dataclass(frozen=True, slots=True)
class OtherPlan(ModelPlan):
    attention_scale: float = 0.5


class Doubled(DenseLinear):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * DenseLinear.__call__(self, x)


@dataclass(frozen=True)
class Rounded:
    """Has what a dense layer has, and computes something else."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.round())


class Around:
    """Any other class that has the attributes of a decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        return self._decoder.forward(hidden, step) + 1


def gelu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def other_kernels(decoder: Decoder) -> Decoder:
    kernels = type("Other", (type(decoder.kernels),), {"silu_mul": lambda self, x: gelu_mul(x)})
    return replace(decoder, kernels=kernels())


def other_function(decoder: Decoder) -> Decoder:
    kernels: Any = type(decoder.kernels)()
    kernels.silu_mul = gelu_mul
    return replace(decoder, kernels=kernels)


def one_layer(decoder: Decoder, name: LinearName, linear: Any) -> Decoder:
    first, *others = decoder.layers
    return replace(decoder, layers=(in_place_of(first, name, linear), *others))


UNKNOWN: dict[str, Variant] = {
    "a subclass that changes nothing": lambda decoder: as_class(Bare, decoder),
    "a residual multiplier": lambda decoder: as_class(Multiplied, decoder),
    "other values": lambda decoder: as_class(Scaled, decoder),
    "another plan": lambda decoder: replace(
        decoder, plan=OtherPlan(**{f.name: getattr(PLAN, f.name) for f in dataclasses.fields(PLAN)})
    ),
    "three axes": lambda decoder: as_class(ThreeAxes, decoder),
    "another embedding": lambda decoder: as_class(Embedding, decoder),
    "another head output": lambda decoder: as_class(Capped, decoder),
    "a part overridden": lambda decoder: as_class(Clamped, decoder),
    "another class": Around,
    "a subclass of the kernels": other_kernels,
    "a function of the kernels replaced": other_function,
    "a linear layer's subclass": lambda decoder: one_layer(decoder, "down", Doubled(linear(64, 96).weight)),
    "another linear layer": lambda decoder: one_layer(decoder, "out", Rounded(linear(64, 256).weight * 8)),
    "another head": lambda decoder: replace(decoder, head=Doubled(linear(64, 64, 91).weight)),
}

UNREAD = ("a subclass that changes nothing", "another plan")
"""Torch computes the known decoder: it reads nothing that is new there."""

FUSED_ONLY: dict[str, Variant] = {
    "weights in int8": lambda decoder: each_weights(decoder, in_int8),
    "weights in int4": lambda decoder: each_weights(decoder, in_int4),
}
"""Known to the compiled code, and not to the fused products."""

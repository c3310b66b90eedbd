"""Decoders of text that differ from the known one in one thing each, with drawn weights.

`KNOWN`: fast paths compute these. `UNKNOWN`: fast paths refuse these. `FUSED_ONLY`: compiled code computes these,
and fused products do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.config import ModelConfig, RopeConfig
from petiole.gpu_worker.models.decoder import Decoder, DecoderLayer, Forward, LinearName
from petiole.gpu_worker.models.layers import (
    DenseLinear,
    Int8Linear,
    Linear,
    Rotation,
    TorchKernels,
    quantize_int8,
)
from petiole.gpu_worker.models.rotary import rotary_table
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels

CPU = torch.device("cpu")
MAX_LENGTH = 32
CONFIG = ModelConfig(
    "test", 64, 64, 96, 3, 4, 2, 64, 1e-6, MAX_LENGTH, RopeConfig(), False, False, False, False, True, (0, 5, 0)
)
Variant = Callable[[Decoder], Any]
Kernels = type[TorchKernels] | type[FlashInferKernels]


def weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def linear(outputs: int, inputs: int, seed: int = 0) -> DenseLinear:
    return DenseLinear(weights(outputs, inputs, seed=seed) * 2 * inputs**-0.5)


def norm(width: int, seed: int = 0) -> Tensor:
    return 1 + 0.3 * weights(width, seed=seed)


def known_layer(i: int, config: ModelConfig = CONFIG, inner: int = CONFIG.intermediate_size) -> DecoderLayer:
    hidden = config.hidden_size
    return DecoderLayer(
        input_norm=norm(hidden, i),
        qkv=linear(config.q_size + 2 * config.kv_size, hidden, i),
        q_norm=norm(config.head_dim, i),
        k_norm=norm(config.head_dim, i + 20),
        out=linear(hidden, config.q_size, i),
        post_norm=norm(hidden, i + 40),
        gate_up=linear(2 * inner, hidden, i),
        down=linear(hidden, inner, i),
    )


def known_decoder(kernels: Kernels = TorchKernels) -> Decoder:
    """New weights each time: compiled code takes them over."""
    return Decoder(
        config=CONFIG,
        embedding=weights(CONFIG.vocab_size, CONFIG.hidden_size),
        layers=tuple(known_layer(i) for i in range(CONFIG.n_layers)),
        norm=norm(CONFIG.hidden_size, 90),
        head=linear(CONFIG.vocab_size, CONFIG.hidden_size, 91),
        rotary=rotary_table(CONFIG.rope, CONFIG.head_dim, MAX_LENGTH + 1, CPU),
        kernels=kernels(),
    )


def as_class(kind: type[Decoder], decoder: Decoder, **changes: Any) -> Decoder:
    return kind(**{f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)} | changes)


# ------------------------------------------------------------ known

LINEARS: tuple[LinearName, ...] = ("qkv", "out", "gate_up", "down")


def each_layer(decoder: Decoder, change: Callable[[DecoderLayer], DecoderLayer]) -> Decoder:
    return replace(decoder, layers=tuple(map(change, decoder.layers)))


def in_int8(linear: Any) -> Int8Linear:
    values, scale = quantize_int8(linear.weight)
    return Int8Linear(values, scale)


def yarn(decoder: Decoder) -> Decoder:
    rope = RopeConfig(kind="yarn", factor=4.0, original_max_position=8)
    return replace(decoder, rotary=rotary_table(rope, 64, MAX_LENGTH + 1, CPU))


def biased(decoder: Decoder) -> Decoder:
    def change(layer: DecoderLayer) -> DecoderLayer:
        each: dict[str, Any] = {name: getattr(layer, name) for name in LINEARS}
        return replace(layer, **{n: DenseLinear(one.weight, weights(len(one.weight))) for n, one in each.items()})

    return each_layer(decoder, change)


KNOWN: dict[str, Variant] = {
    "as it is": lambda decoder: decoder,
    "biases": biased,
    "no norms of heads": lambda decoder: each_layer(decoder, lambda one: replace(one, q_norm=None, k_norm=None)),
    "another eps": lambda decoder: replace(decoder, config=replace(CONFIG, rms_norm_eps=0.3)),
    "other windows": lambda decoder: replace(decoder, config=replace(CONFIG, windows=(3, 0, 9))),
    "yarn": yarn,
    "a tied head": lambda decoder: replace(decoder, head=DenseLinear(decoder.embedding)),
}


# ------------------------------------------------------------ not known: subclasses


class Bare(Decoder):
    """A subclass that changes nothing: nobody can see that."""


@dataclass(frozen=True, slots=True)
class SandwichLayer(DecoderLayer):
    behind_attention: Tensor = field(default_factory=lambda: norm(64, 50))
    behind_mlp: Tensor = field(default_factory=lambda: norm(64, 51))


class Plain(Decoder):
    """A forward in parts, for others to override."""

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.normed(hidden, layer.input_norm)
            hidden = hidden + self.attended(i, layer, x, step)
            hidden = hidden + self.fed_forward(layer, self.normed(hidden, layer.post_norm))
        return hidden

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, weight, self.config.rms_norm_eps)

    def attended(self, i: int, layer: DecoderLayer, x: Tensor, step: Forward) -> Tensor:
        return layer.out(self.attend(i, layer.qkv(x), step))

    def fed_forward(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        return layer.down(self.kernels.silu_mul(layer.gate_up(x)))


class Sandwich(Plain):
    def attended(self, i: int, layer: Any, x: Tensor, step: Forward) -> Tensor:
        return self.normed(super().attended(i, layer, x, step), layer.behind_attention)

    def fed_forward(self, layer: Any, x: Tensor) -> Tensor:
        return self.normed(super().fed_forward(layer, x), layer.behind_mlp)


def sandwich(decoder: Decoder) -> Decoder:
    layers = tuple(
        SandwichLayer(**{f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)})
        for layer in decoder.layers
    )
    return as_class(Sandwich, decoder, layers=layers)


class NormsBehind(Plain):
    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        for i, layer in enumerate(self.layers):
            hidden = hidden + self.normed(self.attended(i, layer, hidden, step), layer.input_norm)
            hidden = hidden + self.normed(self.fed_forward(layer, hidden), layer.post_norm)
        return hidden


class SideBySide(Plain):
    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.normed(hidden, layer.input_norm)
            hidden = hidden + self.attended(i, layer, x, step) + self.fed_forward(layer, x)
        return hidden


class Multiplied(Plain):
    def fed_forward(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        return 0.22 * super().fed_forward(layer, x)


class Gelu(Plain):
    def fed_forward(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.gelu(gate, approximate="tanh") * up)


class Ungated(Plain):
    """As many outputs as the compiled code takes for a layer without a gate."""

    def fed_forward(self, layer: DecoderLayer, x: Tensor) -> Tensor:
        return layer.down(F.silu(layer.gate_up(x)))


class Scaled(Decoder):
    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        q, rest = qkv.split([self.config.q_size, 2 * self.config.kv_size], dim=-1)
        return Decoder.attend(self, i, torch.cat([q * 3, rest], dim=-1), step)


class ValuesNormed(Decoder):
    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        rest, v = qkv.split([self.config.q_size + self.config.kv_size, self.config.kv_size], dim=-1)
        return Decoder.attend(self, i, torch.cat([rest, F.rms_norm(v, v.shape[-1:])], dim=-1), step)


class Unrotated(Decoder):
    """In every second layer."""

    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        if i % 2 == 0:
            step = replace(step, positions=torch.zeros_like(step.positions))
        return Decoder.attend(self, i, qkv, step)


class NormsOfAllHeads(Decoder):
    """One norm over all heads of queries, and one over all heads of keys."""

    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        config, layer = self.config, self.layers[i]
        q, k, v = qkv.split([config.q_size, config.kv_size, config.kv_size], dim=-1)
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        q, k = (F.rms_norm(x, x.shape[-1:], weight) for x, weight in ((q, layer.q_norm), (k, layer.k_norm)))
        q, k, v = (x.view(len(x), -1, config.head_dim) for x in (q, k, v))
        rotation = Rotation(None, config.rms_norm_eps, step.positions, self.rotary)
        return step.attention.attend(i, q.contiguous(), k.contiguous(), v.contiguous(), rotation)


def norms_of_all_heads(decoder: Decoder) -> Decoder:
    wide = each_layer(decoder, lambda one: replace(one, q_norm=norm(CONFIG.q_size), k_norm=norm(CONFIG.kv_size)))
    return as_class(NormsOfAllHeads, wide)


class ThreeAxes(Decoder):
    """Each third of the frequencies turns by another axis. In text, all axes are one."""

    images = None
    sections = (12, 10, 10)

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        axes = step.positions if step.positions.ndim == 2 else step.positions.expand(3, -1)
        cos, sin = (half.split(self.sections, dim=-1) for half in self.rotary.chunk(2, dim=-1))
        halves = [
            torch.cat([one[axis.long()] for axis, one in zip(axes, half, strict=True)], dim=-1)
            for half in (cos, sin)
        ]
        turned = as_class(Decoder, self, rotary=torch.cat(halves, dim=-1).contiguous())
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
class ScaledConfig(ModelConfig):
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


def shifted_norms(decoder: Decoder) -> Decoder:
    base: Any = type(decoder.kernels)
    kernels = type(
        "Shifted",
        (base,),
        {
            "rms_norm": lambda self, x, w, eps: base.rms_norm(self, x, w + 1, eps),
            "add_rms_norm": lambda self, x, residual, w, eps: base.add_rms_norm(self, x, residual, w + 1, eps),
        },
    )
    return replace(decoder, kernels=kernels())


def one_layer(decoder: Decoder, **changes: Any) -> Decoder:
    first, *others = decoder.layers
    return replace(decoder, layers=(replace(first, **changes), *others))


def ungated(decoder: Decoder) -> Decoder:
    return as_class(Ungated, each_layer(decoder, lambda one: replace(one, gate_up=linear(96, 64))))


UNKNOWN: dict[str, Variant] = {
    "a subclass that changes nothing": lambda decoder: as_class(Bare, decoder),
    "two more norms": sandwich,
    "a layer's subclass alone": lambda decoder: replace(decoder, layers=sandwich(decoder).layers),
    "norms behind": lambda decoder: as_class(NormsBehind, decoder),
    "attention and MLP side by side": lambda decoder: as_class(SideBySide, decoder),
    "a residual multiplier": lambda decoder: as_class(Multiplied, decoder),
    "another activation": lambda decoder: as_class(Gelu, decoder),
    "no gate": ungated,
    "another scale": lambda decoder: as_class(Scaled, KNOWN["no norms of heads"](decoder)),
    "another scale in its configuration": lambda decoder: replace(
        decoder, config=ScaledConfig(**{f.name: getattr(CONFIG, f.name) for f in dataclasses.fields(CONFIG)})
    ),
    "normed values": lambda decoder: as_class(ValuesNormed, decoder),
    "layers without rotation": lambda decoder: as_class(Unrotated, decoder),
    "norms of all heads together": norms_of_all_heads,
    "three axes": lambda decoder: as_class(ThreeAxes, decoder),
    "a scaled embedding": lambda decoder: as_class(Embedding, decoder),
    "capped logits": lambda decoder: as_class(Capped, decoder),
    "a part overridden": lambda decoder: as_class(Clamped, decoder),
    "another class": Around,
    "a subclass of the kernels": other_kernels,
    "a function of the kernels replaced": other_function,
    "norms of 1 + w": shifted_norms,
    "a linear layer's subclass": lambda decoder: one_layer(decoder, down=Doubled(linear(64, 96).weight)),
    "another linear layer": lambda decoder: one_layer(decoder, out=Rounded(linear(64, 256).weight * 8)),
    "another head": lambda decoder: replace(decoder, head=Doubled(linear(64, 64, 91).weight)),
    "a norm of queries alone": lambda decoder: one_layer(decoder, k_norm=None),
    "a wider MLP in one layer": lambda decoder: replace(
        decoder, layers=(known_layer(0, inner=192), *decoder.layers[1:])
    ),
    "a layer less than configured": lambda decoder: replace(decoder, layers=decoder.layers[:2]),
}

UNREAD = ("a subclass that changes nothing", "a layer's subclass alone", "another scale in its configuration")
"""Torch computes the known decoder: it reads nothing that is new there."""

FUSED_ONLY: dict[str, Variant] = {
    "weights in int8": lambda decoder: each_layer(
        decoder, lambda one: replace(one, **{name: in_int8(getattr(one, name)) for name in LINEARS})
    )
}
"""Known to the compiled code, and not to the fused products."""

"""What code that computes layers itself is asked: which layers of a model it computes, and why not the others.

Compiled code reads a decoder's weights and never calls the decoder; a captured graph records one call and replays
it. Such code cannot see that a decoder computes something else. So it lists the values of plans and the classes of
parts that it computes, and everything that is not listed is refused: a new field of a plan, a value of a field, a
subclass, another class with the same attributes, other kernels, a tensor of another size.

The answer names layers, and the log says once which ones stand in the way. A step is computed by one path all the
same: if one layer is refused, torch computes all of them, by calling the decoder. Two paths in one step would keep
the promises of neither. (Compiled code gives a position the same bits in every batch, and keeps its activations in
float32.) Each change of path would cost a copy of the activations, and would end a region of the threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.moondream.config import VisionConfig
from petiole.gpu_worker.models.moondream.crops import CropGeometry
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder
from petiole.gpu_worker.models.moondream.encoder import VisionEncoder
from petiole.gpu_worker.models.parts.attention import AttentionWeights
from petiole.gpu_worker.models.parts.experts import ExpertWeights, RouterWeights
from petiole.gpu_worker.models.parts.feed_forward import FeedForwardWeights
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.parts.per_layer import PerLayerTables, PerLayerWeights
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.short import ShortConvolutionWeights
from petiole.gpu_worker.models.plan import (
    Attention,
    DeltaNet,
    Experts,
    FeedForward,
    Growth,
    Layer,
    ModelPlan,
    Norm,
    PerLayerInput,
    Rotary,
    ShortConvolution,
)
from petiole.gpu_worker.models.weights.coded import Coded, CodedLinear, Form, KernelLinear
from petiole.gpu_worker.models.weights.linear import DenseLinear, Fp8Linear, Int8Linear
from petiole.gpu_worker.models.weights.names import LLAMA
from petiole.gpu_worker.models.weights.stacked import StackedLinear

ANY: Final = object()
"""Every value of a field is known."""

Values = Mapping[type, Mapping[str, object]]
"""What a path knows of plans: for each class of `plan`, for each of its fields the set of known values, or `ANY`.
In place of values that are plans themselves their class stands, which is looked up in turn."""


def _fields(any_value: str = "", both: str = "", norms: str = "", **listed: object) -> dict[str, object]:
    """any_value: the names of fields of which every value is known. both: of those that are true or false. norms:
    of those that are a norm or None."""
    known: dict[str, object] = dict.fromkeys(any_value.split(), ANY)
    known |= {name: {True, False} for name in both.split()}
    return known | {name: {None, Norm} for name in norms.split()} | listed


_TABLE = "dims theta kind factor original_max_position low_freq_factor high_freq_factor beta_fast beta_slow"
_TABLE += " attention_factor mscale mscale_all_dim truncate fraction short_factors long_factors"
_ENDS = "architecture vocab_size hidden_size max_position embedding_factor learned_positions token_types"
_ENDS += " first_position"
_ENDS += " logits_factor logits_softcap dtype eos_token_ids"

COMMON: Final[Values] = {
    ModelPlan: _fields(
        _ENDS, "tied_head head_bias", "norm embedding_norm", per_layer={None, PerLayerInput}, pooling={None}
    ),
    Layer: _fields(
        "residual",
        "parallel post_norm scalar",
        "mixer_norm mixer_out_norm feed_forward_norm feed_forward_out_norm",
        mixer={Attention},
        feed_forward={None, FeedForward},
        experts={None},
    ),
    Attention: _fields(
        "heads kv_heads head_dim scale window softcap keys_of",
        "norm_whole qkv_bias out_bias output_gate values_are_keys sinks",
        "q_norm k_norm v_norm",
        rotary={None, Rotary},
        mask={"causal", "prefix"},
        query_growth={None, Growth},
    ),
    Rotary: _fields(_TABLE),  # all paths read its table, which `parts.rotary` computes
    Growth: _fields("beta length"),
    FeedForward: _fields("inner clamp slope up_offset", "gated bias", activation={"silu", "gelu", "gelu_tanh"}),
    PerLayerInput: _fields(
        "width vocab_size embedding_factor projection_factor factor",
        norm={Norm},
        layer_norm={Norm},
        activation={"silu", "gelu", "gelu_tanh"},
    ),
    Norm: _fields("eps offset", "weight bias", kind={"rms", "layer"}),
}
"""What compiled code and captured steps both compute. A field or a value that only one of them computes stands in
the list of that one, which says how it differs (`changed`)."""


def changed(values: Values, changes: Values) -> Values:
    """With other values for some fields of some classes."""
    return {**values, **{kind: {**values.get(kind, {}), **some} for kind, some in changes.items()}}


Parts = frozenset[type]
"""The kernels and the linear layers in whose place the asking code computes, or which it calls."""


@dataclass(frozen=True, slots=True)
class Support:
    """The answer. model: why nothing of the model can be computed; layers: for each layer why it cannot; None: it
    can."""

    model: str | None
    layers: tuple[str | None, ...] = ()

    @property
    def reason(self) -> str | None:
        """Why the model as a whole cannot be computed, with the layers that stand in the way."""
        at: dict[str, list[int]] = {}
        for i, reason in enumerate(self.layers):
            if reason is not None:
                at.setdefault(reason, []).append(i)
        of_layers = [f"{reason} ({_layers(found, len(self.layers))})" for reason, found in at.items()]
        return ", ".join([*([self.model] if self.model else []), *of_layers]) or None


def _layers(found: Sequence[int], n: int) -> str:
    """Ascending numbers of layers as ranges: `layers 0-2, 5 of 24`."""
    if len(found) == n:
        return f"all {n} layers" if n > 1 else "its layer"
    starts = [b for a, b in pairwise([-2, *found]) if b != a + 1]
    ends = [a for a, b in pairwise([*found, n + 1]) if b != a + 1]
    ranges = (f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"layer{'s' if len(found) > 1 else ''} {', '.join(ranges)} of {n}"


def supports(decoder: object, values: Values, parts: Parts) -> Support:
    """Whether a path with these values and parts computes this decoder."""
    if type(decoder) not in _DECODERS or not isinstance(decoder, Decoder):
        return Support(f"the class {type(decoder).__name__}")
    plan = decoder.plan
    of_layers = tuple(
        unknown_value(layer, values) or _unknown_weights(layer, weights, plan.hidden_size, parts)
        for layer, weights in zip(plan.layers, decoder.layers, strict=False)
    )
    return Support(unknown_value(plan, values, without=("layers",)) or _unknown_ends(decoder, parts), of_layers)


def supports_encoder(encoder: object, values: Values, parts: Parts) -> Support:
    """Whether a path computes the layers of an encoder of crops."""
    if type(encoder) is not VisionEncoder or not isinstance(encoder, VisionEncoder):
        return Support(f"the class {type(encoder).__name__}")
    layers = tuple(
        unknown_value(layer, values) or _unknown_weights(layer, weights, encoder.hidden_size, parts)
        for layer, weights in zip(encoder.plan, encoder.layers, strict=False)
    )
    return Support(_first_unknown(lambda: _check_encoder(encoder)), layers)


def with_known_crops(decoder: object) -> MoondreamDecoder | None:
    """The decoder, if its `encode` is known to encode each crop alone and to join the features; else None."""
    return decoder if isinstance(decoder, MoondreamDecoder) and type(decoder) is MoondreamDecoder else None


def unknown_value(plan: object, values: Values, without: Sequence[str] = ()) -> str | None:
    """The first field of a plan that is at no known value; None if all are. without: fields that are not looked
    at."""
    known = values.get(type(plan))
    if known is None or not is_dataclass(plan):
        return f"the class {type(plan).__name__}"
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name in without:
            continue
        if field.name not in known:
            return f"{field.name} of {type(plan).__name__}"
        listed = known[field.name]
        if listed is ANY:
            continue
        assert isinstance(listed, set | frozenset)
        inner = is_dataclass(value)
        if (type(value) if inner else value) not in listed:
            return f"{field.name} {type(value).__name__ if inner else repr(value)} of {type(plan).__name__}"
        if inner and (unknown := unknown_value(value, values)) is not None:
            return f"{unknown} ({field.name})"
    return None


# ------------------------------------------------------------ weights


_DECODERS = (Decoder, MoondreamDecoder)

_FIELDS: dict[type, str] = {
    Decoder: (
        "plan embedding layers norm head tables kernels embedding_norm positions token_types per_layer pooler "
        "value_tokens images processor"
    ),
    MoondreamDecoder: (
        "plan embedding layers norm head tables kernels embedding_norm positions token_types per_layer pooler "
        "value_tokens images processor vision region"
    ),
    LayerWeights: (
        "mixer feed_forward mixer_norm mixer_out_norm feed_forward_norm feed_forward_out_norm scalar per_layer "
        "experts"
    ),
    AttentionWeights: "qkv out q_norm k_norm v_norm sinks",
    DeltaNetWeights: "inputs gates convolution fading bias norm out",
    ShortConvolutionWeights: "inputs convolution bias out",
    FeedForwardWeights: "gate_up down",
    NormWeights: "weight bias",
    PerLayerWeights: "gate out norm",
    ExpertWeights: "router gate_up down taken norm out_norm dense_out_norm dense_gate",
    RouterWeights: "logits correction scale expert_scales",
    StackedLinear: "whole n outputs",
    PerLayerTables: "table projection norm",
    DenseLinear: "weight bias",
    Int8Linear: "weight scale bias",
    Fp8Linear: "weight scale quantize_rows bias",
    CodedLinear: "weight bias int8_inputs",
    KernelLinear: "weight bias int8_inputs product",
    Coded: "form codes scales zeros multiplier",
    Form: "outputs inputs group table codes scales zeros multiplier in_runs",
    VisionConfig: "dim heads layers ff projection geometry",
    CropGeometry: "patch grid margin max_crops",
    VisionEncoder: "config patches positions layers norm projection",
}
"""Every field of the known classes. A new field changes what is computed, until somebody has listed it here."""


class _UnknownError(Exception):
    """Names what is not known."""


def _first_unknown(check: Callable[[], None]) -> str | None:
    try:
        check()
    except _UnknownError as unknown:
        return str(unknown)
    return None


def _unknown_ends(decoder: Decoder, parts: Parts) -> str | None:
    """What is not known of embedding, head and tables."""

    def check() -> None:
        plan = decoder.plan
        _exactly(decoder, type(decoder))
        _one_of(decoder.kernels, parts)
        if type(decoder) is Decoder:
            for name in ("value_tokens", "images", "processor"):
                _require(getattr(decoder, name) is None, f"a Decoder with {name}")
        _sized("embedding", decoder.embedding, plan.vocab_size, plan.hidden_size)
        _linear("head", decoder.head, plan.head_size, plan.hidden_size, parts)
        _norm("norm", decoder.norm, plan.norm, plan.hidden_size)
        _norm("embedding_norm", decoder.embedding_norm, plan.embedding_norm, plan.hidden_size)
        counts = len(decoder.layers), len(decoder.tables)
        _require(counts == (plan.n_layers,) * 2, f"{counts[0]} layers of {plan.n_layers}")
        for mixer, table in zip(plan.mixers, decoder.tables, strict=True):
            rotary = mixer.rotary if isinstance(mixer, Attention) else None
            _require((rotary is None) == (table is None), "a layer without its rotary table")
            if rotary is not None and table is not None:
                wanted = table.dtype == torch.float32 and table.ndim == 2 and table.shape[1] == rotary.dims
                _require(wanted, f"a rotary table of {table.dtype} {list(table.shape)}")

    return _first_unknown(check)


def _unknown_weights(plan: Layer, weights: LayerWeights, hidden: int, parts: Parts) -> str | None:
    """What is not known of a layer's weights: classes, and sizes that are not those of the plan."""

    def check() -> None:
        _exactly(weights, LayerWeights)
        linears = _check_mixer(plan, weights, hidden, parts)
        fed = weights.feed_forward
        _require((fed is None) == (plan.feed_forward is None), "a layer without its feed-forward")
        if fed is not None:
            _exactly(fed, FeedForwardWeights)
            linears |= {"gate_up": fed.gate_up, "down": fed.down}
        for name, stored in _NAMES.linears(plan, hidden):
            _linear(name, linears[name], sum(stored.parts), stored.inputs, parts)
        _norm("mixer_norm", weights.mixer_norm, plan.mixer_norm, hidden)
        _norm("mixer_out_norm", weights.mixer_out_norm, plan.mixer_out_norm, hidden)
        _norm("feed_forward_norm", weights.feed_forward_norm, plan.feed_forward_norm, hidden)
        _norm("feed_forward_out_norm", weights.feed_forward_out_norm, plan.feed_forward_out_norm, hidden)
        _require((weights.scalar is not None) == plan.scalar, "a layer without its scalar")
        _require((weights.experts is not None) == (plan.experts is not None), "a layer without its experts")
        if plan.experts is not None and weights.experts is not None:
            _check_experts(plan.experts, weights.experts, hidden, parts)

    return _first_unknown(check)


def _check_mixer(plan: Layer, weights: LayerWeights, hidden: int, parts: Parts) -> dict[str, object]:
    """Returns the products of attention, by name."""
    mixer, own = plan.mixer, weights.mixer
    if isinstance(mixer, DeltaNet):
        _exactly(own, DeltaNetWeights)
        assert isinstance(own, DeltaNetWeights)
        _linear("inputs", own.inputs, sum(mixer.input_sizes), hidden, parts)
        _linear("gates", own.gates, sum(mixer.gate_sizes), hidden, parts)
        _linear("out", own.out, hidden, mixer.value_size, parts)
        _sized("convolution", own.convolution, mixer.channels, mixer.kernel)
        _sized("fading", own.fading, mixer.value_heads)
        _sized("bias of a", own.bias, mixer.value_heads)
        _norm("norm of a delta net", own.norm, mixer.norm, mixer.value_dim)
        return {}
    if isinstance(mixer, ShortConvolution):
        _exactly(own, ShortConvolutionWeights)
        assert isinstance(own, ShortConvolutionWeights)
        _linear("inputs", own.inputs, 3 * mixer.channels, hidden, parts)
        _linear("out", own.out, hidden, mixer.channels, parts)
        _sized("convolution", own.convolution, mixer.channels, mixer.kernel)
        _require((own.bias is not None) == mixer.bias, "a convolution without its bias")
        if own.bias is not None:
            _sized("bias of a convolution", own.bias, mixer.channels)
        return {}
    _exactly(own, AttentionWeights)
    assert isinstance(own, AttentionWeights)
    q_width, k_width = (mixer.q_size, mixer.kv_size) if mixer.norm_whole else (mixer.head_dim,) * 2
    _norm("q_norm", own.q_norm, mixer.q_norm, q_width)
    if mixer.keys_of is None:
        _norm("k_norm", own.k_norm, mixer.k_norm, k_width)
        _norm("v_norm", own.v_norm, mixer.v_norm, mixer.head_dim)
    _require((own.sinks is not None) == mixer.sinks, "attention without its sinks")
    return {"qkv": own.qkv, "out": own.out}


def _check_experts(plan: Experts, weights: ExpertWeights, hidden: int, parts: Parts) -> None:
    router, of_router, n = plan.router, weights.router, plan.router.experts
    for part, kind in ((weights, ExpertWeights), (of_router, RouterWeights), (of_router.logits, DenseLinear)):
        _exactly(part, kind)
    for what, stack, outputs, inputs, bias in (
        ("gate_up of experts", weights.gate_up, sum(plan.each.up_sizes), hidden, plan.each.bias),
        ("down of experts", weights.down, hidden, plan.each.inner, plan.each.bias),
        ("router", StackedLinear(of_router.logits, 1, n), n, hidden, router.bias),
    ):
        _exactly(stack, StackedLinear)
        _require(stack.outputs == outputs, f"{what} of {stack.outputs} outputs, where {outputs} are known")
        _linear(what, stack.whole, stack.n * outputs, inputs, parts | {DenseLinear})
        assert isinstance(stack.whole, DenseLinear | Int8Linear | Fp8Linear | CodedLinear)
        _require((stack.whole.bias is not None) == bias, f"a bias of {what}")
    _require(weights.gate_up.n == weights.down.n == n, f"{weights.gate_up.n} experts, where {n} are known")
    _sized("counters of experts", weights.taken, n)
    for what, tensor, there, width in (
        ("corrections", of_router.correction, router.correction, n),
        ("scale", of_router.scale, router.of_stream, hidden),
        ("scales of experts", of_router.expert_scales, router.expert_scales, n),
    ):
        _require((tensor is not None) == there, f"a router without its {what}")
        if tensor is not None:
            _sized(what, tensor, width)
    _norm("norm of experts", weights.norm, plan.norm, hidden)
    _norm("out_norm of experts", weights.out_norm, plan.out_norm, hidden)
    _norm("dense_out_norm", weights.dense_out_norm, plan.dense_out_norm, hidden)
    _require((weights.dense_gate is not None) == plan.dense_gate, "a dense feed-forward without its gate")
    if weights.dense_gate is not None:
        _exactly(weights.dense_gate, DenseLinear)
        _sized("gate of a dense feed-forward", weights.dense_gate.weight, 1, hidden)


_NAMES = LLAMA


def _check_encoder(encoder: VisionEncoder) -> None:
    config = encoder.config
    _exactly(encoder, VisionEncoder)
    _exactly(config, VisionConfig)
    _exactly(config.geometry, CropGeometry)
    _require(config.dim % config.heads == 0, f"{config.heads} heads over {config.dim}")
    _require(len(encoder.layers) == config.layers, f"{len(encoder.layers)} layers of {config.layers}")
    _sized("positions", encoder.positions, 1, encoder.n_positions, config.dim)


def _linear(what: str, linear: object, outputs: int, inputs: int, parts: Parts) -> None:
    _one_of(linear, parts)
    assert isinstance(linear, DenseLinear | Int8Linear | Fp8Linear | CodedLinear)
    if isinstance(linear, CodedLinear):
        _coded(what, linear.weight, outputs, inputs)
    else:
        _sized(what, linear.weight, outputs, inputs)
    if linear.bias is not None:
        _sized(f"bias of {what}", linear.bias, outputs)
    if isinstance(linear, Int8Linear | Fp8Linear):
        _require(linear.scale.numel() == outputs, f"scale of {what} of size {list(linear.scale.shape)}")


def _coded(what: str, weight: object, outputs: int, inputs: int) -> None:
    _exactly(weight, Coded)
    assert isinstance(weight, Coded)
    form = weight.form
    _exactly(form, Form)
    found = [form.outputs, form.inputs]
    _require(found == [outputs, inputs], f"{what} of size {found}, where {[outputs, inputs]} are known")
    _sized(f"codes of {what}", weight.codes, outputs, form.code_bytes)
    _sized(f"scales of {what}", weight.scales, outputs, form.groups)
    if form.zeros is not None:
        _sized(f"zeros of {what}", weight.zeros, outputs, form.groups)
    if form.multiplier:
        _sized(f"multipliers of {what}", weight.multiplier, outputs)


def _norm(what: str, weights: object, plan: Norm | None, width: int) -> None:
    if weights is None and plan is None:
        return
    _require(plan is not None and weights is not None, f"{what} without its plan, or without weights")
    assert plan is not None
    _exactly(weights, NormWeights)
    assert isinstance(weights, NormWeights)
    for tensor, there in ((weights.weight, plan.weight), (weights.bias, plan.bias)):
        _require((tensor is not None) == there, f"{what}, which has not the weights of its plan")
        if tensor is not None:
            _sized(what, tensor, width)


def _sized(what: str, tensor: object, *shape: int) -> None:
    found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    _require(found == list(shape), f"{what} of size {found}, where {list(shape)} are known")


def _one_of(part: object, parts: Parts) -> None:
    """It is of exactly one of these types, and has no attributes of its own."""
    _require(type(part) in parts, f"the class {type(part).__name__}")
    _require(not getattr(part, "__dict__", None), f"attributes of one {type(part).__name__}")
    if type(part) in _FIELDS:
        _exactly(part, type(part))


def _exactly(part: object, known: type) -> None:
    """It is of this type, and of no subclass, and the type has only known fields."""
    _require(type(part) is known, f"the class {type(part).__name__}")
    new = [field.name for field in fields(known) if field.name not in _FIELDS[known].split()]
    _require(not new, f"{', '.join(new)} of the class {known.__name__}")


def _require(known: bool, what: str) -> None:
    if not known:
        raise _UnknownError(what)

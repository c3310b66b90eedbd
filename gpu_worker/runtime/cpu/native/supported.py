"""The plans that the C code computes. A value of a plan that is not listed is refused, and so is a new field."""

from __future__ import annotations

from collections.abc import Sequence

from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.fast_paths import ANY, TABLE, Parts, Values, supports
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.plan import (
    Attention,
    FeedForward,
    Growth,
    Layer,
    ModelPlan,
    Norm,
    PerLayerInput,
    Rotary,
)
from petiole.gpu_worker.models.weights.coded import CodedLinear
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear
from petiole.gpu_worker.runtime.cpu.native.products.weights import unknown_form

PARTS: Parts = frozenset({TorchKernels, DenseLinear, Int8Linear, CodedLinear})

_BOTH = {True, False}
_ACTIVATIONS = {"silu", "gelu", "gelu_tanh"}
VALUES: Values = {
    ModelPlan: {
        "architecture": ANY,
        "vocab_size": ANY,
        "hidden_size": ANY,
        "norm": {None, Norm},
        "max_position": ANY,
        "tied_head": _BOTH,
        "head_bias": _BOTH,
        "embedding_factor": ANY,
        "embedding_norm": {None, Norm},
        "learned_positions": ANY,
        "token_types": ANY,
        "logits_factor": ANY,
        "logits_softcap": ANY,
        "per_layer": {None, PerLayerInput},
        "dtype": ANY,
        "eos_token_ids": ANY,
    },
    Layer: {
        "mixer": {Attention},
        "feed_forward": {FeedForward},
        "mixer_norm": {None, Norm},
        "mixer_out_norm": {None, Norm},
        "feed_forward_norm": {None, Norm},
        "feed_forward_out_norm": {None, Norm},
        "parallel": _BOTH,
        "post_norm": _BOTH,
        "residual": ANY,
        "scalar": _BOTH,
    },
    Attention: {
        "heads": ANY,
        "kv_heads": ANY,
        "head_dim": ANY,
        "scale": ANY,
        "rotary": {None, Rotary},
        "window": ANY,
        "mask": {"causal", "prefix", "bidirectional"},
        "q_norm": {None, Norm},
        "k_norm": {None, Norm},
        "v_norm": {None, Norm},
        "norm_whole": _BOTH,
        "qkv_bias": _BOTH,
        "out_bias": _BOTH,
        "softcap": ANY,
        "sinks": _BOTH,
        "output_gate": _BOTH,
        "keys_of": ANY,
        "values_are_keys": _BOTH,
        "query_growth": {None, Growth},
    },
    Rotary: TABLE,
    Growth: {"beta": ANY, "length": ANY},
    FeedForward: {
        "inner": ANY,
        "activation": _ACTIVATIONS,
        "gated": _BOTH,
        "bias": _BOTH,
        "clamp": ANY,
    },
    PerLayerInput: {
        "width": ANY,
        "vocab_size": ANY,
        "norm": {Norm},
        "layer_norm": {Norm},
        "activation": _ACTIVATIONS,
        "embedding_factor": ANY,
        "projection_factor": ANY,
        "factor": ANY,
    },
    Norm: {"kind": {"rms", "layer"}, "eps": ANY, "weight": _BOTH, "bias": _BOTH, "offset": ANY},
}
"""By class and field. What is asked of several fields together, and of sizes: `unknown_layers`."""

_MOST_HEAD = 512


def unknown(decoder: object) -> str | None:
    """What the C code does not compute of a decoder; None: it computes all of it."""
    reason = supports(decoder, VALUES, PARTS).reason
    if reason is not None:
        return reason
    assert isinstance(decoder, Decoder)
    plan = decoder.plan
    takes_more = decoder.images is not None or decoder.value_tokens is not None
    if plan.tied_head and takes_more:  # the head's weights are rearranged, and inputs would be embedded by torch
        return "a tied head beside other inputs than tokens"
    if plan.per_layer is not None and plan.per_layer.width % 2:
        return f"per-layer inputs of {plan.per_layer.width} numbers"
    projection = None if decoder.per_layer is None else decoder.per_layer.projection
    found = unknown_codes(decoder.layers, decoder.head, projection)
    return found or unknown_layers(plan.layers, plan.hidden_size, lanes=16)


def unknown_codes(layers: Sequence[LayerWeights], *others: object) -> str | None:
    """What the C code does not multiply of the quantised weights of layers and of other linear maps."""
    for i, weights in enumerate(layers):
        mixer, fed, per_layer = weights.mixer, weights.feed_forward, weights.per_layer
        linears = [mixer.qkv, mixer.out, fed.gate_up, fed.down]
        linears += [] if per_layer is None else [per_layer.gate, per_layer.out]
        if (found := _unknown_codes(linears)) is not None:
            return f"{found} (layer {i})"
    return _unknown_codes(others)


def _unknown_codes(linears: Sequence[object]) -> str | None:
    coded = (linear.weight.form for linear in linears if isinstance(linear, CodedLinear))
    return next((found for form in coded if (found := unknown_form(form)) is not None), None)


def unknown_layers(layers: Sequence[Layer], hidden: int, lanes: int) -> str | None:
    """What the C code does not compute of these layers together. lanes: the size of heads must be a multiple."""
    if not layers:
        return "a model without layers"
    if hidden % 2:
        return f"a model of {hidden} numbers"
    masks = {layer.mixer.mask for layer in layers}
    if masks >= {"prefix", "bidirectional"}:
        return "layers with prefixes beside bidirectional ones"
    for i, layer in enumerate(layers):
        mixer = layer.mixer
        found = _unknown_layer(layer, lanes)
        if found is None and mixer.keys_of is not None:
            found = _unknown_source(mixer, layers[: mixer.keys_of + 1] if 0 <= mixer.keys_of < i else ())
        if found is not None:
            return f"{found} (layer {i})"
    return None


def _unknown_layer(layer: Layer, lanes: int) -> str | None:
    mixer = layer.mixer
    if layer.feed_forward.inner % 2:
        return f"a feed-forward of {layer.feed_forward.inner} numbers"
    if mixer.head_dim % lanes or mixer.head_dim > _MOST_HEAD:
        return f"heads of {mixer.head_dim} numbers"
    if mixer.heads % mixer.kv_heads:
        return f"{mixer.heads} heads over {mixer.kv_heads} of keys"
    if mixer.rotary is not None and (mixer.rotary.dims % 2 or mixer.rotary.dims > mixer.head_dim):
        return f"a rotation of {mixer.rotary.dims} of {mixer.head_dim} numbers"
    if mixer.norm_whole and mixer.output_gate:
        return "a norm over all heads that have gates"
    if layer.parallel and layer.post_norm:
        return "a parallel layer whose norms stand behind the addition"
    return None


def _unknown_source(mixer: Attention, layers: Sequence[Layer]) -> str | None:
    """Why a mixer cannot read the keys and values of the last of these layers."""
    source = layers[-1].mixer if layers else None
    same = source is not None and (source.kv_heads, source.head_dim) == (mixer.kv_heads, mixer.head_dim)
    return None if same and source is not None and source.keys_of is None else f"the keys of layer {mixer.keys_of}"

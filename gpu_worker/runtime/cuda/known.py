"""The plans that CUDA computes: which attention at all, which layers in captured steps, and which in fused
products. See `models.fast_paths`."""

from __future__ import annotations

from petiole.gpu_worker.models.fast_paths import ANY, TABLE, Values
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

_ATTENTION: Values = {
    Attention: {
        "heads": ANY,
        "kv_heads": ANY,
        "head_dim": ANY,
        "scale": ANY,
        "rotary": {None, Rotary},
        "window": ANY,
        "mask": {"causal", "prefix"},
        "q_norm": {None, Norm},
        "k_norm": {None, Norm},
        "v_norm": {None, Norm},
        "norm_whole": ANY,
        "qkv_bias": ANY,
        "out_bias": ANY,
        "softcap": ANY,
        "sinks": {False},
        "output_gate": ANY,
        "keys_of": ANY,
        "values_are_keys": ANY,
        "query_growth": {None, Growth},
    },
    Norm: {"kind": {"rms", "layer"}, "eps": ANY, "weight": ANY, "bias": ANY, "offset": ANY},
    Growth: {"beta": ANY, "length": ANY},
    Rotary: TABLE,
}

ATTENTION: Values = _ATTENTION
"""What FlashInfer computes, with `fused.layers`. The rest is refused on CUDA: there is no other attention."""

CAPTURED: Values = {
    **_ATTENTION,
    ModelPlan: {
        "architecture": ANY,
        "vocab_size": ANY,
        "hidden_size": ANY,
        "norm": {None, Norm},
        "max_position": ANY,
        "tied_head": ANY,
        "head_bias": ANY,
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
        "parallel": ANY,
        "post_norm": ANY,
        "residual": ANY,
        "scalar": ANY,
    },
    FeedForward: {
        "inner": ANY,
        "activation": {"silu", "gelu", "gelu_tanh"},
        "gated": ANY,
        "bias": ANY,
        "clamp": ANY,
    },
    PerLayerInput: dict.fromkeys(
        ("width", "vocab_size", "activation", "embedding_factor", "projection_factor", "factor"), ANY
    )
    | {"norm": {Norm}, "layer_norm": {Norm}},
}
"""What may be captured: a forward of the decoder, which the host does not look into."""

ENCODED: Values = {
    **CAPTURED,
    Attention: {**CAPTURED[Attention], "rotary": {None}, "mask": {"bidirectional"}},
}
"""Encoders of crops that may be captured: their attention is torch's."""

FUSED: Values = {
    **CAPTURED,
    ModelPlan: {
        **CAPTURED[ModelPlan],
        "norm": ANY,
        "embedding_norm": {None},
        "learned_positions": {0},
        "token_types": {0},
        "per_layer": {None},
    },
    Layer: {
        **CAPTURED[Layer],
        "mixer_norm": {Norm},
        "mixer_out_norm": {None},
        "feed_forward_norm": {Norm},
        "feed_forward_out_norm": {None},
        "parallel": {False},
        "post_norm": {False},
        "residual": {1.0},
        "scalar": {False},
    },
    FeedForward: {**CAPTURED[FeedForward], "activation": {"silu"}, "gated": {True}, "clamp": {0.0}},
    Norm: {**CAPTURED[Norm], "kind": {"rms"}, "weight": {True}, "bias": {False}},
}
"""What `fused.products` computes."""

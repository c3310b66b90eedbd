"""The plans that CUDA computes: which attention at all, which layers in captured steps, and which in fused
products. See `models.fast_paths`."""

from __future__ import annotations

from petiole.gpu_worker.models.fast_paths import ANY, TABLE, Values
from petiole.gpu_worker.models.plan import Attention, FeedForward, Layer, ModelPlan, Norm, Rotary

_ATTENTION: Values = {
    Attention: {
        "heads": ANY,
        "kv_heads": ANY,
        "head_dim": ANY,
        "scale": ANY,
        "rotary": {Rotary},
        "window": ANY,
        "mask": {"causal", "prefix"},
        "q_norm": {None, Norm},
        "k_norm": {None, Norm},
        "v_norm": {None},
        "norm_whole": {False},
        "qkv_bias": ANY,
        "out_bias": ANY,
        "softcap": {0.0},
        "sinks": {False},
        "output_gate": {False},
        "keys_of": {None},
        "values_are_keys": {False},
        "query_growth": {None},
    },
    Norm: {"kind": {"rms", "layer"}, "eps": ANY, "weight": {True}, "bias": ANY, "offset": {0.0}},
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
        "norm": {Norm},
        "max_position": ANY,
        "tied_head": ANY,
        "head_bias": ANY,
        "embedding_factor": {1.0},
        "embedding_norm": {None},
        "learned_positions": {0},
        "token_types": {0},
        "logits_factor": {1.0},
        "logits_softcap": {0.0},
        "side": {None},
        "dtype": ANY,
        "eos_token_ids": ANY,
    },
    Layer: {
        "mixer": {Attention},
        "feed_forward": {FeedForward},
        "mixer_norm": {Norm},
        "mixer_out_norm": {None},
        "feed_forward_norm": {None, Norm},
        "feed_forward_out_norm": {None},
        "parallel": {True, False},
        "post_norm": {False},
        "residual": {1.0},
        "scalar": {False},
    },
    FeedForward: {
        "inner": ANY,
        "activation": {"silu", "gelu_tanh"},
        "gated": {True, False},
        "bias": ANY,
        "clamp": {0.0},
    },
}
"""What may be captured: a forward of the decoder, which the host does not look into."""

ENCODED: Values = {
    **CAPTURED,
    Attention: {**CAPTURED[Attention], "rotary": {None}, "mask": {"bidirectional"}},
}
"""Encoders of crops that may be captured: their attention is torch's."""

FUSED: Values = {
    **CAPTURED,
    Layer: {**CAPTURED[Layer], "feed_forward_norm": {Norm}, "parallel": {False}},
    FeedForward: {**CAPTURED[FeedForward], "activation": {"silu"}, "gated": {True}},
    Norm: {**CAPTURED[Norm], "kind": {"rms"}, "bias": {False}},
}
"""What `fused.products` computes."""

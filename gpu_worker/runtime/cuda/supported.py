"""The plans that CUDA computes: which attention at all, which layers in captured steps, and which in fused
products. See `models.fast_paths`."""

from __future__ import annotations

from typing import Literal

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.models.checkpoint.codes import E2M1, SIGNED, UNSIGNED
from petiole.gpu_worker.models.fast_paths import ANY, COMMON, Values, changed
from petiole.gpu_worker.models.plan import (
    Attention,
    DeltaNet,
    Experts,
    FeedForward,
    Latent,
    Layer,
    ModelPlan,
    Norm,
    ShortConvolution,
)
from petiole.gpu_worker.models.weights.quantized import RUN, CodeLayout, in_eight_bits, plain_form


def tried(kernels: Literal["split", "codes", "rows", "chunks"]) -> bool:
    """Whether these kernels, which no card has timed, compute: the switch `untimed` says so. `bench.gpu` decides
    about each: it becomes the default, or it goes."""
    return switch("untimed") in {"on", kernels}


ATTENTION: Values = changed(
    COMMON,
    {
        Attention: {"latent": {None, Latent}},
        Latent: {**dict.fromkeys(("rank", "own", "value", "query_rank"), ANY), "norm": {Norm}},
    },
)
"""What FlashInfer computes, with `fused.layers`. The rest is refused on CUDA: there is no other attention."""

CAPTURED: Values = changed(
    ATTENTION,
    {
        Layer: {"mixer": {Attention, DeltaNet, ShortConvolution}, "experts": {None, Experts}},
        Experts: {
            **dict.fromkeys(("router", "dense_gate"), ANY),
            **{name: {None, Norm} for name in ("norm", "out_norm", "dense_out_norm")},
            "each": {FeedForward},
        },
        DeltaNet: {
            **dict.fromkeys(
                ("key_heads", "value_heads", "key_dim", "value_dim", "kernel", "grouped", "tiled"), ANY
            ),
            "norm": {Norm},
        },
        ShortConvolution: dict.fromkeys(("channels", "kernel", "bias"), ANY),
    },
)
"""What may be captured: a forward of the decoder, which the host does not look into."""

ENCODED = changed(
    CAPTURED, {Attention: {"rotary": {None}, "mask": {"bidirectional"}, "sinks": {False}, "latent": {None}}}
)
"""Encoders of crops that may be captured: their attention is torch's."""


def has_kernel(form: CodeLayout) -> bool:
    """Whether `linear.grouped` computes products with such codes."""
    group = form.group == form.inputs or (form.group >= 16 and form.group.bit_count() == 1)
    whole_runs = not form.table or form.inputs % RUN == 0
    plain = not form.steps and not form.offsets and form.bits != 6
    return plain and group and whole_runs and form.table in ((), SIGNED, UNSIGNED, E2M1)


def with_kernel(form: CodeLayout) -> CodeLayout:
    """The form without steps and offsets, or the same in eight bits if only that has a kernel."""
    form = plain_form(form)
    wider = None if has_kernel(form) else in_eight_bits(form)
    return wider if wider is not None and has_kernel(wider) else form


FUSED = changed(
    CAPTURED,
    {
        ModelPlan: {
            "norm": ANY,
            "embedding_norm": {None},
            "learned_positions": {0},
            "token_types": {0},
            "per_layer": {None},
        },
        Layer: {
            "mixer": {Attention},
            "experts": {None},
            "feed_forward": {FeedForward},
            "mixer_norm": {Norm},
            "mixer_out_norm": {None},
            "feed_forward_norm": {Norm},
            "feed_forward_out_norm": {None},
            "parallel": {False},
            "post_norm": {False},
            "residual": {1.0},
            "scalar": {False},
        },
        Attention: {"latent": {None}},
        FeedForward: {"activation": {"silu"}, "gated": {True}, "clamp": {0.0}, "slope": {1.0}, "up_offset": {0.0}},
        Norm: {"kind": {"rms"}, "weight": {True}, "bias": {False}},
    },
)
"""What `linear.decode` computes."""

SPLIT_K = changed(
    FUSED,
    {
        ModelPlan: {name: COMMON[ModelPlan][name] for name in ("embedding_norm", "learned_positions")},
        Layer: {
            name: COMMON[Layer][name]
            for name in ("mixer_norm", "mixer_out_norm", "feed_forward_norm", "feed_forward_out_norm")
        }
        | {"parallel": {True, False}, "residual": ANY, "scalar": {True, False}},
        FeedForward: {name: COMMON[FeedForward][name] for name in ("activation", "gated")},
        Norm: COMMON[Norm],
    },
)
"""What `linear.split_k` computes."""

"""Qwen2 and 2.5, with biases on queries, keys and values; Qwen3, with norms of queries and keys, dense or with
experts; and the text part of Qwen3-VL, whose rotations by three axes are one for text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Attention, Dense, Experts, FeedForward, ModelPlan, Norm, Pooling


def qwen2(raw: JsonObject) -> ModelPlan:
    return _plan(raw, reading.usual_attention(raw, reading.head_dim(raw), qkv_bias=True))


def qwen3(raw: JsonObject) -> ModelPlan:
    norm, biases = Norm(eps=reading.number(raw, "rms_norm_eps", 1e-6)), bool(raw.get("attention_bias", False))
    width = reading.head_dim(raw, default=128)
    mixer = reading.usual_attention(raw, width, q_norm=norm, k_norm=norm, qkv_bias=biases, out_bias=biases)
    return _plan(raw, mixer)


def _plan(raw: JsonObject, mixer: Attention) -> ModelPlan:
    sizes = reading.windows(raw, windowed=bool(raw.get("use_sliding_window", False)))
    return reading.usual_plan(raw, reading.usual_layers(raw, mixer, sizes))


def qwen3_moe(raw: JsonObject) -> ModelPlan:
    """Qwen3 whose layers have experts, but for those in `mlp_only_layers` and those between two sparse ones."""
    dense = qwen3(raw)
    router = reading.router(
        raw, "num_experts", "num_local_experts", normalised=bool(raw.get("norm_topk_prob", False))
    )
    inner = reading.whole(raw, "moe_intermediate_size", 2 * reading.MAX_WIDTH)
    experts = Experts(router, FeedForward(inner, reading.activation(raw, ("silu",))))
    every = reading.whole(raw, "decoder_sparse_step", reading.MAX_LAYERS, 1)
    alone = raw.get("mlp_only_layers") or ()
    layers = (
        layer if i in alone or (i + 1) % every else replace(layer, feed_forward=None, experts=experts)
        for i, layer in enumerate(dense.layers)
    )
    return replace(dense, layers=tuple(layers))


def qwen3_vl(outer: JsonObject) -> ModelPlan:
    return qwen3(reading.text_part(outer))


def pooled(plan: Callable[[JsonObject], ModelPlan]) -> Callable[[JsonObject], ModelPlan]:
    """Without a head: a model of texts, of which the last token is pooled unless its files say otherwise."""
    return lambda raw: replace(plan(raw), pooling=Pooling("last"))


def scoring(plan: Callable[[JsonObject], ModelPlan]) -> Callable[[JsonObject], ModelPlan]:
    """With a head for scores on the last token."""

    def scored(raw: JsonObject) -> ModelPlan:
        made, labels = plan(raw), reading.labels(raw)
        head = Dense("score", made.hidden_size, len(labels), bias=False)
        return replace(made, pooling=Pooling("last", (head,), labels=labels, scale=reading.scale(raw)))

    return scored


FAMILIES = (
    Family(("Qwen2ForCausalLM",), qwen2),
    Family(("Qwen3ForCausalLM",), qwen3),
    Family(("Qwen3MoeForCausalLM",), qwen3_moe),
    Family(("Qwen2Model",), pooled(qwen2)),
    Family(("Qwen3Model",), pooled(qwen3)),
    Family(("Qwen3ForSequenceClassification",), scoring(qwen3)),
    Family(("Qwen3VLForConditionalGeneration",), qwen3_vl, reading.WRAPPED),
)

"""Qwen2 and 2.5, with biases on queries, keys and values; Qwen3, with norms of queries and keys; dense or with
experts; Qwen2.5-VL and Qwen3-VL; and the text part of Qwen2-VL, whose rotation by three axes is one for text."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys, towers
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import MAX_POSITION, Attention, Experts, FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.vision.reading import with_eyes
from petiole.gpu_worker.models.weights.names import Fused, Names

SHARED = Names(
    beside_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    beside_down=("mlp.shared_expert.down_proj",),
)
SEEING = config_keys.SEEING
VL_MOE = replace(SEEING, fused=Fused(input_major=True))


def qwen2(raw: JsonObject) -> ModelPlan:
    return _plan(raw, config_keys.usual_attention(raw, config_keys.head_dim(raw), qkv_bias=True))


def qwen3(raw: JsonObject) -> ModelPlan:
    plan = _qwen3(raw)
    return config_keys.with_head(raw, plan, plan.layers[-1])


def _qwen3(raw: JsonObject) -> ModelPlan:
    norm, biases = Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-6)), bool(raw.get("attention_bias", False))
    width = config_keys.head_dim(raw)
    mixer = config_keys.usual_attention(raw, width, q_norm=norm, k_norm=norm, qkv_bias=biases, out_bias=biases)
    return _plan(raw, mixer)


def _plan(raw: JsonObject, mixer: Attention) -> ModelPlan:
    sizes = config_keys.windows(raw, windowed=bool(raw.get("use_sliding_window", False)))
    return config_keys.usual_plan(raw, config_keys.usual_layers(raw, mixer, sizes))


def qwen2_moe(raw: JsonObject) -> ModelPlan:
    """Qwen2 whose layers have experts beside one that every position takes, behind a gate."""
    raw, local = {"num_experts_per_tok": 4, **raw}, bool(raw.get("use_sliding_window", False))
    first = config_keys.whole(raw, "max_window_layers", MAX_POSITION, 28, low=0) if local else 0
    kinds = [
        config_keys.SLIDING if i % 2 == 0 and i < first else config_keys.FULL
        for i in range(config_keys.n_layers(raw))
    ]
    width, biases = config_keys.head_dim(raw), bool(raw.get("qkv_bias", True))
    mixer = config_keys.usual_attention(raw, width, qkv_bias=biases)
    sizes = config_keys.windows(raw, windowed=local, default=kinds)
    dense = config_keys.usual_plan(raw, config_keys.usual_layers(raw, mixer, sizes))
    shared = config_keys.whole(raw, "shared_expert_intermediate_size", 2 * config_keys.MAX_WIDTH)
    beside = FeedForward(shared, config_keys.activation(raw, ("silu",)))
    return _mixed(raw, dense, beside, normalised=bool(raw.get("norm_topk_prob", False)))


def qwen3_moe(raw: JsonObject) -> ModelPlan:
    return _mixed(raw, _qwen3(raw), None, normalised=bool(raw.get("norm_topk_prob", False)))


def _mixed(raw: JsonObject, dense: ModelPlan, beside: FeedForward | None, *, normalised: bool) -> ModelPlan:
    """With experts in all layers but those in `mlp_only_layers` and those between two sparse ones."""
    router = config_keys.router(raw, "num_experts", "num_local_experts", normalised=normalised)
    inner = config_keys.whole(raw, "moe_intermediate_size", 2 * config_keys.MAX_WIDTH)
    experts = Experts(
        router, FeedForward(inner, config_keys.activation(raw, ("silu",))), dense_gate=beside is not None
    )
    every = config_keys.whole(raw, "decoder_sparse_step", config_keys.MAX_LAYERS, 1)
    alone = config_keys.indices(raw, "mlp_only_layers")
    layers = (
        layer if i in alone or (i + 1) % every else replace(layer, feed_forward=beside, experts=experts)
        for i, layer in enumerate(dense.layers)
    )
    return replace(dense, layers=tuple(layers))


def qwen2_vl(outer: JsonObject) -> ModelPlan:
    return qwen2(config_keys.text_part(outer))


def qwen2_5_vl(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    return config_keys.with_axes(qwen2(raw), lambda rotary: config_keys.in_sections(raw, rotary, (16, 24, 24)))


def qwen3_vl_moe(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    return _mixed(raw, _qwen3_vl(raw), None, normalised=True)


def qwen3_vl(outer: JsonObject) -> ModelPlan:
    return _qwen3_vl(config_keys.text_part(outer))


def _qwen3_vl(raw: JsonObject) -> ModelPlan:
    return config_keys.with_axes(_qwen3(raw), lambda rotary: config_keys.interleaved(raw, rotary, (24, 20, 20)))


FAMILIES = (
    Family(("Qwen2ForCausalLM",), qwen2),
    Family(("Qwen3ForCausalLM",), qwen3),
    Family(("Qwen3MoeForCausalLM",), qwen3_moe),
    Family(("Qwen2MoeForCausalLM",), qwen2_moe, SHARED),
    Family(("Qwen2VLForConditionalGeneration",), qwen2_vl, config_keys.WRAPPED),
    Family(
        ("Qwen2_5_VLForConditionalGeneration",),
        qwen2_5_vl,
        SEEING,
        with_eyes(towers.qwen2_5_vl),
        sees=True,
    ),
    Family(("Qwen3VLForConditionalGeneration",), qwen3_vl, SEEING, with_eyes(towers.qwen3_vl), sees=True),
    Family(("Qwen3VLMoeForConditionalGeneration",), qwen3_vl_moe, VL_MOE, with_eyes(towers.qwen3_vl), sees=True),
)

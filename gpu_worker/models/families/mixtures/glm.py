"""GLM-4.5 and its successors: the first layers are dense, the others have experts beside one that every position
takes. A sigmoid scores experts, and a stored correction changes the choice alone. Half of a head is rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Attention, Experts, FeedForward, ModelPlan, Norm, Router
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    beside_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    beside_down=("mlp.shared_experts.down_proj",),
)


def plan(raw: JsonObject) -> ModelPlan:
    width = config_keys.head_dim(raw)
    norm = Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-5)) if raw.get("use_qk_norm", False) else None
    mixer = config_keys.usual_attention(
        raw,
        width,
        rotary=config_keys.rotary(raw, width, partial=True),
        q_norm=norm,
        k_norm=norm,
        qkv_bias=bool(raw.get("attention_bias", False)),
    )
    first = int(config_keys.number(raw, "first_k_dense_replace", 1))
    return mixed(raw, mixer, router(raw), [i < first for i in range(config_keys.n_layers(raw))])


def mixed(raw: JsonObject, mixer: Attention, router: Router, dense: Sequence[bool]) -> ModelPlan:
    """Layers of which some are dense, and the others have experts beside those that every position takes."""
    layers = config_keys.usual_layers(raw, mixer, (0,) * len(dense))
    inner = config_keys.whole(raw, "moe_intermediate_size", 2 * config_keys.MAX_WIDTH)
    each = FeedForward(inner, config_keys.activation(raw, ("silu",)))
    shared = config_keys.whole(raw, "n_shared_experts", config_keys.MAX_EXPERTS, 1)
    beside = replace(each, inner=inner * shared, bias=bool(raw.get("mlp_bias", False)))
    made = (
        layer if alone else replace(layer, feed_forward=beside, experts=Experts(router, each))
        for layer, alone in zip(layers, dense, strict=True)
    )
    return config_keys.usual_plan(raw, tuple(made))


def router(raw: JsonObject) -> Router:
    return config_keys.router(
        raw,
        "n_routed_experts",
        "num_local_experts",
        score="sigmoid",
        normalised=bool(raw.get("norm_topk_prob", True)),
        factor=config_keys.number(raw, "routed_scaling_factor", 1.0),
        correction=True,
        groups=config_keys.whole(raw, "n_group", config_keys.MAX_EXPERTS, 1),
        best_groups=config_keys.whole(raw, "topk_group", config_keys.MAX_EXPERTS, 1),
    )


FAMILIES = (Family(("Glm4MoeForCausalLM",), plan, NAMES),)

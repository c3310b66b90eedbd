"""GLM-4.5 and its successors: the first layers are dense, the others have experts beside one that every position
takes. A sigmoid scores experts, and a stored correction changes the choice alone. Half of a head is rotated."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Experts, FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names

NAMES = Names(
    beside_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    beside_down=("mlp.shared_experts.down_proj",),
)


def plan(raw: JsonObject) -> ModelPlan:
    raw = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, **raw}
    width = reading.head_dim(raw, default=128)
    norm = Norm(eps=reading.number(raw, "rms_norm_eps", 1e-5)) if raw.get("use_qk_norm", False) else None
    mixer = reading.usual_attention(
        raw,
        width,
        rotary=reading.rotary(raw, width, partial=True),
        q_norm=norm,
        k_norm=norm,
        qkv_bias=bool(raw.get("attention_bias", False)),
    )
    layers = reading.usual_layers(raw, mixer, (0,) * reading.n_layers(raw))
    router = reading.router(
        raw,
        "n_routed_experts",
        "num_local_experts",
        score="sigmoid",
        normalised=bool(raw.get("norm_topk_prob", True)),
        factor=reading.number(raw, "routed_scaling_factor", 1.0),
        correction=True,
        groups=reading.whole(raw, "n_group", reading.MAX_EXPERTS, 1),
        best_groups=reading.whole(raw, "topk_group", reading.MAX_EXPERTS, 1),
    )
    inner = reading.whole(raw, "moe_intermediate_size", 2 * reading.MAX_WIDTH)
    each = FeedForward(inner, reading.activation(raw, ("silu",)))
    shared = reading.whole(raw, "n_shared_experts", reading.MAX_EXPERTS, 1)
    beside = replace(each, inner=inner * shared)
    first = int(reading.number(raw, "first_k_dense_replace", 1))
    mixed = (replace(layer, feed_forward=beside, experts=Experts(router, each)) for layer in layers[first:])
    return reading.usual_plan(raw, (*layers[:first], *mixed))


FAMILIES = (Family(("Glm4MoeForCausalLM",), plan, NAMES),)

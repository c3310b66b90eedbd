"""DeepSeek-V2, V3 and GLM-4.7-Flash: attention over latents, and behind some dense layers experts beside those
that every position takes. V2 scores experts with a softmax, and a group by its best one. The others score with a
sigmoid, and a stored correction changes the choice alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, architecture_of, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.families.mixtures.glm import NAMES, mixed, router
from petiole.gpu_worker.models.plan import Attention, Latent, ModelPlan, Norm, Router

_NORM = Norm(eps=1e-6)
"""The norm of latents, whatever `rms_norm_eps` says."""


def deepseek_v2(raw: JsonObject) -> ModelPlan:
    _check(raw, scoring_func=("softmax",), topk_method=("greedy", "group_limited_greedy"), norm_topk_prob=(False,))
    return mixed(raw, _attention(raw, neighbours=True), _by_softmax(raw), _dense(raw, 0))


def deepseek_v3(raw: JsonObject) -> ModelPlan:
    _check(raw, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    return mixed(raw, _attention(raw), router(raw), _dense(raw, 3))


def glm4_lite(raw: JsonObject) -> ModelPlan:
    _check(raw, scoring_func=("sigmoid",), topk_method=("noaux_tc",))
    n, kinds = config_keys.n_layers(raw), raw.get("mlp_layer_types")
    kinds = ["dense", *["sparse"] * (n - 1)] if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != n or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ModelError(
            f"config.json: mlp_layer_types must be dense or sparse for {n} layers, got {shown(kinds)}"
        )
    return mixed(raw, _attention(raw), router(raw), [kind == "dense" for kind in kinds])


def _check(raw: JsonObject, **known: Sequence[object]) -> None:
    """known: the values of keys that are computed; a missing one is one of them."""
    for key, values in {"use_mla": (True,), "moe_layer_freq": (1,), **known}.items():
        if raw.get(key) is not None and raw[key] not in values:
            limit = " or ".join(str(one).lower() for one in values)
            raise ModelError(
                f"config.json: {key} must be {limit} for {architecture_of(raw)}, got {shown(raw[key])}"
            )


def _dense(raw: JsonObject, default: int) -> list[bool]:
    first = config_keys.number(raw, "first_k_dense_replace", default)
    return [i < first for i in range(config_keys.n_layers(raw))]


def _attention(raw: JsonObject, neighbours: bool | None = None) -> Attention:
    """neighbours: whether they are rotated with each other; None: config.json says that."""

    def size(key: str) -> int:
        return config_keys.whole(raw, key, config_keys.MAX_WIDTH)

    turning, bias = size("qk_rope_head_dim"), bool(raw.get("attention_bias", False))
    if turning % 2:
        raise ModelError(f"config.json: qk_rope_head_dim must be even, for the rotation of pairs, got {turning}")
    ranked = raw.get("q_lora_rank") is not None
    if bias and not ranked:
        raise ModelError("config.json: attention_bias must be false where q_lora_rank is null, got true")
    latent = Latent(
        rank=size("kv_lora_rank"),
        own=size("qk_nope_head_dim"),
        value=size("v_head_dim"),
        query_rank=size("q_lora_rank") if ranked else 0,
        norm=_NORM,
    )
    near = bool(raw.get("rope_interleave", True)) if neighbours is None else neighbours
    rotary = replace(config_keys.rotary(raw, turning), neighbours=near)
    stretched = rotary.kind != "default" and rotary.mscale_all_dim
    return Attention(
        heads=size("num_attention_heads"),
        kv_heads=1,
        head_dim=turning + latent.rank,
        scale=(latent.own + turning) ** -0.5 * (rotary.grown(rotary.mscale_all_dim) ** 2 if stretched else 1.0),
        rotary=rotary,
        qkv_bias=bias,
        out_bias=bias,
        latent=latent,
    )


def _by_softmax(raw: JsonObject) -> Router:
    """The weights are not divided by their sum."""
    method, most = raw.get("topk_method"), config_keys.MAX_EXPERTS
    limited = method == "group_limited_greedy"
    return config_keys.router(
        raw,
        "n_routed_experts",
        "num_experts",
        factor=config_keys.number(raw, "routed_scaling_factor", 1.0),
        groups=config_keys.whole(raw, "n_group", most) if limited else 1,
        best_groups=config_keys.whole(raw, "topk_group", most) if limited else 1,
        of_group=1,
    )


FAMILIES = (
    Family(("DeepseekV2ForCausalLM",), deepseek_v2, NAMES),
    Family(("DeepseekV3ForCausalLM",), deepseek_v3, NAMES),
    Family(("Glm4MoeLiteForCausalLM",), glm4_lite, NAMES),
)

"""Gemma 4: Gemma 3 with plain norms, and a norm of values. Full layers have wide
heads, and in some models values from keys; the last layers may read the keys of earlier ones; the small models
have per-layer inputs, and the one with experts has them beside its dense feed-forwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject, shown
from petiole.gpu_worker.models.families import config_keys, towers
from petiole.gpu_worker.models.families.decoders.gemma3 import NAMES, SEEING, ahead_in, kinds_of, plan_of
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Attention, Experts, FeedForward, ModelPlan, Norm, PerLayerInput
from petiole.gpu_worker.models.vision.reading import GEMMA4 as GEMMA4_SIGHT, with_eyes


def unified(outer: JsonObject) -> ModelPlan:
    """Without per-layer inputs and experts."""
    raw = config_keys.text_part(outer)
    if raw.get("use_bidirectional_attention") == "all":
        raise ModelError("config.json: use_bidirectional_attention must be vision or null, got 'all'")
    return gemma4({"sliding_window": 1024, **raw, "hidden_size_per_layer_input": 0, "enable_moe_block": False})


def seeing(outer: JsonObject) -> ModelPlan:
    """Where config.json says so, the positions of a picture see each other, in layers with a window alone."""
    plan, raw = gemma4(outer), config_keys.text_part(outer)
    ahead = raw.get("use_bidirectional_attention") == "vision"
    return ahead_in(plan, lambda mixer: mixer.window > 0) if ahead else plan


def gemma4(outer: JsonObject) -> ModelPlan:
    raw = config_keys.text_part(outer)
    norm = Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-6))
    if (seen := raw.get("use_bidirectional_attention")) == "all":
        raise ModelError(f"config.json: use_bidirectional_attention must be null or 'vision', got {shown(seen)}")
    if raw.get("attention_bias"):
        raise ModelError("config.json: attention_bias must be false for Gemma 4, got true")
    kinds, shared = (*kinds_of(raw)[:-1], config_keys.FULL), config_keys.or_default(raw, "num_kv_shared_layers", 0)
    if not all(map(_is_layer, config_keys.objects(raw, "per_layer_config").items())):
        limit = "must be objects by numbers of layers"
        raise ModelError(f"config.json: per_layer_config {limit}, got {shown(raw['per_layer_config'])}")
    by_layer = {int(i): values for i, values in (raw.get("per_layer_config") or {}).items()}
    n, from_keys = len(kinds), bool(raw.get("attention_k_eq_v", False))
    window = config_keys.whole(raw, "sliding_window", 2**31 - 1, 512)
    mixers = []
    for i, kind in enumerate(kinds):
        full = kind == config_keys.FULL
        own = None if raw.get("per_layer_config") is None else by_layer.get(i, {})
        n_heads, n_kv_heads, width = _heads4(raw, own, full)
        others = [k for k in range(n - shared) if kinds[k] == kind] if i >= n - shared else []
        if i >= n - shared and not others:
            raise ModelError(f"config.json: num_kv_shared_layers leaves no {kind} for layer {i}, got {shared}")
        mixers.append(
            Attention(
                n_heads,
                n_kv_heads,
                width,
                scale=1.0,
                rotary=config_keys.rotary(raw, width, kind),
                window=0 if full else window,
                q_norm=norm,
                k_norm=norm,
                v_norm=replace(norm, weight=False),
                keys_of=others[-1] if others else None,
                values_are_keys=from_keys and full,
            )
        )
    wide = 2 if raw.get("use_double_wide_mlp") else 1
    inners = tuple(config_keys.inner(raw) * (wide if mixer.keys_of is not None else 1) for mixer in mixers)
    plan = plan_of(raw, norm, tuple(mixers), inners, scalar=True, per_layer=_per_layer(raw, norm))
    if not raw.get("enable_moe_block"):
        return plan
    experts = _experts(raw, norm)
    return replace(plan, layers=tuple(replace(layer, experts=experts) for layer in plan.layers))


def _experts(raw: JsonObject, norm: Norm) -> Experts:
    """Beside the dense feed-forward of every layer, with norms of their own. The router reads the residual."""
    router = config_keys.router(
        raw,
        "num_experts",
        "num_local_experts",
        chosen="top_k_experts",
        normalised=True,
        of_stream=True,
        eps=norm.eps,
        expert_scales=True,
    )
    inner = config_keys.whole(raw, "moe_intermediate_size", 2 * config_keys.MAX_WIDTH)
    act = config_keys.activation(raw, ("gelu_tanh", "gelu", "silu"), key="hidden_activation")
    return Experts(router, FeedForward(inner, act), norm=norm, out_norm=norm, dense_out_norm=norm)


def _heads4(raw: JsonObject, own: JsonObject | None, full: bool) -> tuple[int, int, int]:
    """The heads of queries and of keys of a layer, and their width. own: what the file says of this layer."""
    n_heads, n_kv_heads = config_keys.heads(raw)
    width = config_keys.head_dim(raw)
    most = config_keys.MAX_WIDTH
    if own is not None:
        n_kv_heads = config_keys.whole(own, "num_key_value_heads", most, n_kv_heads)
        return n_heads, n_kv_heads, config_keys.whole(own, "head_dim", most, width)
    if not full:
        return n_heads, n_kv_heads, width
    if raw.get("attention_k_eq_v"):
        n_kv_heads = config_keys.or_default(raw, "num_global_key_value_heads", n_kv_heads, most)
    return n_heads, n_kv_heads, config_keys.or_default(raw, "global_head_dim", 512, most)


def _is_layer(entry: tuple[object, object]) -> bool:
    """Whether an entry of `per_layer_config` is a layer's."""
    return str(entry[0]).isdecimal() and isinstance(entry[1], Mapping)


def _per_layer(raw: JsonObject, norm: Norm) -> PerLayerInput | None:
    key = "hidden_size_per_layer_input"
    width = config_keys.whole({key: raw.get(key, 256) or 0}, key, config_keys.MAX_WIDTH, low=0)
    if not width:
        return None
    return PerLayerInput(
        width=width,
        vocab_size=config_keys.whole(raw, "vocab_size_per_layer_input", MAX_VOCAB, 262_144),
        norm=norm,
        layer_norm=norm,
        activation=config_keys.activation(raw, ("gelu_tanh", "gelu", "silu"), key="hidden_activation"),
        embedding_factor=width**0.5,
        projection_factor=config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH) ** -0.5,
        factor=2**-0.5,
    )


NAMES4 = replace(NAMES, router="router.proj", expert="experts.{}.")

FAMILIES = (
    Family(("Gemma4ForCausalLM",), gemma4, NAMES4, by_layer=("head_dim", "num_key_value_heads")),
    Family(
        ("Gemma4ForConditionalGeneration",),
        seeing,
        replace(NAMES4, tower=SEEING.tower),
        with_eyes(towers.gemma4, GEMMA4_SIGHT),
        by_layer=("head_dim", "num_key_value_heads"),
        sees=True,
    ),
    Family(
        ("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        unified,
        NAMES4,
        by_layer=("head_dim", "num_key_value_heads"),
    ),
)

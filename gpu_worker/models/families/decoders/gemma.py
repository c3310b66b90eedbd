"""Gemma 1: Llama with norms of 1 + w, scaled embeddings and wide heads. Gemma 2: norms after attention and
feed-forward, too, capped scores and logits, and a window in every second layer."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.decoders.gemma3 import NAMES, plan_of
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Attention, ModelPlan, Norm

GEMMA1 = replace(NAMES, mixer_out_norm="", feed_forward_norm="post_attention_layernorm")


def gemma1(raw: JsonObject) -> ModelPlan:
    act = raw.get("hidden_activation") or raw.get("hidden_act")
    norm = _norm(raw)
    plan = plan_of({**raw, "hidden_activation": act}, norm, *_mixers(raw, (0,) * config_keys.n_layers(raw)))
    layers = (replace(layer, mixer_out_norm=None, feed_forward_out_norm=None) for layer in plan.layers)
    return replace(plan, layers=tuple(layers))


def gemma2(raw: JsonObject) -> ModelPlan:
    raw = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **raw}
    kinds = [config_keys.FULL if i % 2 else config_keys.SLIDING for i in range(config_keys.n_layers(raw))]
    sizes = config_keys.windows(raw, windowed=True, default=config_keys.layer_types(raw, kinds))
    return plan_of(raw, _norm(raw), *_mixers(raw, sizes))


def _norm(raw: JsonObject) -> Norm:
    if raw.get("use_bidirectional_attention"):
        raise ModelError("config.json: use_bidirectional_attention must be false, got true")
    return Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-6), offset=1.0)


def _mixers(raw: JsonObject, sizes: tuple[int, ...]) -> tuple[tuple[Attention, ...], tuple[int, ...]]:
    """And the widths of feed-forwards."""
    width, biases = config_keys.head_dim(raw, default=256), bool(raw.get("attention_bias", False))
    mixer = config_keys.usual_attention(
        raw,
        width,
        scale=config_keys.number(raw, "query_pre_attn_scalar", 256 if "sliding_window" in raw else width, low=1e-6)
        ** -0.5,
        qkv_bias=biases,
        out_bias=biases,
        softcap=config_keys.number(raw, "attn_logit_softcapping", 0.0),
    )
    return tuple(replace(mixer, window=size) for size in sizes), (config_keys.inner(raw),) * len(sizes)


FAMILIES = (
    Family(("GemmaForCausalLM",), gemma1, GEMMA1),
    Family(("Gemma2ForCausalLM",), gemma2, NAMES),
)

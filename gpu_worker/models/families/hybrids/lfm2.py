"""LFM2: most layers are short convolutions between two gates, the others attend, with norms of queries and
keys."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import Experts, FeedForward, Layer, Mixer, ModelPlan, Norm, ShortConvolution
from petiole.gpu_worker.models.weights.names import Names, RecurrentNames

CONVOLUTION = "conv"

NAMES = Names(
    norm="embedding_norm",
    out=("self_attn.out_proj",),
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    mixer_norm="operator_norm",
    feed_forward_norm="ffn_norm",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down=("feed_forward.w2",),
    router="feed_forward.gate",
    router_correction="feed_forward.expert_bias",
    expert="feed_forward.experts.{}.",
    expert_gate_up=("w1", "w3"),
    expert_down="w2",
    recurrent=RecurrentNames(inputs=("conv.in_proj",), convolution="conv.conv", out="conv.out_proj"),
)


def plan(raw: JsonObject) -> ModelPlan:
    raw = {**raw, "tie_word_embeddings": raw.get("tie_embedding", raw["tie_word_embeddings"])}
    norm = Norm(eps=config_keys.number(raw, "norm_eps", 1e-5))
    attention = config_keys.usual_attention(raw, config_keys.head_dim(raw), q_norm=norm, k_norm=norm)
    convolution = ShortConvolution(
        channels=config_keys.whole(raw, "hidden_size", config_keys.MAX_WIDTH),
        kernel=config_keys.whole(raw, "conv_L_cache", config_keys.MAX_WIDTH, 3),
        bias=bool(raw.get("conv_bias", False)),
    )
    attending, every = config_keys.indices(raw, "full_attn_idxs"), range(config_keys.n_layers(raw))
    some = raw.get("full_attn_idxs") is not None
    kinds = [CONVOLUTION if some and i not in attending else config_keys.FULL for i in every]
    mixers: list[Mixer] = [
        attention if kind == config_keys.FULL else convolution
        for kind in config_keys.layer_types(raw, kinds, (config_keys.FULL, CONVOLUTION))
    ]
    fed = FeedForward(_inner(raw))
    layers = tuple(Layer(mixer, fed, norm, feed_forward_norm=norm) for mixer in mixers)
    return config_keys.usual_plan(raw, layers, norm=norm)


def moe(raw: JsonObject) -> ModelPlan:
    """All layers but the first have experts, chosen as in GLM."""
    raw = {"num_experts_per_tok": 4, "num_dense_layers": 2, "tie_word_embeddings": True, **raw}
    dense = plan({**raw, "block_auto_adjust_ff_dim": False})
    router = config_keys.router(
        raw,
        "num_experts",
        "num_local_experts",
        score="sigmoid",
        normalised=bool(raw.get("norm_topk_prob", True)),
        factor=config_keys.number(raw, "routed_scaling_factor", 1.0),
        correction=bool(raw.get("use_expert_bias", True)),
    )
    inner = config_keys.whole(raw, "moe_intermediate_size", 2 * config_keys.MAX_WIDTH, 1792)
    first = int(config_keys.number(raw, "num_dense_layers", 2))
    mixed = (
        replace(layer, feed_forward=None, experts=Experts(router, FeedForward(inner)))
        for layer in dense.layers[first:]
    )
    return replace(dense, layers=(*dense.layers[:first], *mixed))


def _inner(raw: JsonObject) -> int:
    """Two thirds of the stored width, times a factor, up to a multiple of a block; or the stored width."""
    key = "block_ff_dim" if raw.get("block_ff_dim") else "intermediate_size"
    inner = config_keys.whole(raw, key, 2 * config_keys.MAX_WIDTH)
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    factor = config_keys.number(raw, "block_ffn_dim_multiplier", 1.0)
    block = config_keys.whole(raw, "block_multiple_of", config_keys.MAX_WIDTH, 256)
    return -(-int(factor * int(2 * inner / 3)) // block) * block


FAMILIES = (Family(("Lfm2ForCausalLM",), plan, NAMES), Family(("Lfm2MoeForCausalLM",), moe, NAMES))

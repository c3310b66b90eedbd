"""LFM2: most layers are short convolutions between two gates, the others attend, with norms of queries and
keys."""

from __future__ import annotations

from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import reading
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import FeedForward, Layer, Mixer, ModelPlan, Norm, ShortConvolution
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
    recurrent=RecurrentNames(inputs=("conv.in_proj",), convolution="conv.conv", out="conv.out_proj"),
)


def plan(raw: JsonObject) -> ModelPlan:
    raw = {"rope_theta": 1_000_000.0, "tie_word_embeddings": raw.get("tie_embedding", True), **raw}
    norm = Norm(eps=reading.number(raw, "norm_eps", 1e-5))
    attention = reading.usual_attention(raw, reading.head_dim(raw), q_norm=norm, k_norm=norm)
    convolution = ShortConvolution(
        channels=reading.whole(raw, "hidden_size", reading.MAX_WIDTH),
        kernel=reading.whole(raw, "conv_L_cache", reading.MAX_WIDTH, 3),
        bias=bool(raw.get("conv_bias", False)),
    )
    attending = raw.get("full_attn_idxs")
    every = range(reading.n_layers(raw))
    kinds = [reading.FULL if attending is None or i in attending else CONVOLUTION for i in every]
    mixers: list[Mixer] = [
        attention if kind == reading.FULL else convolution
        for kind in reading.layer_types(raw, kinds, (reading.FULL, CONVOLUTION))
    ]
    fed = FeedForward(_inner(raw))
    layers = tuple(Layer(mixer, fed, norm, feed_forward_norm=norm) for mixer in mixers)
    return reading.usual_plan(raw, layers, norm=norm)


def _inner(raw: JsonObject) -> int:
    """Two thirds of the stored width, times a factor, up to a multiple of a block; or the stored width."""
    key = "block_ff_dim" if raw.get("block_ff_dim") else "intermediate_size"
    inner = reading.whole(raw, key, 2 * reading.MAX_WIDTH)
    if not raw.get("block_auto_adjust_ff_dim", True):
        return inner
    factor = reading.number(raw, "block_ffn_dim_multiplier", 1.0)
    block = reading.whole(raw, "block_multiple_of", reading.MAX_WIDTH, 256)
    return -(-int(factor * int(2 * inner / 3)) // block) * block


FAMILIES = (Family(("Lfm2ForCausalLM",), plan, NAMES),)

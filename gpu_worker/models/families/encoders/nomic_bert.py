"""NomicBERT: BERT with rotations in place of positions, gates, and no biases but those of norms. Its published
files have keys of their own."""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB, JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.encoders import bert
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import FeedForward, ModelPlan

NAMES = replace(
    bert.NAMES,
    prefixes=("", "bert.", "nomic_bert."),
    embedding_norm="emb_ln",
    layer="encoder.layers.{}.",
    qkv=("attn.Wqkv",),
    out=("attn.out_proj",),
    gate_up=("mlp.fc12", "mlp.fc11"),
    down=("mlp.fc2",),
    mixer_norm="norm1",
    feed_forward_norm="norm2",
)
_KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
_ONLY = {
    "moe_every_n_layers": 0,
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "activation_function": "swiglu",
}
"""Values of the published keys that are computed."""


def nomic(raw: JsonObject) -> ModelPlan:
    for key, only in _ONLY.items():
        if (given := raw.get(key, only)) != only and given is not None:
            raise ModelError(
                f"config.json: {key} must be {only} for {raw['architectures'][0]}, got {shown(given)}"
            )
    usual = {key: raw[own] for key, own in _KEYS.items() if raw.get(own) is not None}
    raw = {"rope_theta": 1000.0, "max_position_embeddings": 2048, **raw, **usual}
    if raw.get("rotary_scaling_factor"):
        trained = raw.get("max_trained_positions", 2048)
        given = {"type": "dynamic", "factor": raw["rotary_scaling_factor"]}
        raw = {**raw, "rope_scaling": given | {"original_max_position_embeddings": trained}}
    types = config_keys.whole(raw, "type_vocab_size", MAX_VOCAB, 2)
    plan = bert.encoder(raw, token_types=types, learned_positions=0)
    (layer,) = set(plan.layers)
    turning = config_keys.rotary(raw, layer.attention.head_dim)
    mixer = replace(layer.attention, rotary=turning, qkv_bias=False, out_bias=False)
    fed = FeedForward(layer.dense.inner, config_keys.activation(raw, ("silu", "gelu", "gelu_tanh")))
    return replace(plan, layers=(replace(layer, mixer=mixer, feed_forward=fed),) * plan.n_layers)


FAMILIES = (Family(("NomicBertModel",), nomic, NAMES),)

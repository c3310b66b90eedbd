"""Every architecture of GGUF files: a small random model, written as llama.cpp's converter would, computes what
transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.harness.driver import Driver
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.gguf.config import config_of
from petiole.gpu_worker.models.checkpoint.gguf.tensor_mapping import ARCHITECTURES
from tests.gpu_worker.models.test_encoders import cosine, made, reference, tokens
from tests.gpu_worker.models.weights.test_quantised_models import Quantised, check
from tests.support.families import LONGROPE, YARN, build_model
from tests.support.gguf_models import grid, save
from tests.support.text_models import write_encoder

pytest.importorskip("gguf")

_LOCAL, _FULL = "sliding_attention", "full_attention"
_PATTERN = [_FULL, _LOCAL, _LOCAL]
_WIDE = {"attention.key_length": 32, "attention.value_length": 32}
_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
_PHI_LONG = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}
_QWEN2_MOE_KEYS = {
    "expert_count": 7,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 48,
}
_QWEN3_MOE_KEYS = {**_WIDE, "expert_count": 7, "expert_used_count": 2, "expert_feed_forward_length": 32}
_MINISTRAL3 = YARN | {
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_WHOLE_BLOCKS = {"linear_value_head_dim": 32}
"""Heads of values can be moved in Q8_0."""
_DELTA_NET_KEYS = {
    **_WIDE,
    "rope.dimension_count": 8,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 128,
    "full_attention_interval": 2,
}
_GEMMA4_KEYS = {
    **_WIDE,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": 7,
    "attention.sliding_window_pattern": [True, True, False] * 2,
    "final_logit_softcapping": 5.0,
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "rope.dimension_count": 32,
}
_COHERE_KEYS = {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5}
_SCAN_KEYS = {"ssm.conv_kernel": 4, "ssm.state_size": 24, "ssm.time_step_rank": 8, "ssm.inner_size": 128}
_GRANITE_KEYS = _SCAN_KEYS | {
    "attention.head_count_kv": [0, 2, 0],
    "rope.dimension_count": 16,
    "rope.scaling.finetuned": False,
    "attention.scale": 0.2,
    "residual_scale": 0.4,
    "expert_shared_feed_forward_length": 80,
}
_NEMOTRON_KEYS = _SCAN_KEYS | _WIDE | {"ssm.group_count": 2, "rope.dimension_count": 16}
_LATENTS = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 16}
_LATENT_KEYS = {
    "attention.head_count_kv": 1,
    "attention.key_length": 40,
    "attention.value_length": 32,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 16,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "expert_count": 12,
    "expert_used_count": 3,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.5,
}
_OLDER_KEYS = {  # a head of keys for each of queries, and no sizes of MLA's own
    **{key: value for key, value in _LATENT_KEYS.items() if not key.endswith("_mla")},
    "attention.head_count_kv": 4,
    "attention.value_length": 16,
}
_STRENGTH = {"mscale": 0.707, "mscale_all_dim": 0.707}
_YARN_KEYS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 64,
    "rope.scaling.yarn_log_multiplier": 0.0707,
}
_SIGMOID_KEYS = {
    "attention.q_lora_rank": 40,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "leading_dense_block_count": 1,
}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "deepseek-v2": (
        "deepseek-v2",
        "deepseek2",
        _LATENTS,
        _LATENT_KEYS
        | {
            "attention.q_lora_rank": 40,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
            "leading_dense_block_count": 1,
        },
    ),
    "deepseek-v2-lite": (
        "deepseek-v2-lite",
        "deepseek2",
        {**_LATENTS, "rope_parameters": YARN | _STRENGTH},
        _LATENT_KEYS | _YARN_KEYS | {"leading_dense_block_count": 0},
    ),
    "deepseek-v2-lite-older": (
        "deepseek-v2-lite",
        "deepseek2",
        {**_LATENTS, "in_one": True, "rope_parameters": YARN | _STRENGTH},
        _OLDER_KEYS | _YARN_KEYS | {"leading_dense_block_count": 0, "expert_gating_func": 1},
    ),
    "deepseek-v3": (
        "deepseek-v3",
        "deepseek2",
        {**_LATENTS, "rope_parameters": YARN | _STRENGTH},
        _LATENT_KEYS | _YARN_KEYS | _SIGMOID_KEYS | {"expert_group_count": 3, "expert_group_used_count": 2},
    ),
    "glm-4.7-flash": (
        "glm4-moe-lite",
        "deepseek2",
        {**_LATENTS, "rope_interleave": True},
        _LATENT_KEYS | _SIGMOID_KEYS | {"expert_shared_count": 1},
    ),
    "llama": ("llama2", "llama", {}, {}),
    "mixtral": ("mixtral", "llama", {}, {"expert_count": 5, "expert_used_count": 2, "rope.freq_base": 1e6}),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen2moe": (
        "qwen2-moe",
        "qwen2moe",
        {"mlp_only_layers": []},
        _QWEN2_MOE_KEYS,
    ),
    "qwen3.5": ("qwen3.5", "qwen35", _WHOLE_BLOCKS, _DELTA_NET_KEYS),
    "qwen3.5-moe": ("qwen3.5-moe", "qwen35moe", _WHOLE_BLOCKS, _QWEN2_MOE_KEYS | _DELTA_NET_KEYS),
    "qwen3-next": (
        "qwen3-next",
        "qwen3next",
        {"mlp_only_layers": [], **_WHOLE_BLOCKS},
        _QWEN2_MOE_KEYS | _DELTA_NET_KEYS,
    ),
    "qwen3": ("qwen3", "qwen3", {}, {"attention.key_length": 32, "attention.value_length": 32}),
    "qwen2vl": ("qwen2", "qwen2vl", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": ("qwen3", "qwen3vl", {}, {**_WIDE, "n_deepstack_layers": 3}),
    "qwen3moe": ("qwen3-moe", "qwen3moe", {"mlp_only_layers": []}, _QWEN3_MOE_KEYS),
    "qwen3vlmoe": ("qwen3-moe", "qwen3vlmoe", {"mlp_only_layers": []}, _QWEN3_MOE_KEYS),
    "ministral3": (
        "ministral3",
        "mistral3",
        {"rope_parameters": _MINISTRAL3},
        _WIDE
        | {
            "attention.temperature_scale": 0.1,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "ministral3-plain": (
        "ministral3",
        "mistral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "llama_4_scaling_beta": 0.0,
                "original_max_position_embeddings": 16,
            }
        },
        _WIDE,
    ),
    "seed-oss": ("seed-oss", "seed_oss", {}, _WIDE),
    "seed-oss-biases": ("seed-oss-biases", "seed_oss", {}, {}),
    "ernie4.5": ("ernie4.5", "ernie4_5", {}, _WIDE),
    "ernie4.5-biases": ("ernie4.5-biases", "ernie4_5", {}, {}),
    "exaone4": (
        "exaone4",
        "exaone4",
        {},
        {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, True, False]},
    ),
    "exaone4-full": ("exaone4-full", "exaone4", {}, {}),
    "gemma": ("gemma1", "gemma", {}, _WIDE),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 32, "layer_types": [_LOCAL, _FULL, _LOCAL], **_CAPS},
        {**_WIDE, **_CAPS, "attention.sliding_window": 7},
    ),
    "gemma3": (
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 32, "layer_types": _PATTERN},
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [False, True, True],
            "rope.freq_base": 1e6,
        },
    ),
    "gemma3-every-second": (
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 32, "layer_types": [_LOCAL, _FULL, _LOCAL]},
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": 2,
            "rope.freq_base": 1e6,
        },
    ),
    "gemma4": ("gemma4", "gemma4", {}, _GEMMA4_KEYS),
    "gemma4-values-from-keys": (
        "gemma4-values-from-keys",
        "gemma4",
        {},
        _GEMMA4_KEYS | {"attention.head_count_kv": [2, 2, 1] * 2},
    ),
    "gemma4-per-layer": (
        "gemma4-per-layer",
        "gemma4",
        {},
        _GEMMA4_KEYS
        | {
            "attention.shared_kv_layers": 3,
            "feed_forward_length": [96] * 3 + [192] * 3,
            "embedding_length_per_layer_input": 8,
        },
    ),
    "gemma4-experts": (
        "gemma4-experts",
        "gemma4",
        {},
        _GEMMA4_KEYS | {"expert_count": 8, "expert_used_count": 3, "expert_feed_forward_length": 32},
    ),
    "phi3": ("phi3", "phi3", {}, {"attention.sliding_window": 7, "rope.dimension_count": 16}),
    "phi4-mini": (
        "phi4-mini",
        "phi3",
        _PHI_LONG,
        {"rope.dimension_count": 12, "rope.scaling.original_context_length": 256},
    ),
    "granite": (
        "granite",
        "granite",
        {},
        {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.4, "logit_scale": 2.0},
    ),
    "granite4-h": ("granite4-h", "granitehybrid", {}, _GRANITE_KEYS | {"ssm.group_count": 2}),
    "granite4-h-turned": (
        "granite4-h",
        "granitehybrid",
        {"position_embedding_type": "rope"},
        _GRANITE_KEYS | {"ssm.group_count": 2, "rope.scaling.finetuned": True},
    ),
    "granite4-h-moe": (
        "granite4-h-moe",
        "granitehybrid",
        {},
        _GRANITE_KEYS | {"ssm.group_count": 1, "expert_count": 7, "expert_used_count": 2},
    ),
    "nemotron-h": (
        "nemotron-h",
        "nemotron_h",
        {},
        _NEMOTRON_KEYS
        | {"attention.head_count_kv": [0, 0, 0, 2, 0, 0], "feed_forward_length": [0, 96, 0, 0, 96, 0]},
    ),
    "nemotron-h-moe": (
        "nemotron-h-moe",
        "nemotron_h_moe",
        {},
        _NEMOTRON_KEYS
        | {
            "attention.head_count_kv": [0, 0, 2, 0, 0, 0],
            "feed_forward_length": [0, 32, 0, 32, 0, 0],
            "expert_count": 12,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 48,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "expert_group_count": 3,
            "expert_group_used_count": 2,
        },
    ),
    "phi2": ("phi2", "phi2", {}, {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 1e-5}),
    "phi2-older": ("phi2", "phi2", {"qkv_in_one": True}, {"rope.dimension_count": 8}),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"n_inner": None},
        {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 256},
    ),
    "chatglm": ("glm", "chatglm", {"qkv_in_one": True}, {"rope.dimension_count": 8}),
    "chatglm-apart": ("glm", "chatglm", {}, {"rope.dimension_count": 8}),
    "smollm3": (
        "smollm3",
        "smollm3",
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
        {"rope.freq_base": 2e6},
    ),
    "olmo2": ("olmo2", "olmo2", {}, {"attention.layer_norm_rms_epsilon": 1e-5}),
    "olmo3": (
        "olmo3",
        "olmo2",
        {},
        {
            "attention.sliding_window": 7,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.freq_base": 10_000.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "olmoe": (
        "olmoe",
        "olmoe",
        {},
        {"attention.layer_norm_rms_epsilon": 1e-5, "expert_count": 7, "expert_used_count": 2},
    ),
    "command-r": ("cohere", "command-r", {}, _COHERE_KEYS),
    "cohere2": (
        "cohere2",
        "cohere2",
        {},
        _COHERE_KEYS | {"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "starcoder2": ("starcoder2", "starcoder2", {"sliding_window": None}, {"attention.layer_norm_epsilon": 1e-5}),
    "glm4": (
        "glm4",
        "glm4",
        {},
        {**_WIDE, "rope.dimension_count": 16, "attention.layer_norm_rms_epsilon": 1.5625e-07},
    ),
    "glm4moe": (
        "glm4-moe",
        "glm4moe",
        {},
        {
            "attention.key_length": 32,
            "attention.value_length": 32,
            "rope.dimension_count": 16,
            "expert_count": 12,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_group_count": 3,
            "expert_group_used_count": 2,
            "leading_dense_block_count": 1,
            "expert_shared_count": 2,
            "expert_weights_scale": 1.5,
            "expert_gating_func": 2,
        },
    ),
    "gpt-oss": (
        "gpt-oss",
        "gpt-oss",
        {"layer_types": [_LOCAL, _FULL, _LOCAL]},
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 7,
            "expert_count": 6,
            "expert_used_count": 3,
            "expert_feed_forward_length": 96,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.freq_base": 10_000.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "lfm2": (
        "lfm2",
        "lfm2",
        {},
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "feed_forward_length": 64},
    ),
    "lfm2-moe": (
        "lfm2-moe",
        "lfm2moe",
        {},
        {
            "attention.head_count_kv": [0, 2, 0],
            "shortconv.l_cache": 3,
            "expert_count": 6,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_gating_func": 2,
            "leading_dense_block_count": 1,
        },
    ),
}
"""The family of `tests.support.families`, its architecture in GGUF, how its configuration differs, the keys."""


def _made(name: str, kind: str) -> tuple[Any, str, dict[str, Any]]:
    family, architecture, changes, keys = MODELS[name]
    model = build_model(family, **changes)
    if kind != "F32":
        grid(model)
    if name == "phi4-mini":
        model.factors = {
            "rope_factors_long.weight": LONGROPE["long_factor"],
            "rope_factors_short.weight": LONGROPE["short_factor"],
        }
    if architecture == "gemma4":
        model.factors = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 12}
    turns = getattr(model.config, "rope_parameters", None) or {}
    theta = turns.get("rope_theta", 10_000.0)
    return model, architecture, {"rope.freq_base": float(theta)} | keys


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(open_runtime: Any, tmp_path: Path, name: str, kind: str) -> None:
    model, architecture, keys = _made(name, kind)
    (path,) = save(tmp_path / "m.gguf", model, architecture, keys, kind)
    check(open_runtime, Quantised(path, model))


_GEMMA_KEYS = {
    **_WIDE,
    "attention.sliding_window": 9,
    "attention.sliding_window_pattern": [True, True, False],
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
}
_MODERN_KEYS = {
    "attention.layer_norm_epsilon": 1e-5,
    "attention.sliding_window": 8,
    "attention.sliding_window_pattern": 3,
    "rope.freq_base": 160_000.0,
    "rope.freq_base_swa": 1e4,
}
ENCODERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("bert-mean", {}, {}),
    "nomic-bert": ("nomic-bert", {}, {"rope.freq_base": 1000.0}),
    "modern-bert": ("modernbert", {}, _MODERN_KEYS),
    "gemma-embedding": ("embedding-gemma", {"query_pre_attn_scalar": 32}, _GEMMA_KEYS),
}
"""By architecture, an encoder of `tests.support.text_models`, how it differs, and the keys of its file."""


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("architecture", ENCODERS)
def test_vectors_are_those_of_transformers(
    open_runtime: Any, tmp_path: Path, architecture: str, kind: str
) -> None:
    (tmp_path / "hub").mkdir()
    name, changes, more = ENCODERS[architecture]
    model = write_encoder(tmp_path / "hub", name, **changes)
    if kind != "F32":
        grid(model)
    keys = {"attention.layer_norm_epsilon": 1e-12, "attention.causal": False, "pooling_type": 1}
    (path,) = save(tmp_path / "m.gguf", model, architecture, keys | more, kind)
    (vector,) = made(Driver(open_runtime(path)), 33)
    assert cosine(vector, reference(model, tokens(33), "mean")) > 0.9999999


def test_products_behind_the_pooling_are_computed(
    open_runtime: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Files of EmbeddingGemma have them if the converter was asked for them."""
    (tmp_path / "hub").mkdir()
    name, changes, keys = ENCODERS["gemma-embedding"]
    model = write_encoder(tmp_path / "hub", name, **changes)
    drawn = np.random.default_rng(1)
    wide, narrow = (drawn.normal(0, 0.1, shape).astype(np.float32) for shape in ((96, 64), (64, 96)))
    model.factors = {"dense_2.weight": wide, "dense_3.weight": narrow}
    (path,) = save(tmp_path / "m.gguf", model, "gemma-embedding", keys | {"pooling_type": 1})
    (vector,) = made(Driver(open_runtime(path)), 33)
    assert cosine(vector, narrow @ (wide @ reference(model, tokens(33), "mean"))) > 0.9999999
    assert "lacks" not in caplog.text
    model.factors = {}
    (path,) = save(tmp_path / "without.gguf", model, "gemma-embedding", keys | {"pooling_type": 1})
    open_runtime(path)
    assert "without.gguf lacks dense_2 and dense_3" in caplog.text
    for factors, got in (
        ({"dense_2.weight": wide}, r"dense_2 \[96, 64\]"),
        ({"dense_2.weight": wide[0], "dense_3.weight": narrow}, r"dense_2 \[64\], dense_3 \[64, 96\]"),
    ):
        model.factors = factors
        (path,) = save(tmp_path / "wrong.gguf", model, "gemma-embedding", keys | {"pooling_type": 1})
        with pytest.raises(ModelError, match=f"both be absent, got {got}"):
            open_runtime(path)


@pytest.mark.parametrize(
    ("name", "keys", "why"),
    [
        ("glm4", {"rope.dimension_sections": [8, 12, 12, 0]}, "glm4.rope.dimension_sections must be absent"),
        ("gemma4", {"attention.head_count_kv": [0] * 6}, "head_count_kv must be the same in all layers, and no 0"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, name: str, keys: dict[str, Any], why: str) -> None:
    model, architecture, said = _made(name, "F32")
    (path,) = save(tmp_path / "m.gguf", model, architecture, said | keys)
    with pytest.raises(ModelError, match=why):
        config_of(path)


def test_every_architecture_is_tried() -> None:
    assert {architecture for _, architecture, _, _ in MODELS.values()} | ENCODERS.keys() == ARCHITECTURES.keys()


def test_pieces_are_one_model(open_runtime: Any, tmp_path: Path) -> None:
    model, architecture, keys = _made("qwen3moe", "Q8_0")
    found = save(tmp_path / "m.gguf", model, architecture, keys, "Q8_0", pieces=3)
    assert len(found) == 2
    check(open_runtime, Quantised(found[1], model))
    check(open_runtime, Quantised(tmp_path, model))
    found[1].unlink()
    with pytest.raises(ModelError, match="is missing"):
        open_runtime(found[0])

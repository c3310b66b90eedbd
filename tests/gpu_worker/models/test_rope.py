"""Rotary embeddings are those that transformers computes from the same config.json, or are refused."""

from __future__ import annotations

import json

import pytest
import torch

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.parts.rotary import rotary_table

transformers = pytest.importorskip("transformers")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = {
    "plain": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": YARN,
    "yarn, an amplitude of its own": YARN | {"attention_factor": 0.7},
    "yarn, two amplitudes": YARN | {"mscale": 0.9, "mscale_all_dim": 0.4},
    "yarn, one amplitude": YARN | {"mscale": 0.9},
    "yarn, other limits": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
}


@pytest.mark.parametrize("given", KINDS.values(), ids=KINDS.keys())
def test_angles_and_amplitudes_are_those_of_transformers(given):
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 5_000.0, **given},
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(256)[None])
    expected = torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=-1)
    (rotary,) = model_of(json.loads(config.to_json_string(use_diff=False))).plan.rotaries
    got = rotary_table(rotary, 256, torch.device("cpu"))
    assert torch.allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("longest", [60, 256])
def test_long_factors_of_a_part_of_a_head_are_chosen_by_the_served_length(part, longest):
    pairs = int(16 * part)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 5_000.0,
        "partial_rotary_factor": part,
        "short_factor": [1 + 0.1 * i for i in range(pairs)],
        "long_factor": [2.0 + i for i in range(pairs)],
        "original_max_position_embeddings": 64,
    }
    config = transformers.Phi3Config(
        architectures=["Phi3ForCausalLM"],
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        pad_token_id=None,
        rope_parameters=rope,
    )
    rotary = transformers.models.phi3.modeling_phi3.Phi3RotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(longest)[None])
    expected = torch.cat([cos[0, :, :pairs], sin[0, :, :pairs]], dim=-1)
    plan = model_of(json.loads(config.to_json_string(use_diff=False))).plan
    (chosen,) = plan.at_length(longest).rotaries
    assert chosen.dims == 2 * pairs
    assert torch.allclose(rotary_table(chosen, longest, torch.device("cpu")), expected, atol=1e-4)


@pytest.mark.parametrize("longest", [60, 200])
def test_dynamic_frequencies_are_those_of_a_sequence_of_the_served_length(longest):
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=128,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 5_000.0, "rope_type": "dynamic", "factor": 4.0},
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(longest)[None])
    expected = torch.cat([cos[0, :, :16], sin[0, :, :16]], dim=-1)
    plan = model_of(json.loads(config.to_json_string(use_diff=False))).plan
    assert (plan.max_position, plan.most_positions) == (64, 256)
    (chosen,) = plan.at_length(longest).rotaries
    assert torch.allclose(rotary_table(chosen, longest, torch.device("cpu")), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn", "dynamic"])
def test_a_scaling_without_its_factor_is_refused(kind):
    raw = json.loads(transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).to_json_string(use_diff=False))
    with pytest.raises(ModelError, match="lacks 'factor'"):
        model_of(raw | {"rope_parameters": {"rope_type": kind}})

"""Rotary embeddings are those that transformers computes from the same config.json, or are refused."""

from __future__ import annotations

import json

import pytest
import torch

from petiole.gpu_worker.errors import ModelError
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


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_scaling_without_its_factor_is_refused(kind):
    raw = json.loads(transformers.LlamaConfig(architectures=["LlamaForCausalLM"]).to_json_string(use_diff=False))
    with pytest.raises(ModelError, match="lacks 'factor'"):
        model_of(raw | {"rope_parameters": {"rope_type": kind}})

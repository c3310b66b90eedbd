"""The layers of a decode step as `linear.settled` computes them, against torch: on CUDA, or in Triton's interpreter
on a CPU."""

# ruff: noqa: E402 - what Triton is to do is settled before it is imported

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from packaging.version import Version

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
triton = pytest.importorskip("triton")
known = Version(triton.__version__) >= Version("3.7") or Version(np.__version__) < Version("2.4")
if DEVICE == "cpu" and not known:
    pytest.skip("numpy 2.4 is not known to the interpreter of Triton before 3.7", allow_module_level=True)

from petiole.gpu_worker.models.decoder import Forward
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.fast_paths import supports
from petiole.gpu_worker.models.loading import LoadOptions, read_decoder
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.plan import FeedForward, ModelPlan, Norm
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cuda.fused.linear import settled
from petiole.gpu_worker.runtime.cuda.fused.linear.decode import Block
from petiole.gpu_worker.runtime.cuda.fused.linear.settled import BLOCKS, MOST_ROWS, Blocks
from petiole.gpu_worker.runtime.cuda.supported import FUSED, SETTLED
from tests.support.families import configuration
from tests.support.plans import Drawn, each_feed_forward, each_layer, plan_of
from tests.support.trials import rest

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
"""The interpreter multiplies no bfloat16."""
NEAR = {"rtol": 4e-2, "atol": 4e-2} if DEVICE == "cuda" else {"rtol": 2e-4, "atol": 2e-4}
FEW = Blocks(Block(64, 64, 4, 4, 512), Block(64, 64, 4, 4, 512))

FAMILIES = (
    "llama-biases",
    "qwen3",
    "gemma1",
    "gemma2",
    "gemma3",
    "granite",
    "olmo2",
    "exaone4",
    "glm4",
    "starcoder2",
    "phi2",
    "cohere",
    "gpt2",
    "opt",
)


class Sums:
    """An attention without a cache: each position's queries and keys, rotated by nothing. See `StepAttention`."""

    def attend(self, layer, q, k, v, rotation, sinks=None, distances=None):
        groups = q.shape[1] // k.shape[1]
        return (q + k.repeat_interleave(groups, 1) * v.repeat_interleave(groups, 1)).reshape(len(q), -1)


WIDER = {"gpt2": {"n_inner": 128}, "opt": {"ffn_dim": 128, "word_embed_proj_dim": 128}}
NAMED = {"gpt2": "GPT2LMHeadModel"}


def family(name):
    """In sizes of whole blocks."""
    wider = {"hidden_size": 128, "intermediate_size": 128} | WIDER.get(name, {})
    kind, config = configuration(name, **wider)
    raw = config.to_dict() | {"architectures": [NAMED.get(name, f"{kind}ForCausalLM")]}
    options = LoadOptions(torch.device(DEVICE), DTYPE, max_positions=64, kernels=TorchKernels())
    return read_decoder(Drawn(), model_of(raw), options)


def step_of(n):
    return Forward(torch.arange(n, device=DEVICE) % 50, Sums())


def both(decoder, n, blocks=FEW):
    hidden = torch.randn(n, decoder.plan.hidden_size, generator=torch.Generator().manual_seed(n))
    hidden = hidden.to(DEVICE, DTYPE)
    expected = decoder.forward(hidden.clone(), step_of(n))
    return settled.forward(decoder, hidden.clone(), step_of(n), blocks), expected


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_computed_as_by_torch(name, monkeypatch):
    monkeypatch.setattr(settled, "LEAST_INPUTS", 64)  # two shares of the smallest products
    decoder = family(name)
    assert supports(decoder, SETTLED, frozenset({TorchKernels, DenseLinear})).reason is None
    for n in (1, 3, 16, 17, 40, 64):
        found, expected = both(decoder, n)
        torch.testing.assert_close(found, expected, **NEAR)

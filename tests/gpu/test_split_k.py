"""The layers of a decode step by `linear.split_k`, against torch: on CUDA, or in Triton's interpreter on a CPU."""

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
from petiole.gpu_worker.models.parts.feed_forward import activated
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.plan import FeedForward, Norm
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cuda.fused.linear import split_k
from petiole.gpu_worker.runtime.cuda.fused.linear.split_k import BLOCKS
from petiole.gpu_worker.runtime.cuda.supported import SPLIT_K
from tests.support.families import configuration
from tests.support.plans import Drawn
from tests.support.trials import rest

DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
"""The interpreter multiplies no bfloat16."""
NEAR = {"rtol": 4e-2, "atol": 4e-2} if DEVICE == "cuda" else {"rtol": 2e-4, "atol": 2e-4}

FAMILIES = (
    "gemma2",
    "phi2",
    "olmo2",
    "qwen3",
    "llama-biases",
    "gemma1",
    "gemma3",
    "gemma4",
    "granite",
    "exaone4",
    "glm4",
    "starcoder2",
    "cohere",
    "gpt2",
    "opt",
)
"""The first ones have every kind of norm, activation and addition; the interpreter is slow."""


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


def both(decoder, n, blocks=BLOCKS["small"]):
    hidden = torch.randn(n, decoder.plan.hidden_size, generator=torch.Generator().manual_seed(n))
    hidden = hidden.to(DEVICE, DTYPE)
    expected = decoder.forward(hidden.clone(), step_of(n))
    return split_k.forward(decoder, hidden.clone(), step_of(n), blocks), expected


@pytest.mark.parametrize("name", rest(FAMILIES, 4 if DEVICE == "cpu" else len(FAMILIES)))
def test_each_family_is_computed_as_by_torch(name, monkeypatch):
    monkeypatch.setattr(split_k, "LEAST_INPUTS", 64)  # two shares of the smallest products
    decoder = family(name)
    assert supports(decoder, SPLIT_K, frozenset({TorchKernels, DenseLinear})).reason is None
    for n in (1, 3, 16, 17, 40, 64):
        found, expected = (rows.float() for rows in both(decoder, n))
        if DEVICE == "cpu":
            torch.testing.assert_close(found, expected, **NEAR)
        else:  # by torch alone, bfloat16 is up to 0.014 of a row's length from float32
            assert ((found - expected).norm(dim=1) < 0.05 * expected.norm(dim=1)).all()


def normal(*shape, seed=0, dtype=DTYPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def drawn(outputs, inputs, biased=False):
    bias = normal(outputs, seed=2) if biased else None
    return DenseLinear(normal(outputs, inputs, seed=1) * inputs**-0.5, bias)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_each_activation(activation, gated):
    plan, linear, x = FeedForward(128, activation, gated), drawn(256, 128, biased=True), 2 * normal(5, 128)
    expected = activated(plan, DenseLinear(linear.weight.float(), linear.bias.float())(x.float()), TorchKernels())
    found = split_k.product(x, linear, BLOCKS["small"], plan)
    torch.testing.assert_close(found.float(), expected, **NEAR)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 1024), (128, 640), (320, 2048)], ids=str)
def test_every_candidate_computes_the_same(outputs, inputs, blocks):
    linear, other = drawn(outputs, inputs, biased=True), drawn(outputs, 256)
    for n in (3, 20):
        x, y, residual = normal(n, inputs, seed=3), normal(n, 256, seed=4), normal(n, outputs, seed=5)
        expected = residual.float() + 0.5 * (linear(x) + other(y)).float()
        sums = split_k.shares([(x, linear), (y, other)], BLOCKS[blocks], factor=0.5)
        same, _ = split_k.add_norm(residual, sums, None)
        assert same is residual
        torch.testing.assert_close(residual.float(), expected, **NEAR)
        torch.testing.assert_close(split_k.product(x, linear, BLOCKS[blocks]), linear(x), **NEAR)


def test_a_norm_behind_the_products_and_two_before_the_next_ones():
    """Of a row that is no power of two, some without weights, and far from zero, where a variance must not be a
    difference of squares."""
    width, linear = 192, drawn(192, 256)
    layer = split_k.FusedNorm(Norm("layer", 1e-5, bias=True), NormWeights(normal(width, seed=6), normal(width)))
    bare = split_k.FusedNorm(Norm("layer", 1e-5, weight=False), NormWeights())
    rms = split_k.FusedNorm(Norm("rms", 1e-6, offset=1.0), NormWeights(normal(width, seed=7, dtype=torch.float32)))
    for behind, first, second in ((rms, layer, bare), (layer, rms, layer)):
        x, residual = normal(3, 256, seed=8), 50 + normal(3, width, seed=9)
        wide = DenseLinear(linear.weight.float())(x.float())
        sums = split_k.shares([(x, linear)], BLOCKS["small"], norm=behind)
        expected = residual.float() + normed(behind.plan, behind.weights, wide, TorchKernels())
        found = split_k.add_norm(residual, sums, first, second)
        near = {"rtol": 4e-2, "atol": 4e-1} if DEVICE == "cuda" else NEAR
        torch.testing.assert_close(residual.float(), expected, **near)
        for one, norm in zip(found, (first, second), strict=True):
            again = normed(norm.plan, norm.weights, residual.float(), TorchKernels())
            torch.testing.assert_close(one.float(), again, **NEAR)


@pytest.mark.parametrize(("few", "many"), [(1, 16), (17, 64)] + [(1, 64)] * (DEVICE == "cuda"))
def test_a_row_has_the_same_bits_beside_any_others(few, many):
    """Up to 16 rows, and from 17 to 64. On a card also between both."""
    decoder = family("qwen3")
    step, hidden = step_of(many), normal(many, 128, seed=10)
    beside = split_k.forward(decoder, hidden.clone(), step)
    alone = split_k.forward(decoder, hidden[-few:].clone(), Forward(step.positions[-few:], Sums()))
    assert torch.equal(alone, beside[-few:])


@pytest.mark.parametrize(
    ("shape", "programs"),
    [((4096, 4096), 128), ((4096, 12_288), 128), ((1024, 2048), 64), ((1024, 3072), 64), ((2048, 8192), 128)],
)
def test_products_that_are_added_are_cut_by_their_sizes_alone(shape, programs):
    block, n = split_k._cut(DenseLinear(torch.empty(shape, device="meta")), BLOCKS["128 outputs"].deep)
    assert n * shape[0] // block.outputs == programs
    assert shape[1] % (n * block.inputs) == 0


def test_weights_that_are_not_in_whole_blocks_are_for_the_usual_kernels():
    decoder = family("qwen3")
    known = replace(decoder, embedding=decoder.embedding.bfloat16())
    assert split_k.fits(known)
    assert not split_k.fits(replace(known, embedding=decoder.embedding.half()))
    odd = DenseLinear(torch.empty(128, 96))
    other = replace(decoder.layers[1], mixer=replace(decoder.layers[1].attention, out=odd))
    assert not split_k.fits(replace(known, layers=(decoder.layers[0], other, *decoder.layers[2:])))


@pytest.mark.parametrize("n", [2, 30])
def test_logits_are_written_where_they_belong_and_the_likeliest_are_found(n):
    """Of equal ones, the first, in one program or in another one."""
    head, x = drawn(320, 128, biased=True), normal(n, 128)
    head.weight[300], head.bias[300] = head.weight[7], head.bias[7]
    head.weight[8], head.bias[8] = head.weight[7], head.bias[7]
    x[0] = 9 * head.weight[7]
    logits = torch.zeros(n + 1, 320, device=DEVICE, dtype=DTYPE)
    tokens = torch.full((n + 1,), -1, device=DEVICE)
    assert split_k.writes(head, n)
    split_k.write_logits(x, head, logits[:n], tokens[:n])
    torch.testing.assert_close(logits[:n], head(x), **NEAR)
    assert torch.equal(tokens[:n], logits[:n].argmax(-1))
    assert tokens[0] == 7
    assert not logits[n].any()
    assert tokens[n] == -1


def test_logits_that_are_no_numbers_give_some_token():
    head, tokens = drawn(320, 128), torch.full((2,), -1, device=DEVICE)
    x = torch.full((2, 128), float("nan"), device=DEVICE, dtype=DTYPE)
    split_k.write_logits(x, head, torch.zeros(2, 320, device=DEVICE, dtype=DTYPE), tokens)
    assert ((tokens >= 0) & (tokens < 320)).all()


def test_more_rows_than_fit_and_heads_of_other_sizes_are_for_the_usual_kernels():
    assert not split_k.writes(drawn(320, 128), 65)
    assert not split_k.writes(drawn(321, 128), 1)

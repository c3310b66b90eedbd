"""Plain weights in four bits: never worse than a fixed level, and exact for weights that lie on a grid."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from bench.harness.driver import Driver
from petiole.gpu_worker.models.checkpoint.identity import fingerprint
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear, quantize_int8
from petiole.gpu_worker.models.weights.quantization import int4_form, quantise_int4
from petiole.gpu_worker.models.weights.quantized import CodedLinear
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens


def requantised(weight: Tensor) -> Tensor:
    coded = int4_form(*weight.shape).empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    quantise_int4(weight.float(), coded)
    return coded.values()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), largest=st.integers(1, 8), power=st.integers(-10, 0))
def test_weights_of_a_grid_are_found_again(seed: int, largest: int, power: int) -> None:
    """The scales are float16, as in GGUF's Q4_0; the peak of a group is at any level; the weights are bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(-largest, min(largest, 7) + 1, (6, 5, 32), generator=generator)
    scales = (torch.rand(6, 5, 1, generator=generator) + 0.5) * 2.0**power
    scales = scales.half().float() * torch.where(torch.rand(6, 5, 1, generator=generator) < 0.5, -1.0, 1.0)
    stored = (levels * scales).flatten(1).bfloat16()
    assert torch.equal(requantised(stored).bfloat16(), stored)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), inputs=st.integers(1, 100), spread=st.sampled_from([1e-6, 0.02, 1.0, 1e4]))
def test_any_weights_are_as_near_as_at_the_fixed_level(seed: int, inputs: int, spread: float) -> None:
    weight = torch.randn(7, inputs, generator=torch.Generator().manual_seed(seed)) * spread
    padded = torch.nn.functional.pad(weight, (0, -inputs % 32)).unflatten(1, (-1, 32))
    step = padded.gather(-1, padded.abs().argmax(-1, keepdim=True)) / -8
    fixed = ((padded / step).round().clamp(-8, 7) * step).nan_to_num().flatten(1)[:, :inputs]
    error, limit = ((found - weight).square().sum() for found in (requantised(weight), fixed))
    assert error <= limit * 1.001 + 1e-6 * weight.square().sum()


def test_zeros_stay_zeros() -> None:
    weight = torch.zeros(4, 64)
    weight[1, 3], weight[2, 40] = 0.37, -1e-15
    found = requantised(weight)
    assert torch.equal(found == 0, weight == 0)
    torch.testing.assert_close(found, weight, rtol=1e-3, atol=0)


def test_a_model_in_four_bits_computes_with_the_weights_that_the_codes_stand_for(
    open_runtime: Any, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, plain = checkpoint("qwen3")
    model = copy.deepcopy(plain)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.weight = torch.nn.Parameter(requantised(module.weight.data))
    runtime = open_runtime(folder, weight_quantization="int4")
    layer = runtime._decoder.layers[0]
    assert type(layer.mixer.qkv) is type(layer.feed_forward.down) is CodedLinear
    assert type(runtime._decoder.head) is DenseLinear
    driver = Driver(runtime)
    sequence = driver.sequence(tokens(40), ALL)
    driver.prefill([sequence], [33])
    found = table(driver.prefill([sequence]))
    assert relative_error(found, reference(model, tokens(40))[-1:]) < 1e-4
    assert relative_error(found, reference(plain, tokens(40))[-1:]) > 1e-3


@pytest.mark.parametrize("family", ["qwen3", "llama2"])
@pytest.mark.parametrize(("head", "kind"), [("int4", CodedLinear), ("int8", Int8Linear)])
def test_a_head_is_quantised_beside_any_layers(
    open_runtime: Any, checkpoint: Callable[[str], tuple[Path, Any]], family: str, head: str, kind: type
) -> None:
    """Tied or not; the embedding stays as it is."""
    folder, plain = checkpoint(family)
    model = copy.deepcopy(plain)
    weight = model.lm_head.weight.data
    if head == "int4":
        values = requantised(weight)
    else:
        codes, scales = quantize_int8(weight)
        values = codes.float() * scales[:, None]
    model.lm_head.weight = torch.nn.Parameter(values)
    runtime = open_runtime(folder, head_quantization=head)
    assert type(runtime._decoder.head) is kind
    driver = Driver(runtime)
    sequence = driver.sequence(tokens(40), ALL)
    driver.prefill([sequence], [33])
    found = table(driver.prefill([sequence]))
    assert relative_error(found, reference(model, tokens(40))[-1:]) < 1e-4
    assert relative_error(found, reference(plain, tokens(40))[-1:]) > 1e-4


def test_weights_that_are_quantised_here_have_fingerprints_of_their_own(
    open_runtime: Any, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    """A task that began with one kind of weights never goes on with another."""
    folder, _ = checkpoint("qwen3")

    def of(layers: str = "none", head: str = "auto", inputs: str = "none") -> str:
        runtime = open_runtime(
            folder, weight_quantization=layers, head_quantization=head, activation_quantization=inputs
        )
        found: str = runtime.limits.fingerprint
        return found

    kinds: list[tuple[str, ...]] = [
        ("none", "auto"),
        ("none", "int8"),
        ("none", "int4"),
        ("int8", "auto"),
        ("int8", "none"),
    ]
    kinds += [("int4", "auto"), ("int4", "int8"), ("int4", "int4"), ("int4", "int4", "int8")]
    prints = [of(*kind) for kind in kinds]
    assert len(set(prints)) == len(kinds)
    assert prints[0] == fingerprint(folder), "as before there was a choice"
    assert of("int8", "int8") == of("int8", "auto"), "what counts is what the head is, not how that was said"
    assert of("int8", "auto", "int8") == of("int8", "auto"), "no linear layer takes inputs in eight bits"
    assert of("none", "int4", "int8") != of("none", "int4"), "the head does"


def test_a_head_of_another_device_is_refused(open_runtime: Any, checkpoint: Any) -> None:
    with pytest.raises(Exception, match="head_quantization"):
        open_runtime(checkpoint("qwen3")[0], head_quantization="fp8")


def test_eight_bit_inputs_that_nothing_takes_are_named(
    open_runtime: Any, checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "petiole")
    runtime = open_runtime(checkpoint("qwen3")[0], weight_quantization="int4", activation_quantization="int8")
    assert "activation_quantization" not in caplog.text
    assert runtime.limits.computing.weight_format == "int4 g32 beside int8 inputs, float32"
    if runtime.limits.computing.kernels == "compiled":
        assert "in groups of 32 beside inputs rounded to int8 (" in caplog.text
    caplog.clear()
    runtime = open_runtime(checkpoint("qwen3")[0], weight_quantization="int8", activation_quantization="int8")
    assert "activation_quantization=int8 changes nothing" in caplog.text
    assert "int8 inputs" not in runtime.limits.computing.weight_format


@pytest.mark.parametrize("value", ["int4", "fp8"])
def test_inputs_in_other_types_are_refused(open_runtime: Any, checkpoint: Any, value: str) -> None:
    """Also those in which weights may be."""
    with pytest.raises(Exception, match="activation_quantization"):
        open_runtime(checkpoint("qwen3")[0], activation_quantization=value)


def test_a_reload_quantises_the_new_weights_in_place(
    open_runtime: Any, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = checkpoint("qwen3")
    runtime = open_runtime(folder, weight_quantization="int4")
    before = runtime._decoder.layers[0].mixer.qkv.weight
    held = before.codes.clone()
    before.codes.zero_()
    runtime.prepare_reload(str(folder))()
    after = runtime._decoder.layers[0].mixer.qkv.weight
    assert after.codes.data_ptr() == before.codes.data_ptr()
    assert torch.equal(after.codes, held)


@pytest.mark.parametrize("value", ["int3", "gptq"])
def test_unknown_quantisations_are_refused(open_runtime: Any, checkpoint: Any, value: str) -> None:
    with pytest.raises(Exception, match="weight_quantization"):
        open_runtime(checkpoint("qwen3")[0], weight_quantization=value)

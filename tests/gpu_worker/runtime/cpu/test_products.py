"""Products on a CPU: with fewer instructions and with any number of rows, and beside inputs of each precision."""

from __future__ import annotations

import ctypes
import platform

import numpy as np
import pytest
import torch

from bench.harness.checkpoints.decoders import Shape, write
from bench.harness.driver import Driver
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear
from petiole.gpu_worker.runtime.cpu.native import build, stack
from petiole.gpu_worker.runtime.cpu.native.products.weights import Weights
from tests.gpu_worker.models.test_logits import (
    ALL,
    VOCAB,
    table,
    test_a_prompt_of_several_blocks_of_keys,
    tokens,
)
from tests.support.processors import PROCESSORS, THIS, kernels_for


@pytest.fixture
def cpu_path(monkeypatch, tmp_path):
    if build.load_library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    return "native"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("flags", [("-march=haswell",), (build._WITHOUT_TILES,)], ids=["AVX2 alone", "no tiles"])
@pytest.mark.slow
def test_a_processor_with_fewer_instructions_computes_the_same(flags, checkpoint, open_runtime, monkeypatch):
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, *flags))
    monkeypatch.setattr(stack, "load_library", build.load_library.__wrapped__)
    for dtype in ("bfloat16", "float32"):
        test_a_prompt_of_several_blocks_of_keys(dtype, checkpoint, open_runtime)


def product(library, linear, x):
    """x Wt by the C kernels."""
    weights = Weights(library)
    return multiply(library, weights.linear(linear), x)


def multiply(library, packed, x):
    """The same of weights that are packed."""
    library.petiole_linear_scratch.restype = ctypes.c_int64
    scratch = torch.empty(library.petiole_linear_scratch(ctypes.byref(packed), ctypes.c_int64(len(x))) // 4)
    y = torch.empty(len(x), packed.n)
    at = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, y, scratch)]
    sizes = ctypes.c_int64(len(x)), ctypes.c_int64(4 * len(scratch))
    library.petiole_linear(ctypes.byref(packed), sizes[0], *at, sizes[1], ctypes.c_int32(1))
    return y


@pytest.mark.parametrize("processor", PROCESSORS)
def test_bytes_meet_inputs_as_precise_as_the_model_is(processor):
    """Rounded to bfloat16 where the processor multiplies it; the same bits with any number of rows."""
    library = kernels_for(processor)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (70, 600), dtype=torch.int8, generator=generator)
    scale = torch.rand(70, generator=generator).bfloat16()
    x = torch.randn(60, 600, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        halves = dtype == torch.bfloat16 and library.petiole_halves()
        inputs = x.bfloat16() if halves else x
        exact = inputs.double() @ weight.double().T * scale.double()
        all_rows = product(library, Int8Linear(weight.clone(), scale.to(dtype)), x)
        assert (all_rows - exact).abs().max() < 1e-5 * exact.abs().max()
        for rows in (1, 7, 12, 25, 49):
            some = product(library, Int8Linear(weight.clone(), scale.to(dtype)), x[:rows])
            assert torch.equal(some, all_rows[:rows])


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_gets_the_same_bits_beside_any_others(processor, dtype):
    library, generator = kernels_for(processor), torch.Generator().manual_seed(0)
    weight = torch.randn(70, 600, generator=generator).to(dtype)
    x = torch.randn(60, 600, generator=generator)
    all_rows = product(library, DenseLinear(weight.clone()), x)
    assert (all_rows - x @ weight.float().T).abs().max() < 2e-2 * all_rows.abs().max()
    for rows in (1, 2, 3, 7, 12, 25, 49):
        assert torch.equal(product(library, DenseLinear(weight.clone()), x[:rows]), all_rows[:rows]), (
            f"{rows} rows"
        )


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("kind", ["bfloat16", "12 bits", "int8"])
@pytest.mark.parametrize("exponent", [-124, -118])
def test_sums_near_the_smallest_normal_float_have_the_same_bits_beside_any_others(processor, kind, exponent):
    """Where some products of an input and a weight lie below it, too."""
    library, generator = kernels_for(processor), torch.Generator().manual_seed(0)
    size, spread = ((1024, 1024), 1.0) if kind == "12 bits" else ((70, 600), 2.0**-60)
    weight = (torch.randn(size, generator=generator) * spread).bfloat16()
    x = torch.randn(40, size[1], generator=generator) * (2.0**exponent / spread)
    if kind == "int8":
        integers = torch.randint(-127, 128, size, dtype=torch.int8, generator=generator)
        linear, x = Int8Linear(integers, torch.ones(size[0], dtype=torch.bfloat16)), x * spread
    else:
        linear = DenseLinear(weight)
    kept = Weights(library, dtype=torch.bfloat16)
    packed = kept.linear(linear)
    all_rows = multiply(library, packed, x)
    assert ((all_rows != 0) & (all_rows.abs() < 2.0**-100)).any()
    for rows in range(1, 41):
        assert torch.equal(multiply(library, packed, x[:rows]), all_rows[:rows]), f"{rows} rows"


@pytest.mark.parametrize("kind", ["bfloat16", "12 bits", "int8"])
def test_panels_that_are_computed_together_have_the_bits_of_each_alone(kind):
    """Where more inputs than the second-level cache holds are multiplied, four panels are."""
    library, generator = kernels_for(THIS), torch.Generator().manual_seed(0)
    size = {"bfloat16": (200, 4130), "12 bits": (264, 4130), "int8": (31, 4130)}[kind]
    if kind == "int8":
        integers = torch.randint(-127, 128, size, dtype=torch.int8, generator=generator)
        linear = Int8Linear(integers, torch.ones(size[0], dtype=torch.bfloat16))
    else:
        linear = DenseLinear(torch.randn(size, generator=generator).bfloat16())
    kept = Weights(library, dtype=torch.bfloat16)
    packed = kept.linear(linear)
    x = torch.randn(300, size[1], generator=generator)
    together = multiply(library, packed, x)
    for start, rows in ((0, 3), (0, 33), (40, 100), (250, 50)):
        alone = multiply(library, packed, x[start : start + rows])
        assert torch.equal(together[start : start + rows], alone), f"{rows} rows"


def test_a_wide_layers_prompt_has_the_bits_of_its_chunks(open_runtime, tmp_path, cpu_path):
    write(Shape("wide", "bfloat16", VOCAB, 2112, 160, 2, 4, 2, 32), tmp_path)
    found = []
    for ends in ([], [40, 53, 253]):
        driver = Driver(open_runtime(tmp_path, dtype="bfloat16"))
        prompt = driver.sequence(tokens(300), ALL)
        for end in ends:
            driver.prefill([prompt], [end])
        found.append(table(driver.prefill([prompt])))
    assert np.array_equal(*found)


def test_a_value_that_no_setting_has_is_named(checkpoint, open_runtime, monkeypatch):
    monkeypatch.setenv("PETIOLE_EXACT", "perhaps")
    with pytest.raises(InvalidRequest) as refused:
        open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    assert (refused.value.field, refused.value.limit) == ("exact", "must be one of auto, on, off")

"""Products on a CPU: with fewer instructions and with any number of rows, and beside inputs of each precision."""

from __future__ import annotations

import ctypes
import platform

import pytest
import torch

from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear
from petiole.gpu_worker.runtime.cpu.native import build, stack
from petiole.gpu_worker.runtime.cpu.native.products.weights import Weights
from tests.gpu_worker.models.test_logits import test_a_prompt_of_several_blocks_of_keys
from tests.support.processors import PROCESSORS, kernels_for


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
    library.petiole_linear_scratch.restype = ctypes.c_int64
    weights = Weights(library)
    packed = weights.linear(linear)
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


def test_a_value_that_no_setting_has_is_named(checkpoint, open_runtime, monkeypatch):
    monkeypatch.setenv("PETIOLE_EXACT", "perhaps")
    with pytest.raises(InvalidRequest) as refused:
        open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    assert (refused.value.field, refused.value.limit) == ("exact", "must be one of auto, on, off")

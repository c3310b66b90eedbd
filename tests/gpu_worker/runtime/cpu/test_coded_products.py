"""Products of coded weights: those of the weights they stand for, in the same bits for any number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p

import pytest
import torch
from torch import Tensor

from petiole.gpu_worker.models.weights.coded import (
    E2M1,
    SIGNED,
    UNSIGNED,
    Coded,
    CodedLinear,
    Form,
    rounded,
    takes_int8,
)
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.products.weights import Weights, unknown_form

FORMS = {
    "one panel": Form(32, 32, 32, SIGNED, scales=torch.float16),
    "int4 as quantised here": Form(100, 608, 32, SIGNED, scales=torch.float16, multiplier=True),
    "groups of 16, zeros": Form(70, 304, 16, UNSIGNED, scales=torch.bfloat16, zeros=torch.uint8),
    "groups of 48": Form(64, 96, 48, SIGNED, scales=torch.float32),
    "groups of 64": Form(33, 320, 64, E2M1, scales=torch.float32),
    "groups of 128, zeros": Form(96, 512, 128, UNSIGNED, scales=torch.float16, zeros=torch.uint8),
    "zeros that are floats": Form(40, 256, 32, UNSIGNED, scales=torch.float32, zeros=torch.float32),
    "channels": Form(65, 296, 296, SIGNED, scales=torch.bfloat16),
    "channels, zeros": Form(40, 296, 296, UNSIGNED, scales=torch.float16, zeros=torch.uint8),
    "a short last group": Form(64, 200, 128, SIGNED, scales=torch.float16),
    "nvfp4": Form(64, 320, 16, E2M1, scales=torch.float8_e4m3fn, multiplier=True),
    "mxfp4": Form(33, 320, 32, E2M1, scales=torch.float8_e8m0fnu),
    "int8 groups, zeros": Form(65, 384, 128, (), torch.int8, torch.float16, torch.int8),
    "int8 channels": Form(65, 384, 384, (), torch.int8, torch.float32),
    "fp8 blocks": Form(100, 384, 128, (), torch.float8_e4m3fn, torch.float32),
    "fp8 channels": Form(65, 72, 72, (), torch.float8_e4m3fn, torch.bfloat16),
}
ROWS = (1, 2, 3, 4, 5, 12, 13, 25, 193, 200)


def random_weight(form: Form, generator: torch.Generator) -> Coded:
    weight = form.empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    codes = torch.randint(0, 256, weight.codes.shape, generator=generator, dtype=torch.uint8)
    if form.codes == torch.float8_e4m3fn:
        codes[codes & 127 == 127] = 8  # not a number: readers refuse it
    weight.codes.view(torch.uint8).copy_(codes)
    powers = torch.randint(-20, 4, weight.scales.shape, generator=generator)  # subnormal as float16, too
    fractions = 1 if form.scales == torch.float8_e8m0fnu else torch.rand(weight.scales.shape, generator=generator)
    weight.scales.copy_(2.0**powers * fractions)
    if weight.zeros is not None:
        fraction = 0.375 if form.zeros == torch.float32 else 0
        weight.zeros.copy_(torch.randint(-8, 16, weight.zeros.shape, generator=generator).clamp(min=0) + fraction)
    if weight.multiplier is not None:
        weight.multiplier.copy_(torch.rand(form.outputs, generator=generator) + 0.5)
    return weight


def product(library: ctypes.CDLL, linear: ctypes.Structure, x: Tensor, outputs: int) -> Tensor:
    rows, y = len(x), torch.empty(len(x), outputs)
    library.petiole_linear_scratch.restype = c_int64
    stride = library.petiole_linear_scratch(ctypes.byref(linear), c_int64(rows))
    scratch = torch.empty(2 * stride // 4)
    at = (c_void_p(tensor.data_ptr()) for tensor in (x, y))
    library.petiole_linear(
        None,
        ctypes.byref(linear),
        c_int64(rows),
        *at,
        None,
        c_void_p(scratch.data_ptr()),
        c_int64(stride),
        c_int32(2),
    )
    return y


def products(form: Form, rows: Sequence[int], int8_inputs: bool = False) -> tuple[dict[int, Tensor], Tensor]:
    """The products of so many rows of the same inputs, of which one is zero, and what they should be."""
    library = load_library()
    if library is None:
        pytest.skip("no C compiler")
    assert unknown_form(form) is None
    generator = torch.Generator().manual_seed(form.outputs + form.inputs)
    weight = random_weight(form, generator)
    bias = torch.randn(form.outputs, generator=generator)
    x = torch.randn(max(rows), form.inputs, generator=generator)
    x[min(2, len(x) - 1)] = 0
    known = rounded(x, form.group) if int8_inputs else x
    expected = known.double() @ weight.values().double().t() + bias  # before the codes change their places
    kept = Weights(library)
    linear = kept.linear(CodedLinear(weight, bias, int8_inputs))
    return {m: product(library, linear, x[:m].clone(), form.outputs) for m in rows}, expected


@pytest.mark.parametrize("name", FORMS)
def test_sums_are_those_of_the_weights_and_the_same_bits_for_any_number_of_rows(name: str) -> None:
    found, expected = products(FORMS[name], ROWS)
    all_rows = found[max(ROWS)]
    assert (all_rows - expected).abs().max() <= 1e-6 * expected.abs().max()
    for rows, y in found.items():
        assert torch.equal(y, all_rows[:rows]), f"{rows} rows"


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if takes_int8(form)])
def test_rounded_inputs_are_integers_and_a_step_for_each_run(name: str) -> None:
    """The same bits for any number of rows, too: one row's steps depend on no other row."""
    found, expected = products(FORMS[name], ROWS, int8_inputs=True)
    all_rows = found[max(ROWS)]
    tie = 2e-3  # an input in the middle between two integers may be rounded to either
    assert (all_rows - expected).abs().max() <= tie * expected.abs().max()
    assert (all_rows - expected).norm() <= 1e-4 * expected.norm()
    exact = products(FORMS[name], (max(ROWS),))[1]
    assert 1e-4 < (all_rows - exact).norm() / exact.norm() < 2e-2, "eight bits lose little"
    for rows, y in found.items():
        assert torch.equal(y, all_rows[:rows]), f"{rows} rows"


@pytest.mark.parametrize("table", [SIGNED, UNSIGNED])
def test_torch_rounds_inputs_as_the_kernels_do(table: tuple[float, ...]) -> None:
    form = Form(48, 152, 32, table, scales=torch.float16)
    weight, x = random_weight(form, torch.Generator().manual_seed(1)), torch.randn(3, 5, 152)
    x[0, 0], x[0, 1, :32], x[0, 2] = 0, 0, 1e-38
    found = CodedLinear(weight, int8_inputs=True)(x)
    torch.testing.assert_close(found, rounded(x, 32) @ weight.values().t())
    assert (rounded(x, 32) - x).abs().max() <= x.abs().max() / 254 * 1.0001


def test_only_values_that_the_compiled_code_holds_exactly_are_known() -> None:
    nf4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0)
    assert unknown_form(Form(32, 64, 32, (*nf4, *(-value for value in nf4)))) == "a table of such values"
    assert unknown_form(Form(32, 36, 36, SIGNED)) == "codes of 36 inputs"
    assert unknown_form(Form(32, 96, 24, SIGNED)) == "groups of 24 inputs"
    assert unknown_form(Form(32, 64, 64, (), torch.float8_e5m2)) == "codes in torch.float8_e5m2"

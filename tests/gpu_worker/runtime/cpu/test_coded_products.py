"""Products of coded weights: those of the weights they stand for, in the same bits for any number of rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import pytest
import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import SIGNED, UNSIGNED
from petiole.gpu_worker.models.weights.quantized import CodedLinear, CodedTable, CodeLayout, rounded, takes_int8
from petiole.gpu_worker.runtime.cpu.native.products.weights import Weights, unknown_form
from tests.support.coded import FORMS, random_weight
from tests.support.processors import PROCESSORS, THIS, kernels_for

ROWS = (1, 2, 3, 4, 5, 8, 12, 13, 25, 33, 193, 200)


def product(library: ctypes.CDLL, linear: ctypes.Structure, x: Tensor, outputs: int) -> Tensor:
    rows, y = len(x), torch.empty(len(x), outputs)
    library.petiole_linear_scratch.restype = c_int64
    stride = library.petiole_linear_scratch(ctypes.byref(linear), c_int64(rows))
    scratch = torch.empty(2 * stride // 4)
    at = (c_void_p(tensor.data_ptr()) for tensor in (x, y))
    library.petiole_linear(
        ctypes.byref(linear),
        c_int64(rows),
        *at,
        c_void_p(scratch.data_ptr()),
        c_int64(stride),
        c_int32(2),
    )
    return y


def products(
    form: CodeLayout,
    rows: Sequence[int],
    int8_inputs: bool = False,
    dtype: torch.dtype = torch.float32,
    processor: str = THIS,
) -> tuple[dict[int, Tensor], Tensor]:
    """The products of so many rows of the same inputs, one of which is zero, and what they should be in a model of
    this type."""
    library = kernels_for(processor)
    assert unknown_form(form) is None
    generator = torch.Generator().manual_seed(form.outputs + form.inputs)
    weight = random_weight(form, generator)
    bias = torch.randn(form.outputs, generator=generator)
    x = torch.randn(max(rows), form.inputs, generator=generator)
    x[min(2, len(x) - 1)] = 0
    known = rounded(x, form.group) if int8_inputs else x
    if dtype == torch.bfloat16 and library.petiole_halves():
        known = known.bfloat16()
    expected = known.double() @ weight.values().double().t() + bias  # before the codes change their places
    kept = Weights(library, dtype=dtype)
    linear = kept.linear(CodedLinear(weight, bias, int8_inputs))
    return {m: product(library, linear, x[:m].clone(), form.outputs) for m in rows}, expected


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_sums_are_those_of_the_weights_and_the_same_bits_for_any_number_of_rows(
    name: str, dtype: torch.dtype, processor: str
) -> None:
    """In bfloat16 inputs are rounded to it where the processor multiplies it."""
    found, expected = products(FORMS[name], ROWS, dtype=dtype, processor=processor)
    all_rows = found[max(ROWS)]
    assert (all_rows - expected).abs().max() <= 1e-6 * expected.abs().max()
    for rows, y in found.items():
        assert torch.equal(y, all_rows[:rows]), f"{rows} rows"


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if takes_int8(form)])
def test_rounded_inputs_are_integers_and_a_step_for_each_run(name: str, processor: str) -> None:
    """The same bits for any number of rows, too: one row's steps depend on no other row."""
    found, expected = products(FORMS[name], ROWS, int8_inputs=True, processor=processor)
    all_rows = found[max(ROWS)]
    tie = 2e-3  # an input in the middle between two integers may be rounded to either
    assert (all_rows - expected).abs().max() <= tie * expected.abs().max()
    assert (all_rows - expected).norm() <= 1e-4 * expected.norm()
    exact = products(FORMS[name], (max(ROWS),), processor=processor)[1]
    assert 1e-4 < (all_rows - exact).norm() / exact.norm() < 2e-2, "eight bits lose little"
    for rows, y in found.items():
        assert torch.equal(y, all_rows[:rows]), f"{rows} rows"


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_sums_near_the_smallest_normal_float_have_the_same_bits_for_any_number_of_rows(
    name: str, dtype: torch.dtype, processor: str
) -> None:
    """Where some products of an input and a weight lie below it, too."""
    library, form = kernels_for(processor), FORMS[name]
    generator = torch.Generator().manual_seed(1)
    kept = Weights(library, dtype=dtype)
    linear = kept.linear(CodedLinear(random_weight(form, generator), None, False))
    x = torch.randn(40, form.inputs, generator=generator) * 2.0 ** -torch.arange(100, 140).unsqueeze(1)
    all_rows = product(library, linear, x, form.outputs)
    assert ((all_rows != 0) & (all_rows.abs() < 2.0**-100)).any()
    for rows in range(1, 41):
        assert torch.equal(product(library, linear, x[:rows].clone(), form.outputs), all_rows[:rows]), (
            f"{rows} rows"
        )


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.codes != torch.float8_e4m3fn])
def test_rows_of_an_embedding_are_the_weights(name: str, processor: str) -> None:
    """Also after the codes have changed their places."""
    library, form = kernels_for(processor), FORMS[name]
    weight = random_weight(form, torch.Generator().manual_seed(3))
    ids = torch.tensor([0, 5, form.outputs - 1, 31])
    expected = CodedTable(weight, torch.float32)[ids] * 3
    kept = Weights(library)
    linear, out = kept.linear(CodedLinear(weight, None)), torch.empty(len(ids), form.inputs)
    library.petiole_embed(
        ctypes.byref(linear), c_int64(len(ids)), c_void_p(ids.data_ptr()), c_float(3), c_void_p(out.data_ptr())
    )
    torch.testing.assert_close(out, expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("exponent", [-127, -126, 125])
def test_scales_that_are_powers_of_two_are_exact_however_small_or_large(exponent: int) -> None:
    library = kernels_for(THIS)
    if exponent == -127 and library.petiole_tiles():
        pytest.skip("on tiles, numbers below the smallest normal float are zeros")
    form = FORMS["mxfp4"]
    weight = random_weight(form, torch.Generator().manual_seed(1))
    weight.scales[:, 1] = 2.0**exponent
    x = torch.zeros(1, form.inputs)
    x[0, 32 + 3] = 2.0 ** (-exponent // 2)
    expected = (x.double() @ weight.values().double().t()).float()
    assert expected.count_nonzero() > 0
    kept = Weights(library)
    assert torch.equal(product(library, kept.linear(CodedLinear(weight, None, False)), x, form.outputs), expected)


@pytest.mark.parametrize("table", [SIGNED, UNSIGNED])
def test_torch_rounds_inputs_as_the_kernels_do(table: tuple[float, ...]) -> None:
    form = CodeLayout(48, 152, 32, table, scales=torch.float16)
    weight, x = random_weight(form, torch.Generator().manual_seed(1)), torch.randn(3, 5, 152)
    x[0, 0], x[0, 1, :32], x[0, 2] = 0, 0, 1e-38
    found = CodedLinear(weight, int8_inputs=True)(x)
    torch.testing.assert_close(found, rounded(x, 32) @ weight.values().t())
    assert (rounded(x, 32) - x).abs().max() <= x.abs().max() / 254 * 1.0001


def test_only_values_that_the_compiled_code_holds_exactly_are_known() -> None:
    nf4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0)
    assert unknown_form(CodeLayout(32, 64, 32, (*nf4, *(-value for value in nf4)))) == "a table of such values"
    assert unknown_form(CodeLayout(32, 36, 36, SIGNED)) == "codes of 36 inputs"
    assert unknown_form(CodeLayout(32, 96, 24, SIGNED)) == "groups of 24 inputs"
    assert unknown_form(CodeLayout(32, 64, 64, (), torch.float8_e5m2)) == "codes in torch.float8_e5m2"

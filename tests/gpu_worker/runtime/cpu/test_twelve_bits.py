"""Weights in bfloat16 that the compiled CPU path keeps in 12 bits: the same bits as from 16."""

from __future__ import annotations

import ctypes
import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.harness.driver import Driver
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.products import weights as packing
from petiole.gpu_worker.runtime.cpu.native.products.weights import LinearStruct, Weights
from tests.gpu_worker.models.test_logits import ALL, table, tokens
from tests.support.families import FAMILIES

BF16, TWELVE = 1, 5
ROWS = (1, 3, 12, 13, 24, 25, 49, 200)
library = load_library()
pytestmark = pytest.mark.skipif(
    library is None or not library.petiole_halves(), reason="this processor multiplies no bfloat16"
)


@pytest.fixture
def cpu_path(monkeypatch):
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    return "native"


def some_steps(runtime):
    """Log-probabilities of prompts, of two decode steps of all, and of one prompt in chunks."""
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (1, 5, 40)]
    parts = [table(driver.prefill(sequences))]
    parts += [table(driver.decode(sequences)) for _ in range(2)]
    chunked = driver.sequence(tokens(70), ALL)
    driver.prefill([chunked], [33])
    return np.concatenate([*parts, table(driver.prefill([chunked]))])


def random_weights(n: int, k: int, seed: int = 0) -> Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def with_zeros(w: Tensor) -> Tensor:
    w[3] = 0
    w[len(w) // 2 :: 97, ::31] = 0
    return w


def with_outputs_of_all_sizes(w: Tensor) -> Tensor:
    """Each output's weights have another power of two, nearly from the smallest to the largest."""
    return (w * torch.logspace(-28, 33, len(w), base=10).float()[:, None]).bfloat16()


def with_outliers(w: Tensor) -> Tensor:
    w[::5, 7] *= 300
    w[1::5, 8] *= 2.0**-40
    return w


def packed(weight: Tensor, n_threads: int = 2) -> tuple[LinearStruct, Weights]:
    before = torch.get_num_threads()
    torch.set_num_threads(n_threads)
    try:
        weights = Weights(library)
        return weights.linear(DenseLinear(weight.clone())), weights
    finally:
        torch.set_num_threads(before)


def product(weight: Tensor, x: Tensor) -> tuple[int, Tensor]:
    """The kind of the packed weights, and x Wt."""
    assert library is not None
    library.petiole_linear_scratch.restype = ctypes.c_int64
    linear, weights = packed(weight)
    stride = library.petiole_linear_scratch(ctypes.byref(linear), ctypes.c_int64(len(x)))
    y, scratch = torch.empty(len(x), linear.n), torch.empty(2 * stride // 4)
    library.petiole_linear(
        ctypes.byref(linear), ctypes.c_int64(len(x)), ctypes.c_void_p(x.data_ptr()),
        ctypes.c_void_p(y.data_ptr()), ctypes.c_void_p(scratch.data_ptr()), ctypes.c_int64(stride),
        ctypes.c_int32(2),
    )  # fmt: skip
    del weights
    return linear.kind, y


@pytest.mark.parametrize("change", [Tensor.clone, with_zeros, with_outputs_of_all_sizes, with_outliers])
@pytest.mark.parametrize(("n", "k"), [(96, 1024), (70, 600), (31, 256), (1000, 130)])
def test_products_have_the_bits_of_those_in_16_bits(change, n, k, monkeypatch):
    weight = change(random_weights(n, k))
    for rows in ROWS:
        x = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
        monkeypatch.setattr(packing, "_LARGE", sys.maxsize)
        in_16, expected = product(weight, x)
        monkeypatch.setattr(packing, "_LARGE", 1)
        in_12, found = product(weight, x)
        assert (in_16, in_12) == (BF16, TWELVE)
        assert torch.equal(found, expected)


def test_large_matrices_take_about_12_bits_and_small_ones_16():
    large, _large = packed(random_weights(1024, 1024))
    assert large.kind == TWELVE
    assert 1.5 <= large.stride / (32 * 1024) < 1.57  # bytes for each weight
    small, _small = packed(random_weights(1023, 1024))
    assert small.kind == BF16


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 2.0**-130, -(2.0**-130)])
def test_weights_that_could_not_be_scaled_back_stay_in_16_bits(value, monkeypatch):
    monkeypatch.setattr(packing, "_LARGE", 1)
    weight = random_weights(64, 64)
    assert packed(weight)[0].kind == TWELVE
    weight[40, 5] = value
    assert packed(weight)[0].kind == BF16


def test_weights_of_too_many_sizes_stay_in_16_bits(monkeypatch):
    """Too many of an output's weights would have to be kept in 16 bits beside the others' 12."""
    monkeypatch.setattr(packing, "_LARGE", 1)
    size = 2.0 ** torch.randint(-60, 60, (64, 64), generator=torch.Generator().manual_seed(0))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    weight = (random_weights(64, 64) * size).bfloat16()
    kind, found = product(weight, x)
    assert kind == BF16
    exact = x.bfloat16().double() @ weight.double().T
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_that_pack_do_not_write_over_weights_to_come(n_threads, monkeypatch):
    monkeypatch.setattr(packing, "_LARGE", 1)
    torch_weight = random_weights(32 * 50 + 9, 64)
    linear, _kept = packed(torch_weight, n_threads)
    expected, _also_kept = packed(torch_weight, 1)
    whole = linear.n // 32 * linear.stride
    assert ctypes.string_at(linear.weight, whole) == ctypes.string_at(expected.weight, whole)


def test_the_memory_that_12_bits_leave_goes_back_to_the_system():
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    weight = random_weights(4096, 8192)
    before = resident()
    kept = Weights(library)
    kept.linear(DenseLinear(weight))
    assert resident() < before - 0.15 * weight.nbytes


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_model_computes_the_same_bits(family, checkpoint, open_runtime, monkeypatch):
    found = []
    for large in (sys.maxsize, 1):
        monkeypatch.setattr(packing, "_LARGE", large)
        found.append(some_steps(open_runtime(checkpoint(family)[0], dtype="bfloat16")))
    assert np.array_equal(*found)


@pytest.mark.parametrize(("n", "k"), [(96, 1024), (70, 600), (33, 288), (40, 130)])
@pytest.mark.parametrize("at_least", [0, sys.maxsize], ids=["12 bits", "16 bits"])
@pytest.mark.parametrize("change", [Tensor.clone, with_outputs_of_all_sizes])
def test_a_row_has_the_same_bits_beside_any_others(change, n, k, at_least, monkeypatch):
    monkeypatch.setattr(packing, "_LARGE", at_least)
    weight, x = change(random_weights(n, k)), torch.randn(600, k, generator=torch.Generator().manual_seed(1))
    rows = [0, 1, 15, 16, 31, 32, 63, 64, 79, 80, 95, 255, 256, 320, 599]
    alone = {row: product(weight, x[row : row + 1])[1][0] for row in rows}
    for many in (2, 3, 8, 16, 17, 31, 64, 65, 80, 81, 96, 97, 256, 257, 321, 600):
        y = product(weight, x[:many])[1]
        for row in rows:
            assert row >= many or torch.equal(y[row], alone[row])

"""Who multiplies on a CPU: chosen by measurement, kept, forced by a setting; and the same product by either."""

from __future__ import annotations

import ctypes
import json
import logging
import platform

import numpy as np
import pytest
import torch

from bench.harness.checkpoints.decoders import Shape, write_adapter
from bench.harness.driver import Driver
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear
from petiole.gpu_worker.runtime.cpu.native import build, forward, stack
from petiole.gpu_worker.runtime.cpu.native.products import choice as products
from petiole.gpu_worker.runtime.cpu.native.products.choice import RUNGS, decide, gain
from petiole.gpu_worker.runtime.cpu.native.products.library import NEVER, open_library
from petiole.gpu_worker.runtime.cpu.native.products.weights import Weights
from tests.gpu_worker.models.test_logits import (
    ALL,
    table,
    test_a_prompt_of_several_blocks_of_keys,
    test_every_position_of_a_full_prefill,
    tokens,
)
from tests.support.families import FAMILIES
from tests.support.processors import PROCESSORS, kernels_for

SHAPE = Shape("qwen3", "bfloat16", 320, 64, 96, 3, 4, 2, 32)
KINDS = ("qkv", "out", "gate_up", "down", "head")


@pytest.fixture
def cpu_path(monkeypatch, tmp_path):
    if build.load_library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    return "native"


@pytest.fixture
def by_library(monkeypatch):
    if open_library() is None:
        pytest.skip("this torch has no packed products")
    monkeypatch.setenv("PETIOLE_PRODUCTS", "library")


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Where measurements are kept."""
    if open_library() is None:
        pytest.skip("this torch has no packed products")
    monkeypatch.setattr(products, "_file", lambda native, maps: tmp_path / "products.json")
    return tmp_path / "products.json"


def some_steps(runtime, adapter_slot=0):
    """Log-probabilities of prompts, of two decode steps of all, and of one prompt in chunks."""
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(n, n), ALL, adapter_slot=adapter_slot) for n in (1, 5, 40)]
    parts = [table(driver.prefill(sequences))]
    parts += [table(driver.decode(sequences)) for _ in range(2)]
    chunked = driver.sequence(tokens(70), ALL, adapter_slot=adapter_slot)
    driver.prefill([chunked], [33])
    return np.concatenate([*parts, table(driver.prefill([chunked]))])


# -- the same products


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_librarys_products_are_those_of_the_model(family, checkpoint, open_runtime, by_library, tmp_path):
    test_every_position_of_a_full_prefill(family, "bfloat16", checkpoint, open_runtime, tmp_path)


def test_the_librarys_products_serve_adapters_too(checkpoint, open_runtime, by_library, monkeypatch, tmp_path):
    write_adapter(SHAPE, tmp_path / "adapter", rank=4, seed=1, spread=0.3)
    found = []
    for whose in ("library", "own"):
        monkeypatch.setenv("PETIOLE_PRODUCTS", whose)
        runtime = open_runtime(checkpoint("qwen3")[0], dtype="bfloat16", lora_slots=1, lora_max_rank=4)
        runtime.load_adapter(str(tmp_path / "adapter"), 1)
        found.append(some_steps(runtime, adapter_slot=1)[:3])
    assert not np.array_equal(*found), "one of them made both"
    assert np.linalg.norm(found[0] - found[1]) < 2e-2 * np.linalg.norm(found[1])


def test_each_side_gets_its_rows_of_the_same_weights(checkpoint, open_runtime, by_library, monkeypatch):
    monkeypatch.setattr(products, "choose_products", None)
    choice = products.Products(open_library(), {"qkv": 8, "gate_up": 1, "down": 8})
    monkeypatch.setattr(forward, "choose_products", lambda *_: choice)
    test_a_prompt_of_several_blocks_of_keys("bfloat16", checkpoint, open_runtime)
    monkeypatch.setattr(forward, "choose_products", lambda *_: products.Products(None, {}))
    own = some_steps(open_runtime(checkpoint("qwen3")[0], dtype="bfloat16"))
    for thresholds in ({"qkv": 8, "down": NEVER}, dict.fromkeys(KINDS, 1000)):
        choice = products.Products(open_library(), thresholds)
        monkeypatch.setattr(forward, "choose_products", lambda *_, choice=choice: choice)
        mixed = some_steps(open_runtime(checkpoint("qwen3")[0], dtype="bfloat16"))
        assert np.array_equal(mixed, own) is (min(thresholds.values()) == 1000)
        assert np.linalg.norm(mixed - own) < 2e-2 * np.linalg.norm(own)


def test_where_the_library_fails_the_own_kernels_make_its_products(
    checkpoint, open_runtime, by_library, monkeypatch, caplog
):
    runtime = open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    struct = open_library()._struct
    refuse = ctypes.CFUNCTYPE(ctypes.c_int32)(lambda: 1)
    before = struct.multiply
    struct.multiply = ctypes.cast(refuse, ctypes.c_void_p).value
    try:
        with caplog.at_level(logging.WARNING):
            found = some_steps(runtime)
    finally:
        struct.multiply = before
    assert caplog.text.count("failed at a product") == 1
    monkeypatch.setenv("PETIOLE_PRODUCTS", "own")
    assert np.array_equal(found, some_steps(open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("flags", [("-march=haswell",), (build._WITHOUT_TILES,)], ids=["AVX2 alone", "no tiles"])
@pytest.mark.parametrize("whose", ["own", "library"])
@pytest.mark.slow
def test_a_processor_with_fewer_instructions_computes_the_same(
    whose, flags, checkpoint, open_runtime, monkeypatch
):
    if whose == "library" and open_library() is None:
        pytest.skip("this torch has no packed products")
    monkeypatch.setenv("PETIOLE_PRODUCTS", whose)
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
    library.petiole_linear(
        None, ctypes.byref(packed), sizes[0], at[0], at[1], None, at[2], sizes[1], ctypes.c_int32(1)
    )
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


# -- the choice


def times(own, library):
    """By rows, for every kind of map."""
    return {
        kind: {rows: (own(rows), library(rows)) for rows in RUNGS if kind != "head" or rows <= 16}
        for kind in KINDS
    }


def test_a_library_that_saves_less_than_a_fifth_does_not_cost_the_same_bits():
    assert decide(times(lambda rows: 1.15 * rows, lambda rows: rows), "auto") == {}
    assert decide(times(lambda rows: 1.15 * rows, lambda rows: rows), "off") == dict.fromkeys(KINDS, 1)


def test_the_library_serves_from_the_number_of_rows_at_which_it_is_quicker():
    found = times(lambda rows: 10 + rows, lambda rows: 20 + rows / 8)
    assert decide(found, "auto") == dict.fromkeys(KINDS, 16)
    assert gain(found, decide(found, "auto")) > 4


def test_a_library_that_is_never_quicker_serves_nothing():
    for exact in ("auto", "off"):
        assert decide(times(lambda rows: rows, lambda rows: rows * 1.01), exact) == {}


def test_it_is_measured_once_and_told_in_a_line(kept, checkpoint, open_runtime, monkeypatch, caplog):
    folder, _ = checkpoint("qwen3")
    with caplog.at_level(logging.INFO, logger=products.__name__):
        open_runtime(folder, dtype="bfloat16")
        assert set(json.loads(kept.read_text())) == set(KINDS)
        monkeypatch.setattr(products, "_measure", lambda *_: pytest.fail("measured again"))
        open_runtime(folder, dtype="bfloat16")
    first, second = [r.message for r in caplog.records]
    assert "measured in" in first
    assert "as measured before" in second


@pytest.mark.parametrize("text", ["", "[]", "{", '{"qkv": {"1": [1]}}', '{"qkv": [1, 2]}', '{"qkv": {}}'])
def test_a_record_that_cannot_be_read_is_measured_again(text, kept, checkpoint, open_runtime):
    kept.write_text(text)
    open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    assert set(json.loads(kept.read_text())) == set(KINDS)


def test_a_library_that_packs_otherwise_than_it_says_is_not_used(
    kept, checkpoint, open_runtime, monkeypatch, caplog
):
    monkeypatch.setattr(products._Bench, "agree", lambda self: False)
    with caplog.at_level(logging.INFO, logger=products.__name__):
        for _ in range(2):
            runtime = open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
            assert runtime._executor._native._products.library is None
    assert caplog.text.count("multiplies packed weights") == 1


def test_a_busy_machine_decides_nothing(kept, checkpoint, open_runtime, monkeypatch, caplog):
    monkeypatch.setattr(products, "_TIME_LIMIT_S", -1.0)
    with caplog.at_level(logging.INFO, logger=products.__name__):
        open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    assert "too busy" in caplog.text
    assert not kept.exists()


def test_what_the_measurement_says_is_done(kept, checkpoint, open_runtime):
    quick = times(lambda rows: 3.0 * rows, lambda rows: rows)
    kept.write_text(json.dumps(quick))
    runtime = open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    assert runtime._executor._native._products.thresholds == dict.fromkeys(KINDS, 1)


@pytest.mark.parametrize(
    "setting",
    [{"PETIOLE_EXACT": "on"}, {"PETIOLE_PRODUCTS": "own"}, {"PETIOLE_EXACT": "on", "PETIOLE_PRODUCTS": "library"}],
    ids=str,
)
def test_exactness_and_own_kernels_need_no_measurement(setting, kept, checkpoint, open_runtime, monkeypatch):
    kept.write_text(json.dumps(times(lambda rows: 3.0 * rows, lambda rows: rows)))
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    runtime = open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    assert runtime._executor._native._products.library is None


def test_a_value_that_no_setting_has_is_named(checkpoint, open_runtime, monkeypatch):
    monkeypatch.setenv("PETIOLE_EXACT", "perhaps")
    with pytest.raises(InvalidRequest) as refused:
        open_runtime(checkpoint("qwen3")[0], dtype="bfloat16")
    assert (refused.value.field, refused.value.limit) == ("exact", "must be one of auto, on, off")

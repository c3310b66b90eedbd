"""Readers of quantised layers against loops: any order, width and size; and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.codes import joined, nibbles
from petiole.gpu_worker.models.weights.formats import packing
from petiole.gpu_worker.models.weights.formats.find import format_of
from petiole.gpu_worker.models.weights.formats.layer_tensors import SUFFIXES
from petiole.gpu_worker.models.weights.quantized import Coded, CodedLinear, CodeLayout
from tests.support.quantised import FORMATS, beside, int32, pairs, read_layer, save, words

OUTPUTS, INPUTS = 64, 128


def weight(outputs: int = OUTPUTS, inputs: int = INPUTS, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(outputs, inputs, generator=generator) * 0.1
    return drawn * (1 + 3 * torch.rand(outputs, 1, generator=generator))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    outputs=st.integers(1, 3).map(lambda n: 32 * n),
    inputs=st.integers(1, 4).map(lambda n: 32 * n),
    seed=st.integers(0, 1000),
)
def test_a_layer_is_what_loops_unpack(tmp_path: Path, name: str, outputs: int, inputs: int, seed: int) -> None:
    pack, config = FORMATS[name]
    tensors, expected = pack(weight(outputs, inputs, seed))
    path = save(tmp_path / "one.safetensors", "layer", tensors)
    _, found = read_layer(path, "layer", outputs, inputs, {"quantization_config": config})
    torch.testing.assert_close(found.values(), expected, rtol=1e-6, atol=0)
    x = torch.randn(2, inputs, generator=torch.Generator().manual_seed(seed))
    bias = torch.arange(outputs, dtype=torch.float32)
    torch.testing.assert_close(CodedLinear(found, bias)(x), x @ expected.t() + bias, rtol=1e-5, atol=1e-4)


@given(st.lists(st.lists(st.integers(0, 15), min_size=8, max_size=8), min_size=1, max_size=9))
def test_nibbles_in_words(rows: list[list[int]]) -> None:
    packed, codes = int32([words(row, 4) for row in rows]), torch.tensor(rows, dtype=torch.uint8)
    assert nibbles(packing.along_inputs(packed, 4)).tolist() == rows
    assert nibbles(packing.along_first(packed.t(), 4)).tolist() == rows
    assert packing.along_outputs(packed, 4).t().tolist() == rows
    assert packing.over_outputs(packed.t(), 4, 8).t().tolist() == rows
    assert joined(codes).tolist() == [pairs(row) for row in rows]
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    mixed = int32([words([row[i] for i in order], 4) for row in rows])
    assert packing.awq_codes(mixed).t().tolist() == rows


@given(st.lists(st.lists(st.integers(0, 255), min_size=4, max_size=4), min_size=1, max_size=9))
def test_bytes_in_words(rows: list[list[int]]) -> None:
    packed = int32([words(row, 8) for row in rows])
    assert packing.along_inputs(packed, 4).tolist() == rows
    assert packing.along_first(packed.t(), 4).tolist() == rows
    assert packing.along_outputs(packed, 8).t().tolist() == rows
    assert packing.over_outputs(packed.t(), 8, 4).t().tolist() == rows
    assert packing.signed(torch.tensor(rows, dtype=torch.uint8)).tolist() == [
        [i - 128 for i in row] for row in rows
    ]


def test_inputs_that_fill_no_word(tmp_path: Path) -> None:
    pack, config = FORMATS["ct w4 channels"]
    tensors, expected = pack(weight(8, 21))
    _, found = read_layer(save(tmp_path / "a", "a", tensors), "a", 8, 21, {"quantization_config": config})
    torch.testing.assert_close(found.values(), expected, rtol=1e-6, atol=0)


def read_whole(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> tuple[str, Coded]:
    path = save(tmp_path / "a", "a", tensors)
    return read_layer(path, "a", OUTPUTS, INPUTS, {"quantization_config": config})


def test_some_outputs_are_views(tmp_path: Path) -> None:
    pack, config = FORMATS["ct nvfp4"]
    tensors, expected = pack(weight())
    _, found = read_layer(
        save(tmp_path / "a", "a", tensors), "a", OUTPUTS, INPUTS, {"quantization_config": config}
    )
    first, rest = found.split([16, OUTPUTS - 16])
    torch.testing.assert_close(torch.cat((first.values(), rest.values())), expected, rtol=1e-6, atol=0)
    assert first.codes.data_ptr() == found.codes.data_ptr()


def test_many_outputs_are_widened_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, config = FORMATS["ct w4 groups"]
    tensors, expected = pack(weight())
    _, found = read_layer(
        save(tmp_path / "a", "a", tensors), "a", OUTPUTS, INPUTS, {"quantization_config": config}
    )
    monkeypatch.setattr("petiole.gpu_worker.models.weights.quantized._VALUES_AT_ONCE", 5 * INPUTS)
    x = torch.randn(2, 3, INPUTS)
    torch.testing.assert_close(CodedLinear(found)(x), x @ expected.t(), rtol=1e-5, atol=1e-4)


# ------------------------------------------------------------ refusals


def form_of(path: Path, raw: dict[str, Any]) -> CodeLayout:
    there = beside(path, "a", OUTPUTS, INPUTS, raw)
    found = format_of(there)
    assert found is not None, "it was taken for a plain layer"
    return found.form(there)


def refusal(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any] | None) -> str:
    """What is said before memory is taken."""
    path = save(tmp_path / "bad.safetensors", "a", tensors)
    raw = {} if config is None else {"quantization_config": config}
    with pytest.raises(ModelError) as raised:
        form_of(path, raw)
    message = str(raised.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_format_half_present_is_refused(tmp_path: Path, name: str) -> None:
    pack, config = FORMATS[name]
    tensors, _ = pack(weight())
    optional = {".weight_shape", ".g_idx", ".weight_zero_point"}  # without zeros they are symmetric
    for missing in set(tensors) - optional:
        rest = {suffix: tensor for suffix, tensor in tensors.items() if suffix != missing}
        assert " is missing: the checkpoint has a." in refusal(tmp_path, rest, config)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_tensor_of_another_shape_or_type_is_refused(tmp_path: Path, name: str) -> None:
    pack, config = FORMATS[name]
    tensors, _ = pack(weight())
    for suffix, tensor in tensors.items():
        cut = tensor.reshape(-1)[: max(1, tensor.numel() - 1)].clone() if tensor.numel() > 1 else torch.ones(2)
        assert f"tensor a{suffix}" in refusal(tmp_path, tensors | {suffix: cut}, config)
        assert suffix in refusal(tmp_path, tensors | {suffix: tensor.double()}, config)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, name: str) -> None:
    pack, config = FORMATS[name]
    tensors, _ = pack(weight())
    for suffix in (suffix for suffix in tensors if "scale" in suffix):
        bad = tensors[suffix].contiguous().clone()
        if bad.dtype == torch.uint8:
            bad.view(-1)[-1] = 255
        else:
            bad.view(-1)[-1:] = torch.tensor(float("nan")).to(bad.dtype)
        assert f"tensor a{suffix} must have" in refusal(tmp_path, tensors | {suffix: bad}, config)


@pytest.mark.parametrize(("at", "value"), [(3, -1), (5, 99), (40, 0)])
def test_groups_of_inputs_that_are_not_neighbours_are_refused(tmp_path: Path, at: int, value: int) -> None:
    pack, config = FORMATS["gptq 4 v1"]
    tensors, _ = pack(weight())
    order = tensors[".g_idx"].clone()
    order[at] = value
    message = refusal(tmp_path, tensors | {".g_idx": order}, config)
    assert message.startswith("tensor a.g_idx must ")
    assert "take the plain checkpoint" in message or "groups from 0" in message
    assert message.endswith(f"got {value}")


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("gptq 4 v1", {"bits": 8}, "8 bits (config.json), got 4 bits"),
        ("gptq 4 v1", {"group_size": 64}, "2 groups of 64 for 128 inputs, got 4 groups"),
        ("gptq 4 v1", {"quant_method": "awq"}, "tensor a.qweight must have shape [128, 8], got [16, 64]"),
        ("awq", {"quant_method": "gptq"}, "tensor a.qweight must have shape [16, 64] or [32, 64], got [128, 8]"),
        (
            "gptq 4 v1",
            {"quant_method": "fp8"},
            "must be that of the tensors of a (GPTQ, gptq), got fp8",
        ),
        ("awq", {"version": "gemv"}, "the format AWQ gemv is not read: take"),
        ("gptq 4 v1", {"quant_method": "bitsandbytes"}, "the format bitsandbytes is not read: take"),
        ("gptq 4 v1", {"quant_method": "mine"}, "quant_method must be one of"),
        ("gptq 4 v1", {"bits": 2}, "the format GPTQ of 2 bits is not read: take"),
        ("gptq 4 v1", {"bits": "four"}, "bits must be"),
        ("fp8 blocks", {"weight_block_size": [48]}, "two whole numbers"),
        ("fp8 blocks", {"weight_block_size": [64, 64]}, "tensor a.weight_scale_inv must have shape [1, 2]"),
        ("ct nvfp4", {"transform_config": {"R1": {}}}, "transform_config must be empty"),
        ("ct w4 groups", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "format must be dense"),
    ],
)
def test_a_configuration_that_contradicts_its_tensors_is_refused(
    tmp_path: Path, name: str, changed: dict[str, Any], said: str
) -> None:
    pack, config = FORMATS[name]
    assert said in refusal(tmp_path, pack(weight())[0], config | changed)


def test_gptq_without_its_configuration_is_refused(tmp_path: Path) -> None:
    """Its two versions have the same tensors and mean other zeros."""
    assert "got none" in refusal(tmp_path, FORMATS["gptq 4 v1"][0](weight())[0], None)


def test_a_plain_layer_is_plain(tmp_path: Path) -> None:
    path = save(tmp_path / "plain", "a", {".weight": weight()})
    assert format_of(beside(path, "a", OUTPUTS, INPUTS, {})) is None
    for suffix in SUFFIXES[4:]:
        other = torch.ones(1)
        assert "be quantised" in refusal(tmp_path, {".weight": weight(), suffix: other}, None)


def test_two_formats_of_one_layer_are_refused(tmp_path: Path) -> None:
    tensors, _ = FORMATS["gptq 4 v1"][0](weight())
    message = refusal(tmp_path, tensors | {".weight": weight()}, FORMATS["gptq 4 v1"][1])
    assert "be absent beside .qweight" in message

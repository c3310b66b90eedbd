"""Linear layers that the reference libraries wrote and dequantised (`record.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from petiole.gpu_worker.models.weights.quantized import CodedLinear
from tests.support.quantised import read_layer

RECORDED = sorted(Path(__file__).parent.glob("*.safetensors"))

NAMES = {
    "awq": "AWQ",
    "ct-fp8": "FP8",
    "ct-mxfp4": "MXFP4",
    "ct-nvfp4": "NVFP4",
    "ct-w4a16": "packed integers",
    "ct-w8a16": "packed integers",
    "ct-w8a8": "int8",
    "fp8": "FP8",
    "gptq": "GPTQ",
}


def test_every_format_is_recorded() -> None:
    assert {next(name for name in NAMES if path.stem.startswith(name)) for path in RECORDED} == set(NAMES)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_weights_are_what_the_library_makes_of_its_own_file(path: Path) -> None:
    with safe_open(path, "pt") as file:
        raw = {"quantization_config": json.loads(file.metadata()["quantization_config"])}
        expected = file.get_tensor("expected")
    name, weight = read_layer(path, "layer", *expected.shape, raw)
    assert path.stem.startswith(tuple(prefix for prefix, known in NAMES.items() if known == name))
    values = weight.values()
    if expected.dtype == torch.float32:
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=0)
    else:  # the library multiplies in its own type: a rounding or two of a part in 2 ** (bits of the mantissa)
        eps = torch.finfo(expected.dtype).eps
        torch.testing.assert_close(
            values, expected.float(), rtol=2 * eps, atol=eps * float(values.abs().max()) / 64
        )
    x = torch.randn(3, expected.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(CodedLinear(weight)(x), x @ values.t(), rtol=1e-5, atol=1e-5)

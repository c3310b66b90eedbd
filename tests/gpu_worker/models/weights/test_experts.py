"""Experts are read alike however a checkpoint stores them: a layer each or all in one tensor, by inputs or by
outputs, plain or quantised."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.safetensors import Checkpoint
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.models.loading import LoadOptions, load_model
from petiole.gpu_worker.models.weights.formats.quantization_config import declared_by
from petiole.gpu_worker.models.weights.fused import ExpertTensors
from petiole.gpu_worker.models.weights.linear import DenseLinear, JoinedLinear
from petiole.gpu_worker.models.weights.quantized import CodedLinear
from petiole.gpu_worker.models.weights.source import CheckpointWeights
from petiole.gpu_worker.models.weights.stacked import StackedLinear, outputs_of, rows_of
from tests.support.quantised import FORMATS

Tensors = dict[str, Tensor]
Written = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")


def load(folder: Path, **options: Any) -> Decoder:
    return load_model(folder, find_model(folder), LoadOptions(CPU, torch.float32, 257, **options))


def rewritten(plain: Path, folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """The checkpoint with other tensors."""
    folder.mkdir()
    tensors = change(load_file(plain / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))
    shutil.copy(plain / "config.json", folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def weights_of(decoder: Decoder) -> list[Tensor]:
    """The values of all experts' weights and biases."""
    found = []
    for layer in decoder.layers:
        for stack in () if layer.experts is None else (layer.experts.gate_up, layer.experts.down):
            for i in range(stack.n):
                linear: Any = stack[i]
                weight = linear.weight
                found.append(weight.values() if isinstance(linear, CodedLinear) else weight)
                found += [] if linear.bias is None else [linear.bias]
    assert found
    return found


def same(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights_of(one), weights_of(other), strict=True))


def fused(tensors: Tensors) -> Tensors:
    """Experts that are layers, in one tensor a product: [experts, outputs, inputs], gates first."""
    found: Tensors = {}
    of: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*experts\.)(\d+)\.(\w+)_proj\.weight", name)
        if match is None:
            found[name] = tensor
        else:
            of.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
    stacked = {key: torch.stack([layers[i] for i in sorted(layers)]) for key, layers in of.items()}
    for at in {at for at, _ in stacked}:
        found[at + "gate_up_proj"] = torch.cat([stacked[at, "gate"], stacked[at, "up"]], 1)
        found[at + "down_proj"] = stacked[at, "down"]
    return found


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_experts_in_one_tensor_are_those_that_are_a_layer_each(
    quantization: Any, checkpoint: Written, tmp_path: Path
) -> None:
    plain, _ = checkpoint("qwen3-moe")
    together = rewritten(plain, tmp_path / "fused", fused)
    assert same(load(plain, quantization=quantization), load(together, quantization=quantization))


def mxfp4_as_released(tensors: Tensors) -> Tensors:
    """The experts of gpt-oss as blocks and scales, the transpose of the plain form."""
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        packed = [FORMATS["ct mxfp4"][0](expert.t())[0] for expert in found.pop(name)]
        codes, scales = (torch.stack([one[key] for one in packed]) for key in (".weight_packed", ".weight_scale"))
        found[name + "_blocks"] = codes.unflatten(-1, (-1, 16))
        found[name + "_scales"] = scales
    return found


def dequantised(tensors: Tensors) -> Tensors:
    ends = ("gate_up_proj", "down_proj")
    return {
        name: torch.stack([FORMATS["ct mxfp4"][0](expert.t())[1].t() for expert in tensor])
        if name.endswith(ends)
        else tensor
        for name, tensor in tensors.items()
    }


def test_mxfp4_of_gpt_oss_is_its_plain_form(checkpoint: Written, tmp_path: Path) -> None:
    plain, _ = checkpoint("gpt-oss")
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    packed = load(rewritten(plain, tmp_path / "packed", mxfp4_as_released, quantization_config=method))
    assert packed.layers[0].experts is not None
    assert type(packed.layers[0].experts.gate_up.whole) is CodedLinear
    assert same(packed, load(rewritten(plain, tmp_path / "values", dequantised)))


def test_the_bytes_of_all_tensors_are_told_however_experts_lie(checkpoint: Written, tmp_path: Path) -> None:
    plain, _ = checkpoint("gpt-oss")
    packed = rewritten(
        plain, tmp_path / "packed", mxfp4_as_released, quantization_config={"quant_method": "mxfp4"}
    )
    for folder in (plain, packed):
        read: list[int] = []
        model = find_model(folder)
        with Checkpoint(folder) as stored:
            source = CheckpointWeights(ExpertTensors(stored, model.names.fused), declared_by(model.raw))
            model.read(source, model, LoadOptions(CPU, torch.float32, 257, on_read=read.append))
        assert sum(read) == sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())


def test_experts_of_several_formats_are_computed_each_in_its_own(checkpoint: Written, tmp_path: Path) -> None:
    """Expert 1 of each layer is quantised, the others are plain."""

    def change(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in [name for name in tensors if ".experts.1." in name]:
            packed, _ = FORMATS["ct w4 groups"][0](found.pop(name))
            found |= {name.removesuffix(".weight") + suffix: tensor for suffix, tensor in packed.items()}
        return found

    plain, _ = checkpoint("qwen3-moe")
    decoder = load(rewritten(plain, tmp_path / "mixed", change, quantization_config=FORMATS["ct w4 groups"][1]))
    other = load(plain)
    mine, others = decoder.layers[0].experts, other.layers[0].experts
    assert mine is not None
    assert others is not None
    x = torch.randn(3, 64)
    for i in range(mine.gate_up.n):
        part = mine.gate_up[i]
        assert type(part) is JoinedLinear
        assert {type(one) for one in part.parts} == {CodedLinear if i == 1 else DenseLinear}
        assert torch.allclose(part(x), others.gate_up[i](x), atol=1e-5) == (i != 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda found: {"model.layers.0.mlp.experts.down_proj": None},
            "has no tensor .*experts.0.down_proj.weight",
        ),
        (
            lambda found: {"model.layers.0.mlp.experts.down_proj": torch.zeros(6, 64, 96)},
            r"tensor model.layers.0.mlp.experts.down_proj, of .*0.down_proj.weight, must have shape \[64, 96\],"
            r" got \[96, 64\]",
        ),
        (
            lambda found: {"model.layers.0.mlp.experts.gate_up_proj": found[:5]},
            "has no tensor .*experts.5.gate_proj.weight",
        ),
        (
            lambda found: {"model.layers.0.mlp.experts.gate_up_proj": found.clone().fill_(torch.nan)},
            "must have finite numbers",
        ),
        (
            lambda found: {"model.layers.0.mlp.experts.gate_up_proj": found.int()},
            "must be of type F64, .* got I32",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused_by_the_name_of_their_tensor(
    change: Callable[[Tensor], dict[str, Tensor | None]], message: str, checkpoint: Written, tmp_path: Path
) -> None:
    def changed(tensors: Tensors) -> Tensors:
        found = {**tensors, **change(tensors["model.layers.0.mlp.experts.gate_up_proj"])}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    folder = rewritten(checkpoint("gpt-oss")[0], tmp_path / "wrong", changed)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_outputs_of_a_joined_layer_are_those_of_its_parts() -> None:
    parts = tuple(DenseLinear(torch.randn(n, 8)) for n in (3, 5, 2))
    joined, x = JoinedLinear(parts, torch.randn(10)), torch.randn(4, 8)
    assert outputs_of(joined) == 10
    for start in range(10):
        for end in range(start + 1, 11):
            assert torch.allclose(rows_of(joined, start, end)(x), joined(x)[:, start:end], atol=1e-6)
    stack = StackedLinear(joined, 5, 2)
    assert torch.allclose(stack[3](x), joined(x)[:, 6:8], atol=1e-6)

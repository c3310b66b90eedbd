"""Quantised linear layers, packed by loops that follow the descriptions of the formats, without the code of the
project."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.safetensors import SafetensorsFile
from petiole.gpu_worker.models.weights.formats.find import format_of
from petiole.gpu_worker.models.weights.formats.layer_tensors import LayerTensors
from petiole.gpu_worker.models.weights.formats.quantization_config import declared_by
from petiole.gpu_worker.models.weights.quantized import Coded

Tensors = dict[str, Tensor]
Packed = tuple[Tensors, Tensor]
"""The tensors beside a layer's name, by suffix; and the weight."""

GROUP = 32
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class OneFile:
    """A file as the tensors that readers ask for."""

    def __init__(self, path: Path) -> None:
        self.file = SafetensorsFile(path)
        self.entry = self.file.entries.__getitem__

    def __contains__(self, name: str) -> bool:
        return name in self.file.entries

    def stored(self, name: str) -> Tensor:
        return self.file.stored(name)

    def done(self, name: str) -> int:
        return self.entry(name).end - self.entry(name).start


def beside(path: Path, at: str, outputs: int, inputs: int, raw: Mapping[str, Any]) -> LayerTensors:
    return LayerTensors(OneFile(path), at, outputs, inputs, declared_by(raw))


def read_layer(path: Path, at: str, outputs: int, inputs: int, raw: Mapping[str, Any]) -> tuple[str, Coded]:
    """The name of a layer's format, and its weight."""
    there = beside(path, at, outputs, inputs, raw)
    found = format_of(there)
    assert found is not None
    weight = found.form(there).empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    assert found.read(there, weight) > 0
    return found.name, weight


def save(path: Path, at: str, tensors: Mapping[str, Tensor]) -> Path:
    save_file({at + suffix: tensor.contiguous() for suffix, tensor in tensors.items()}, str(path))
    return path


# ------------------------------------------------------------ packing


def words(codes: list[int], bits: int) -> list[int]:
    """int32 words, the first code in the lowest bits."""
    per_word = 32 // bits
    found = []
    for i in range(0, len(codes), per_word):
        word = 0
        for j, code in enumerate(codes[i : i + per_word]):
            word |= code << bits * j
        found.append(word - 2**32 if word >= 2**31 else word)
    return found


def pairs(codes: list[int]) -> list[int]:
    """Bytes of two codes each, the first in the lower half."""
    return [codes[i] | codes[i + 1] << 4 for i in range(0, len(codes), 2)]


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def columns(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def _integers(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K] from 0, scales float16 [N, groups], zeros [N, groups], and the weight."""
    top, groups = 2**bits - 1, weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / top).clamp(min=1e-4).half()
    zeros = torch.full_like(scales, 2 ** (bits - 1)) if symmetric else (-low / scales).round().clamp(0, top)
    zeros = zeros.float()
    codes = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top)
    values = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1).int(), scales, zeros.int(), values.flatten(1)


def _compressed_tensors(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> Packed:
    codes, scales, zeros, values = _integers(weight, bits, group or weight.shape[1], symmetric=symmetric)
    tensors = {
        ".weight_packed": int32([words(row, bits) for row in codes.tolist()]),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        over_outputs = [words(column, bits) for column in columns(zeros.tolist())]
        tensors[".weight_zero_point"] = int32(columns(over_outputs))
    return tensors, values


def _gptq(weight: Tensor, bits: int, group: int, *, symmetric: bool, version: int) -> Packed:
    codes, scales, zeros, values = _integers(weight, bits, group, symmetric=symmetric)
    k = weight.shape[1]
    qzeros = []
    for row in columns(zeros.tolist()):
        less = 0x11111111 if bits == 4 else 0x01010101
        unsigned = [(word - (less if version == 1 else 0)) % 2**32 for word in words(row, bits)]
        qzeros.append([word - 2**32 if word >= 2**31 else word for word in unsigned])
    tensors = {
        ".qweight": int32(columns([words(row, bits) for row in codes.tolist()])),
        ".qzeros": int32(qzeros),
        ".scales": scales.t(),
        ".g_idx": torch.tensor([i // group for i in range(k)], dtype=torch.int32),
    }
    return tensors, values


def _awq(weight: Tensor, group: int) -> Packed:
    codes, scales, zeros, values = _integers(weight, 4, group, symmetric=False)

    def packed(rows: list[list[int]]) -> Tensor:
        ordered = [[row[at + i] for at in range(0, len(row), 8) for i in _AWQ] for row in rows]
        return int32([words(row, 4) for row in ordered])

    tensors = {
        ".qweight": packed(columns(codes.tolist())),
        ".qzeros": packed(columns(zeros.tolist())),
        ".scales": scales.t(),
    }
    return tensors, values


def _int8(weight: Tensor) -> Packed:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight.float() / scales.float()).round().clamp(-128, 127)
    return {".weight": codes.to(torch.int8), ".weight_scale": scales}, codes * scales.float()


def _fp8(weight: Tensor, rows: int, columns: int, scale: str, shape: tuple[int, ...] | None = None) -> Packed:
    n, k = weight.shape
    scales = torch.empty(math.ceil(n / rows), math.ceil(k / columns))
    codes, values = torch.empty(n, k, dtype=torch.float8_e4m3fn), torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].float().abs().max() / 448
            codes[at] = (weight[at].float() / scales[i, j]).to(codes.dtype)
            values[at] = codes[at].float() * scales[i, j]
    return {".weight": codes, scale: scales if shape is None else scales.reshape(shape)}, values


def _e2m1(groups: Tensor, scales: Tensor) -> tuple[list[list[int]], Tensor]:
    """Codes of [N, groups, G], and the weight without its scales."""
    wanted = groups / scales[..., None]
    nearest = (wanted.abs()[..., None] - torch.tensor(_E2M1)).abs().argmin(-1)
    codes = nearest + 8 * (wanted < 0)
    values = torch.tensor(_E2M1)[nearest] * torch.where(wanted < 0, -1.0, 1.0)
    return codes.flatten(1).tolist(), values


def _nvfp4(weight: Tensor, packed: str, factor: str, *, inverse: bool) -> Packed:
    groups = weight.float().unflatten(1, (-1, 16))
    whole = groups.abs().max() / (448 * 6)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    codes, values = _e2m1(groups, scales.float().clamp(min=2**-9) * whole)
    tensors = {
        packed: torch.tensor([pairs(row) for row in codes], dtype=torch.uint8),
        ".weight_scale": scales,
        factor: (1 / whole).reshape(1) if inverse else whole.reshape(()),
    }
    return tensors, (values * scales.float()[..., None] * whole).flatten(1)


def _mxfp4(weight: Tensor) -> Packed:
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=2**-100).log2().ceil().int()
    codes, values = _e2m1(groups, 2.0**exponents)
    tensors = {
        ".weight_packed": torch.tensor([pairs(row) for row in codes], dtype=torch.uint8),
        ".weight_scale": (exponents + 127).to(torch.uint8),
    }
    return tensors, (values * 2.0 ** exponents[..., None]).flatten(1)


def _ct(bits: int, kind: str = "int", group: int = 0) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group" if group else "channel"}
    weights |= {"group_size": group} if group else {}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}


def _of_gptq(bits: int, version: int) -> dict[str, Any]:
    layout = "gptq" if version == 1 else "gptq_v2"
    return {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "checkpoint_format": layout}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}

FORMATS: dict[str, tuple[Callable[[Tensor], Packed], dict[str, Any]]] = {
    "ct w4 groups": (lambda w: _compressed_tensors(w, 4, GROUP, symmetric=True), _ct(4, group=GROUP)),
    "ct w4 groups, zeros": (lambda w: _compressed_tensors(w, 4, GROUP, symmetric=False), _ct(4, group=GROUP)),
    "ct w4 channels": (lambda w: _compressed_tensors(w, 4, 0, symmetric=True), _ct(4)),
    "ct w4 channels, zeros": (lambda w: _compressed_tensors(w, 4, 0, symmetric=False), _ct(4)),
    "ct w8 groups, zeros": (lambda w: _compressed_tensors(w, 8, GROUP, symmetric=False), _ct(8, group=GROUP)),
    "ct int8": (_int8, _ct(8)),
    "ct fp8": (lambda w: _fp8(w, 1, w.shape[1], ".weight_scale"), _ct(8, "float")),
    "ct fp8 static": (lambda w: _fp8(w, *w.shape, ".weight_scale", (1,)), _ct(8, "float")),
    "ct nvfp4": (lambda w: _nvfp4(w, ".weight_packed", ".weight_global_scale", inverse=True), _ct(4, "float", 16)),
    "ct mxfp4": (_mxfp4, _ct(4, "float", 32)),
    "gptq 4 v1": (lambda w: _gptq(w, 4, GROUP, symmetric=True, version=1), _of_gptq(4, 1)),
    "gptq 4 v1, zeros": (lambda w: _gptq(w, 4, GROUP, symmetric=False, version=1), _of_gptq(4, 1)),
    "gptq 4 v2, zeros": (lambda w: _gptq(w, 4, GROUP, symmetric=False, version=2), _of_gptq(4, 2)),
    "gptq 8 v1": (lambda w: _gptq(w, 8, GROUP, symmetric=True, version=1), _of_gptq(8, 1)),
    "gptq 8 v2, zeros": (lambda w: _gptq(w, 8, GROUP, symmetric=False, version=2), _of_gptq(8, 2)),
    "awq": (lambda w: _awq(w, GROUP), {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "fp8 blocks": (
        lambda w: _fp8(w, 48, 48, ".weight_scale_inv"),
        _FP8 | {"weight_block_size": [48, 48]},
    ),
    "fp8 tensor": (lambda w: _fp8(w, *w.shape, ".weight_scale_inv", ()), _FP8),
    "modelopt nvfp4": (lambda w: _nvfp4(w, ".weight", ".weight_scale_2", inverse=False), _MODELOPT),
    "modelopt fp8": (lambda w: _fp8(w, *w.shape, ".weight_scale", ()), _MODELOPT | {"quant_algo": "FP8"}),
}
"""For each format how a weight [N, K] is packed, and its `quantization_config`."""

Choose = Callable[[str], str | None]
"""The format of a layer by its name; None: plain."""


@dataclass(frozen=True)
class Quantised:
    folder: Path
    model: Any
    """Of transformers, with the weights that the checkpoint stands for."""


def layers_in(chosen: str) -> Choose:
    return lambda name: None if name.startswith("lm_head") else chosen


def quantised(plain: Path, model: Any, folder: Path, choose: Choose, config: dict[str, Any]) -> Quantised:
    """Writes a checkpoint, and the model that it stands for, of a plain one."""
    shutil.copytree(plain, folder)
    tensors, dequantised = load_file(plain / "model.safetensors"), copy.deepcopy(model)
    for name, module in dequantised.named_modules():
        chosen = choose(name) if isinstance(module, torch.nn.Linear) else None
        if chosen is None:
            continue
        packed, weight = FORMATS[chosen][0](module.weight.data)
        tensors.pop(f"{name}.weight", None)
        tensors |= {name + suffix: tensor.contiguous() for suffix, tensor in packed.items()}
        module.weight = torch.nn.Parameter(weight)
    save_file(tensors, str(folder / "model.safetensors"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return Quantised(folder, dequantised)

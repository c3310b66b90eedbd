"""NVFP4 as ModelOpt writes it: E2M1 with an e4m3 scale for 16 inputs, multiplied by `weight_scale_2`, which is the
inverse of the global scale of compressed-tensors. ModelOpt's FP8 is in `fp8`."""

from __future__ import annotations

import torch

from petiole.gpu_worker.models.weights.formats.compressed_tensors import fp4_form
from petiole.gpu_worker.models.weights.formats.layer_tensors import LayerTensors
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout


def _form(beside: LayerTensors) -> CodeLayout:
    beside.scalar(".weight_scale_2")
    return fp4_form(beside, ".weight", 16, "F8_E4M3", multiplier=True)


def _read(beside: LayerTensors, into: Coded) -> int:
    stored, factor = beside.source.stored, torch.tensor([beside.scalar(".weight_scale_2")])
    into.put(stored(beside.at + ".weight"), stored(beside.at + ".weight_scale"), None, factor)
    return beside.read(".weight", ".weight_scale", ".weight_scale_2")


NVFP4 = WeightFormat("modelopt", "NVFP4", _form, _read)

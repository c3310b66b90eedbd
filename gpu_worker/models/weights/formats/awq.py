"""AWQ in the layout "gemm": qweight int32 [K, N / 8] and qzeros int32 [groups, N / 8], packed along the outputs in
an order of their own; scales [groups, N]."""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import UNSIGNED, joined
from petiole.gpu_worker.models.weights.formats import packing
from petiole.gpu_worker.models.weights.formats.layer_tensors import LayerTensors
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout


def _form(beside: LayerTensors) -> CodeLayout:
    n, k = beside.outputs, beside.inputs
    if n % 8:
        raise beside.wrong(".qweight", "have outputs in words of eight", f"{n} outputs")
    beside.tensor(".qweight", ("I32",), (k, n // 8))
    if beside.declared.bits not in (None, 4):
        raise beside.wrong(".qweight", f"have codes of {beside.declared.bits} bits (config.json)", "4 bits")
    group, scales = beside.grouped(".scales", by_row=False)
    _zeros(beside, scales.shape[0])
    return CodeLayout(n, k, group, UNSIGNED, scales=scales.dtype, zeros=torch.uint8)


def _read(beside: LayerTensors, into: Coded) -> int:
    scales = beside.source.stored(beside.at + ".scales")
    codes = joined(packing.awq_codes(beside.source.stored(beside.at + ".qweight")))
    into.put(codes, scales.t(), _zeros(beside, scales.shape[0]), None)
    return beside.read(".qweight", ".scales", ".qzeros")


def _zeros(beside: LayerTensors, groups: int) -> Tensor:
    return packing.awq_codes(beside.tensor(".qzeros", ("I32",), (groups, beside.outputs // 8)))


AWQ = WeightFormat("awq", "AWQ", _form, _read)

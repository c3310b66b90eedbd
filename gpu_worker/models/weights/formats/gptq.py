"""GPTQ, and AutoRound's files in its layout.

qweight   int32 [K * bits / 32, N], the first input in the lowest bits
scales    [groups, N]
qzeros    int32 [groups, N * bits / 32], the first output in the lowest bits. Format "gptq" stores words from which
          1 has been taken for each zero; "gptq_v2" stores the zeros
g_idx     int32 [K], the group of each input. Only groups of neighbours are read: input k is in group k / size"""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import SIGNED, UNSIGNED
from petiole.gpu_worker.models.weights.formats import packing
from petiole.gpu_worker.models.weights.formats.layer_tensors import LayerTensors
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.formats.unread import INSTEAD
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout

_ONES = {4: 0x11111111, 8: 0x01010101}


def _bits(beside: LayerTensors) -> int:
    n, k = beside.outputs, beside.inputs
    rows = {k * bits // 32: bits for bits in (4, 8) if k * bits % 32 == 0 and n * bits % 32 == 0}
    words = beside.tensor(".qweight", ("I32",), *((one, n) for one in rows))
    if not rows:
        raise beside.wrong(".qweight", "have inputs and outputs in whole words of 32 bits", f"{k} and {n}")
    bits = rows[words.shape[0]]
    if beside.declared.bits not in (None, bits):
        raise beside.wrong(".qweight", f"have codes of {beside.declared.bits} bits (config.json)", f"{bits} bits")
    return bits


def _form(beside: LayerTensors) -> CodeLayout:
    n, k, bits = beside.outputs, beside.inputs, _bits(beside)
    group, scales = beside.grouped(".scales", by_row=False)
    _check_order(beside, group, scales.shape[0])
    asymmetric = bool((_zeros(beside, bits, scales.shape[0]) != (8 if bits == 4 else 0)).any())
    zeros = (torch.uint8 if bits == 4 else torch.int8) if asymmetric else None
    if bits == 4:
        return CodeLayout(n, k, group, UNSIGNED if asymmetric else SIGNED, scales=scales.dtype, zeros=zeros)
    return CodeLayout(n, k, group, (), torch.int8, scales.dtype, zeros)


def _read(beside: LayerTensors, into: Coded) -> int:
    bits, scales = into.form.bits, beside.source.stored(beside.at + ".scales")
    codes = packing.along_first(beside.source.stored(beside.at + ".qweight"), into.form.code_bytes)
    zeros = None if into.zeros is None else _zeros(beside, bits, scales.shape[0])
    into.put(codes if bits == 4 else packing.signed(codes), scales.t(), zeros, None)
    return beside.read(".qweight", ".scales", ".qzeros", ".g_idx")


def _zeros(beside: LayerTensors, bits: int, groups: int) -> Tensor:
    words = beside.tensor(".qzeros", ("I32",), (groups, beside.outputs * bits // 32))
    if beside.declared.zeros_less_one:
        words = words + _ONES[bits]  # as its writers subtract it: from the word, with a carry
    zeros = packing.along_outputs(words, bits)
    return zeros if bits == 4 else packing.signed(zeros)


def _check_order(beside: LayerTensors, group: int, groups: int) -> None:
    if not beside.has(".g_idx"):
        return
    order = beside.tensor(".g_idx", ("I32", "I64"), (beside.inputs,))
    low, high = (int(one) for one in torch.aminmax(order))
    if low < 0 or high >= groups:
        raise beside.wrong(".g_idx", f"have groups from 0 to {groups - 1}", low if low < 0 else high)
    wanted = torch.arange(beside.inputs) // group
    if not torch.equal(order.long(), wanted):
        at = int((order.long() != wanted).nonzero()[0])
        raise beside.wrong(
            ".g_idx",
            f"name group {int(wanted[at])} for input {at} (desc_act with groups is not read: {INSTEAD})",
            int(order[at]),
        )


GPTQ = WeightFormat("gptq", "GPTQ", _form, _read)

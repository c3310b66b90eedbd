"""compressed-tensors, the format of llm-compressor and of most quantised checkpoints for vLLM.

packed integers   weight_packed int32 [N, words], the first input in the lowest bits; a code is the value + 8, or
                  + 128. Zeros, if there are any: int32 [words, groups], packed along the outputs, likewise
integers          weight int8 [N, K]
NVFP4             weight_packed uint8 [N, K / 2] of E2M1, weight_scale e4m3 for 16 inputs; divided by
                  weight_global_scale
MXFP4             weight_packed uint8 [N, K / 2] of E2M1, weight_scale for 32 inputs: powers of two as bytes

Scales have the shape [N, groups] or, of channels, [N, 1]. FP8 is in `fp8`."""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import E2M1, SIGNED, UNSIGNED
from petiole.gpu_worker.models.weights.formats import packing
from petiole.gpu_worker.models.weights.formats.layer_tensors import LayerTensors, Shape
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout

_KIND = "compressed-tensors"


def _bits(beside: LayerTensors) -> int:
    n, k = beside.outputs, beside.inputs
    words = {-(-k * bits // 32): bits for bits in (8, 4)}
    packed = beside.tensor(".weight_packed", ("I32",), *((n, one) for one in words))
    return words[packed.shape[1]]


def _packed_form(beside: LayerTensors) -> CodeLayout:
    n, bits = beside.outputs, _bits(beside)
    if beside.declared.bits not in (None, bits):
        raise beside.wrong(
            ".weight_packed", f"have codes of {beside.declared.bits} bits (config.json)", f"{bits} bits"
        )
    _check_shape(beside)
    _check_order(beside)
    group, scales = beside.grouped(".weight_scale")
    zeros = None
    if beside.has(".weight_zero_point"):
        _zeros(beside, bits, scales.shape[1])
        zeros = torch.uint8 if bits == 4 else torch.int8
    table = (UNSIGNED if zeros else SIGNED) if bits == 4 else ()
    codes = torch.uint8 if bits == 4 else torch.int8
    return CodeLayout(n, beside.inputs, group, table, codes, scales.dtype, zeros)


def _read_packed(beside: LayerTensors, into: Coded) -> int:
    bits, scales = into.form.bits, beside.source.stored(beside.at + ".weight_scale")
    codes = packing.along_inputs(beside.source.stored(beside.at + ".weight_packed"), into.form.code_bytes)
    zeros = _zeros(beside, bits, scales.shape[1]) if into.zeros is not None else None
    into.put(codes if bits == 4 else packing.signed(codes), scales, zeros, None)
    return beside.read(".weight_packed", ".weight_scale", ".weight_zero_point")


def _zeros(beside: LayerTensors, bits: int, groups: int) -> Tensor:
    words = beside.tensor(".weight_zero_point", ("I32",), (-(-beside.outputs * bits // 32), groups))
    zeros = packing.over_outputs(words, bits, beside.outputs)
    return zeros if bits == 4 else packing.signed(zeros)


def _integers_form(beside: LayerTensors) -> CodeLayout:
    n, k = beside.outputs, beside.inputs
    beside.tensor(".weight", ("I8",), (n, k))
    group, scales = beside.grouped(".weight_scale")
    zeros = None
    if beside.has(".weight_zero_point"):
        beside.tensor(".weight_zero_point", ("I8",), tuple(scales.shape))
        zeros = torch.int8
    return CodeLayout(n, k, group, (), torch.int8, scales.dtype, zeros)


def _read_integers(beside: LayerTensors, into: Coded) -> int:
    zeros = beside.source.stored(beside.at + ".weight_zero_point") if into.zeros is not None else None
    stored = beside.source.stored
    into.put(stored(beside.at + ".weight"), stored(beside.at + ".weight_scale"), zeros, None)
    return beside.read(".weight", ".weight_scale", ".weight_zero_point")


def _nvfp4_form(beside: LayerTensors) -> CodeLayout:
    beside.scalar(".weight_global_scale")
    return fp4_form(beside, ".weight_packed", 16, "F8_E4M3", multiplier=True)


def _read_nvfp4(beside: LayerTensors, into: Coded) -> int:
    stored = beside.source.stored
    factor = 1 / torch.tensor([beside.scalar(".weight_global_scale")])
    into.put(stored(beside.at + ".weight_packed"), stored(beside.at + ".weight_scale"), None, factor)
    return beside.read(".weight_packed", ".weight_scale", ".weight_global_scale")


def _mxfp4_form(beside: LayerTensors) -> CodeLayout:
    return fp4_form(beside, ".weight_packed", 32, "U8", multiplier=False)


def _read_mxfp4(beside: LayerTensors, into: Coded) -> int:
    powers = beside.source.stored(beside.at + ".weight_scale").view(torch.float8_e8m0fnu)
    into.put(beside.source.stored(beside.at + ".weight_packed"), powers, None, None)
    return beside.read(".weight_packed", ".weight_scale")


def fp4_form(beside: LayerTensors, packed: str, group: int, scales: str, *, multiplier: bool) -> CodeLayout:
    """E2M1 with scales of eight bits. scales: their type in the file; U8 and F8_E8M0 are powers of two."""
    n, k = beside.outputs, beside.inputs
    if k % group:
        raise beside.wrong(packed, f"have inputs in groups of {group}", f"{k} inputs")
    beside.tensor(packed, ("U8",), (n, k // 2))
    shape = (n, k // group)
    if scales == "F8_E4M3":
        beside.scales(".weight_scale", (scales,), shape)
        return CodeLayout(n, k, group, E2M1, scales=torch.float8_e4m3fn, multiplier=multiplier)
    check_powers(beside, ".weight_scale", shape)
    return CodeLayout(n, k, group, E2M1, scales=torch.float8_e8m0fnu, multiplier=multiplier)


def check_powers(beside: LayerTensors, suffix: str, shape: Shape) -> None:
    """Powers of two: a byte is the exponent + 127, and 255 is not a number."""
    powers = beside.tensor(suffix, ("U8", "F8_E8M0"), shape).view(torch.uint8)
    if bool((powers == 255).any()):
        raise beside.wrong(suffix, "have exponents from 0 to 254", "255 (NaN)")


def _check_shape(beside: LayerTensors) -> None:
    if beside.has(".weight_shape"):
        found = beside.tensor(".weight_shape", ("I64", "I32"), (2,)).tolist()
        if found != [beside.outputs, beside.inputs]:
            raise beside.wrong(".weight_shape", f"be [{beside.outputs}, {beside.inputs}]", found)


def _check_order(beside: LayerTensors) -> None:
    if beside.has(".weight_g_idx"):
        raise beside.wrong(".weight_g_idx", "be absent (groups of inputs that are not neighbours)", "one")


PACKED = WeightFormat(_KIND, "packed integers", _packed_form, _read_packed)
INTEGERS = WeightFormat(_KIND, "int8", _integers_form, _read_integers)
NVFP4 = WeightFormat(_KIND, "NVFP4", _nvfp4_form, _read_nvfp4)
MXFP4 = WeightFormat("mxfp4", "MXFP4", _mxfp4_form, _read_mxfp4)

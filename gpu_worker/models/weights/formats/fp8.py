"""Eight-bit floats (e4m3): `fp8` as DeepSeek and Qwen publish it, compressed-tensors and ModelOpt.

weight       e4m3 [N, K]
the scale    `weight_scale_inv` or `weight_scale`; despite the first name, weights are multiplied by it. One for
             the tensor ([] or [1]), for each output ([N] or [N, 1]), or for blocks ([N / 128, K / 128], the last
             of which may be smaller). Floats, or powers of two"""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.weights.formats.compressed_tensors import check_powers
from petiole.gpu_worker.models.weights.formats.layer_tensors import FLOATS, LayerTensors
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout

_BLOCK = (128, 128)
_NAN = 127
"""Without its sign."""


def _suffix(beside: LayerTensors) -> str:
    both = beside.has(".weight_scale", ".weight_scale_inv")
    if both:
        raise beside.wrong(".weight_scale", "be absent beside .weight_scale_inv", "both")
    return ".weight_scale_inv" if beside.has(".weight_scale_inv") else ".weight_scale"


def _form(beside: LayerTensors) -> CodeLayout:
    n, k = beside.outputs, beside.inputs
    beside.tensor(".weight", ("F8_E4M3",), (n, k))
    suffix, (rows, columns) = _suffix(beside), beside.declared.block or _BLOCK
    blocks = (-(-n // rows), -(-k // columns))
    shapes = ((), (1,), (n,), (n, 1), blocks) if beside.declared.block is None else (blocks,)
    found = beside.tensor(suffix, (*FLOATS, "U8", "F8_E8M0"), *shapes)
    if found.element_size() == 1:
        check_powers(beside, suffix, tuple(found.shape))
        scales = torch.float8_e8m0fnu
    else:
        beside.scales(suffix, FLOATS)
        scales = found.dtype
    blocked = tuple(found.shape) == blocks and tuple(found.shape) != (n, 1)
    return CodeLayout(n, k, columns if blocked else k, (), torch.float8_e4m3fn, scales)


def _read(beside: LayerTensors, into: Coded) -> int:
    codes, suffix = beside.source.stored(beside.at + ".weight"), _suffix(beside)
    if bool(((codes.view(torch.uint8) & 127) == _NAN).any()):
        raise beside.wrong(".weight", "have finite numbers", "NaN")
    into.put(codes, _of_outputs(beside, suffix, into.form), None, None)
    return beside.read(".weight", suffix)


def _of_outputs(beside: LayerTensors, suffix: str, form: CodeLayout) -> Tensor:
    """The scales, [outputs or 1, groups]."""
    stored = beside.source.stored(beside.at + suffix)
    if stored.element_size() == 1:
        stored = stored.view(torch.float8_e8m0fnu)
    if form.group == form.inputs and stored.numel() in (1, form.outputs):
        return stored.reshape(-1, 1)
    rows, _ = beside.declared.block or _BLOCK
    of_output = torch.arange(form.outputs) // rows
    numbers = stored.view(torch.uint8) if stored.element_size() == 1 else stored
    return numbers[of_output].view(stored.dtype)


FP8 = WeightFormat("fp8", "FP8", _form, _read)

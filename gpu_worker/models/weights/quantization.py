"""Plain weights become four-bit codes while they are loaded: groups of 32 inputs with a scale each.

The largest weight of a group is at one of the levels 1 to 8 of its scale; the level with the least squared error
counts. Weights that were trained on such a grid and stored in bfloat16 are found again exactly: of all scales
whose products round to the stored numbers, the one in the middle counts."""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import SIGNED, joined
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout

GROUP = 32
_VALUES_AT_ONCE = 2**22
_LARGEST_EXPONENT = 14
"""The largest exponent of an output's scales in float16; the multiplier of the output, a power of two, has the
rest."""


def int4_form(outputs: int, inputs: int) -> CodeLayout:
    return CodeLayout(outputs, inputs, GROUP, SIGNED, scales=torch.float16, multiplier=True)


def quantise_int4(weight: Tensor, into: Coded) -> None:
    """weight: float32 [outputs, inputs]. into: of the form `int4_form`."""
    rows = max(1, _VALUES_AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, len(weight), rows):
        end = min(start + rows, len(weight))
        _quantise(weight[start:end], into.rows(start, end))


def _quantise(weight: Tensor, into: Coded) -> None:
    inputs = weight.shape[1]
    groups = torch.nn.functional.pad(weight, (0, -inputs % GROUP)).view(len(weight), -1, GROUP)
    codes, scales = _best_level(groups)
    scales = _exact_scale(groups, codes, scales)
    _, exponents = torch.frexp(scales.abs().amax(1))
    multiplier = torch.ldexp(torch.ones_like(weight[:, 0]), exponents - _LARGEST_EXPONENT)
    unsigned = (codes + 8).to(torch.uint8).flatten(1)[:, :inputs]
    into.put(joined(unsigned), scales / multiplier[:, None], None, multiplier)


def _best_level(groups: Tensor) -> tuple[Tensor, Tensor]:
    """[n, groups, 32] -> codes from -8 to 7 as floats, and scales [n, groups] that fit them best."""
    peak = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    codes, scales = torch.zeros_like(groups), torch.zeros_like(peak)
    gain = torch.zeros_like(peak)  # by how much the squared error is less than that of zeros
    for level in (-8, 7, 6, 5, 4, 3, 2, 1):
        step = peak / level
        found = (groups / torch.where(step == 0, 1.0, step)).round_().clamp_(-8, 7)
        product, square = (groups * found).sum(-1, keepdim=True), (found * found).sum(-1, keepdim=True)
        square.clamp_(min=1)
        better = product * product / square > gain
        gain = torch.where(better, product * product / square, gain)
        scales = torch.where(better, product / square, scales)
        codes = torch.where(better, found, codes)
    return codes, scales.squeeze(-1)


def _exact_scale(groups: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The scales whose products with the codes round to the weights in bfloat16, where there are such; else those
    that were given."""
    size, counted = groups.abs(), codes.abs()
    exponent = torch.frexp(size)[1]
    half = torch.ldexp(torch.ones_like(size), exponent - 9)  # of the distance to the next bfloat16
    below = torch.where(size == torch.ldexp(torch.ones_like(size), exponent - 1), half / 2, half)
    used = counted > 0
    low = torch.where(used, (size - below) / counted, 0).amax(-1)
    high = torch.where(used, (size + half) / counted, torch.inf).amin(-1)
    grid = (used | (size == 0)).all(-1) & (low <= high) & used.any(-1)
    return torch.where(grid, torch.sign(scales) * (low + high) / 2, scales)

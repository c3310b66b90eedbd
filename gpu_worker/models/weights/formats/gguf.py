"""Blocks of GGUF files (`checkpoint.gguf.blocks`).

Q4_0 and Q8_0 are the canonical form with other orders of codes. A scale of Q6_K is the product of two
numbers, which float32 holds. So is a scale of Q4_K, whose zero is the minimum divided by the scale, in float32."""

from __future__ import annotations

import torch

from petiole.gpu_worker.models.checkpoint.gguf.blocks import CODES, in_blocks
from petiole.gpu_worker.models.weights.coded import SIGNED, UNSIGNED, Coded, Form
from petiole.gpu_worker.models.weights.formats.beside import Beside
from petiole.gpu_worker.models.weights.formats.packing import joined
from petiole.gpu_worker.models.weights.formats.reader import Format

_FORMS = {
    "Q4_0": Form(0, 0, 32, SIGNED, scales=torch.float16),
    "Q8_0": Form(0, 0, 32, (), torch.int8, torch.float16),
    "Q4_K": Form(0, 0, 32, UNSIGNED, zeros=torch.float32),
    "Q6_K": Form(0, 0, 16, (), torch.int8),
}
_FACTORS = {"Q4_0": slice(0, 2), "Q8_0": slice(0, 2), "Q4_K": slice(0, 4), "Q6_K": slice(208, 210)}
"""Where blocks have numbers in float16."""


def _form(beside: Beside) -> Form:
    n, k, kind = beside.outputs, beside.inputs, beside.dtype(".weight")
    blocks = in_blocks(beside.tensor(".weight", (kind,), (n, k)), kind)
    factors = blocks[..., _FACTORS[kind]].contiguous().view(torch.float16)
    if not bool(torch.isfinite(factors).all()):
        raise beside.wrong(".weight", "have finite scales", "inf or NaN")
    form = _FORMS[kind]
    return Form(n, k, form.group, form.table, form.codes, form.scales, form.zeros)


def _read(beside: Beside, into: Coded) -> int:
    kind = beside.dtype(".weight")
    codes = CODES[kind](in_blocks(beside.source.stored(beside.at + ".weight"), kind))
    into.put(joined(codes.codes) if codes.four_bits else codes.codes, codes.scales, codes.zeros, None)
    return beside.read(".weight")


FORMATS = {kind: Format("gguf", kind, _form, _read) for kind in _FORMS}
"""By type of tensor."""

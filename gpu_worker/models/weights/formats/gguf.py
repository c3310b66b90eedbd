"""Blocks of GGUF files (`checkpoint.gguf.blocks`).

Every type is the canonical form with another order of codes, exactly: scales, offsets and their factors are the
file's."""

from __future__ import annotations

import torch

from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
from petiole.gpu_worker.models.checkpoint.gguf.blocks import CODINGS, in_blocks
from petiole.gpu_worker.models.weights.formats.layer_tensors import LayerTensors
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout
from petiole.gpu_worker.models.weights.threads import for_each

_VALUES_AT_ONCE = 2**19
"""So many weights are read at a time: what is made of them on the way stays in the caches."""


def _form(beside: LayerTensors) -> CodeLayout:
    n, k, kind = beside.outputs, beside.inputs, beside.dtype(".weight")
    coding = CODINGS[kind]
    blocks = in_blocks(beside.tensor(".weight", (kind,), (n, k)), kind)
    if not all(bool(torch.isfinite(one.float()).all()) for one in coding.factors(blocks)):
        raise beside.wrong(".weight", "have finite scales", "inf or NaN")
    return layout(kind, n, k)


def layout(kind: str, n: int, k: int) -> CodeLayout:
    """The form of n outputs of k inputs in blocks of this type."""
    coding = CODINGS[kind]
    return CodeLayout(
        outputs=n,
        inputs=k,
        group=coding.group,
        table=coding.table,
        codes=torch.uint8 if coding.table else torch.int8,
        scales=torch.int8 if coding.steps else coding.scales,
        zeros=(torch.int8 if coding.steps else coding.scales) if coding.offsets else None,
        offsets=coding.offsets,
        steps=TYPES[kind].values // coding.group if coding.steps else 0,
    )


def _read(beside: LayerTensors, into: Coded) -> int:
    kind = beside.dtype(".weight")
    blocks = in_blocks(beside.source.stored(beside.at + ".weight"), kind)
    step = max(1, _VALUES_AT_ONCE // beside.inputs)

    def part(start: int) -> None:
        end = min(start + step, beside.outputs)
        found = CODINGS[kind].codes(blocks[start:end])
        into.rows(start, end).put(
            found.codes, found.scales, found.offsets, None, found.factors, found.offset_factors
        )

    for_each(part, range(0, beside.outputs, step))
    return beside.read(".weight")


FORMATS = {kind: WeightFormat("gguf", kind, _form, _read) for kind in CODINGS}
"""By type of tensor."""

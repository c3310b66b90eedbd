"""Blocks of GGUF files (`checkpoint.gguf.blocks`).

Every type is the canonical form with another order of codes, exactly: scales, offsets and their factors are the
file's."""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.codes import sixes
from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
from petiole.gpu_worker.models.checkpoint.gguf.blocks import CODINGS, in_blocks
from petiole.gpu_worker.models.weights.formats.layer_tensors import BlockReader, LayerTensors
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout, fits_six_bits, in_eight_bits
from petiole.gpu_worker.models.weights.threads import for_each

_VALUES_AT_ONCE = 2**19
"""So many weights are read at a time: what is made of them on the way stays in the caches."""


def _form(beside: LayerTensors) -> CodeLayout:
    n, k, kind = beside.outputs, beside.inputs, beside.dtype(".weight")
    raw = beside.tensor(".weight", (kind,), (n, k))
    if beside.scanned and not _are_finite(beside, kind, raw):
        raise _not_finite(beside)
    return layout(kind, n, k)


def _not_finite(beside: LayerTensors) -> ModelError:
    return beside.wrong(".weight", "have finite scales", "inf or NaN")


def _are_finite(beside: LayerTensors, kind: str, raw: Tensor) -> bool:
    if (compiled := _compiled(beside, kind)) is not None:
        return compiled.finite(kind, raw)
    factors = CODINGS[kind].factors(in_blocks(raw, kind))
    return all(bool(torch.isfinite(one.float()).all()) for one in factors)


def _compiled(beside: LayerTensors, kind: str) -> BlockReader | None:
    return beside.compiled if beside.compiled is not None and beside.compiled.knows(kind) else None


def layout(kind: str, n: int, k: int) -> CodeLayout:
    """The form of n outputs of k inputs in blocks of this type."""
    coding = CODINGS[kind]
    return CodeLayout(
        outputs=n,
        inputs=k,
        group=coding.group,
        table=coding.table,
        codes=torch.uint8 if coding.table or coding.six else torch.int8,
        scales=torch.int8 if coding.steps else coding.scales,
        zeros=(torch.int8 if coding.steps else coding.scales) if coding.offsets else None,
        offsets=coding.offsets,
        steps=TYPES[kind].values // coding.group if coding.steps else 0,
    )


def _widens(own: CodeLayout, form: CodeLayout) -> bool:
    """Whether weights of a type's own form become another one without a rounding: codes become integers of six or
    eight bits, groups are cut, offsets of zero are added."""
    same_codes = own.table == form.table and own.codes == form.codes
    eight = in_eight_bits(own)
    integers = form.codes == torch.int8 and eight is not None and eight.codes == torch.int8
    integers = integers or (form.bits == 6 and fits_six_bits(own))
    same_zeros = own.zeros is None or (own.zeros, own.offsets) == (form.zeros, form.offsets)
    same_blocks = bool(own.steps) == bool(form.steps) and own.steps * own.group == form.steps * form.group
    return (
        (same_codes or integers)
        and same_zeros
        and same_blocks
        and (own.scales, own.group % form.group, form.multiplier) == (form.scales, 0, False)
        and (form.offsets or form.zeros is None)
    )


def _fills(beside: LayerTensors, form: CodeLayout) -> bool:
    kind = beside.dtype(".weight")
    return _compiled(beside, kind) is not None and _widens(layout(kind, 0, form.inputs), form)


def _read(beside: LayerTensors, into: Coded) -> int:
    kind = beside.dtype(".weight")
    raw = beside.source.stored(beside.at + ".weight")
    if (compiled := _compiled(beside, kind)) is not None:
        if not compiled.read(kind, raw, into):
            raise _not_finite(beside)
        return beside.read(".weight")
    if not _are_finite(beside, kind, raw):
        raise _not_finite(beside)
    blocks = in_blocks(raw, kind)
    step = max(1, _VALUES_AT_ONCE // beside.inputs)

    def part(start: int) -> None:
        end = min(start + step, beside.outputs)
        found = CODINGS[kind].codes(blocks[start:end])
        into.rows(start, end).put(
            sixes(found.codes) if into.form.bits == 6 else found.codes,
            found.scales,
            found.offsets,
            None,
            found.factors,
            found.offset_factors,
        )

    for_each(part, range(0, beside.outputs, step))
    return beside.read(".weight")


FORMATS = {kind: WeightFormat("gguf", kind, _form, _read, _fills) for kind in CODINGS}
"""By type of tensor."""

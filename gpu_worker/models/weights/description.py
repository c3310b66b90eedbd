"""How a model's weights are stored in memory, in a few words for operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import torch

from petiole.gpu_worker.models.checkpoint.codes import E2M1
from petiole.gpu_worker.models.weights.linear import DenseLinear, Fp8Linear, Int8Linear
from petiole.gpu_worker.models.weights.quantized import CodedLinear, CodeLayout

_SCALES = {torch.float8_e4m3fn: "nvfp4", torch.float8_e8m0fnu: "mxfp4"}


def formats_of(decoder: object) -> str:
    """The formats of a decoder's linear layers, the one with the most weights first."""
    counts: Counter[str] = Counter()
    for name, n in _stored(decoder):
        counts[name] += n
    return ", ".join(name for name, _ in counts.most_common())


def form_name(form: CodeLayout) -> str:
    """A name such as "int4 g32": four bits, a scale for 32 inputs."""
    if form.table == E2M1:
        return _SCALES.get(form.scales, "fp4")
    kind = "fp8" if form.codes == torch.float8_e4m3fn else f"int{form.bits}"
    grouped = f" g{form.group}" if form.group < form.inputs else ""
    beside = "" if form.zeros is None else " with offsets" if form.offsets else " with zeros"
    return f"{kind}{grouped}{beside}"


def _name_of(linear: CodedLinear) -> str:
    return form_name(linear.weight.form) + (" beside int8 inputs" if linear.int8_inputs else "")


def _stored(part: object) -> Iterator[tuple[str, int]]:
    """Formats of the linear layers below, with their numbers of weights."""
    if isinstance(part, DenseLinear):
        yield str(part.weight.dtype).removeprefix("torch."), part.weight.numel()
    elif isinstance(part, Int8Linear | Fp8Linear):
        yield "int8" if isinstance(part, Int8Linear) else "fp8", part.weight.numel()
    elif isinstance(part, CodedLinear):
        yield _name_of(part), part.weight.form.outputs * part.weight.form.inputs
    elif isinstance(part, tuple):
        for one in part:
            yield from _stored(one)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _stored(getattr(part, field.name))

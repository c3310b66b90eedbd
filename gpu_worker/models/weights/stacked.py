"""Layers of one size, one after the other in the memory of one layer: whatever the format, they are read together
like queries, keys and values, and can be had one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from petiole.gpu_worker.models.weights.linear import DenseLinear, Fp8Linear, Int8Linear, JoinedLinear, Linear
from petiole.gpu_worker.models.weights.quantized import CodedLinear


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """whole: its outputs are those of `n` layers, `outputs` of each."""

    whole: Linear
    n: int
    outputs: int

    def __getitem__(self, i: int) -> Linear:
        """The i-th layer, over the same memory."""
        assert 0 <= i < self.n, f"layer {i} of {self.n}"
        return rows_of(self.whole, i * self.outputs, (i + 1) * self.outputs)


def rows_of(linear: Linear, start: int, end: int) -> Linear:
    """Some outputs of a layer, over the same memory."""
    part = slice(start, end)
    match linear:
        case DenseLinear(weight, bias):
            return DenseLinear(weight[part], None if bias is None else bias[part])
        case Int8Linear(weight, scale, bias):
            return Int8Linear(weight[part], scale[part], None if bias is None else bias[part])
        case Fp8Linear(weight, scale, quantize_rows, bias):
            return Fp8Linear(weight[part], scale[:, part], quantize_rows, None if bias is None else bias[part])
        case CodedLinear(weight, bias):
            return replace(linear, weight=weight.rows(start, end), bias=None if bias is None else bias[part])
        case JoinedLinear(parts, bias):
            return _of_joined(parts, start, end, None if bias is None else bias[part])
    raise TypeError(f"a {type(linear).__name__} has no outputs to choose from")


def outputs_of(linear: Linear) -> int:
    match linear:
        case DenseLinear(weight) | Int8Linear(weight) | Fp8Linear(weight):
            return weight.shape[0]
        case CodedLinear(weight):
            return weight.form.outputs
        case JoinedLinear(parts):
            return sum(map(outputs_of, parts))
    raise TypeError(f"a {type(linear).__name__} has no outputs to count")


def _of_joined(parts: tuple[Linear, ...], start: int, end: int, bias: Tensor | None) -> JoinedLinear:
    found, at = [], 0
    for part in parts:
        n = outputs_of(part)
        low, high = max(start, at), min(end, at + n)
        if low < high:
            found.append(part if high - low == n else rows_of(part, low - at, high - at))
        at += n
    return JoinedLinear(tuple(found), bias)

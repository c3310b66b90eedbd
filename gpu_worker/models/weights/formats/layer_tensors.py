"""The tensors that stand beside the name of a linear layer, and what is demanded of them.

Every check raises `ModelError` with the tensor, the limit and the value. Checks read scales and zeros, never
codes, and take no memory that outlives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.safetensors import TensorEntry
from petiole.gpu_worker.models.weights.formats.quantization_config import QuantizationConfig
from petiole.gpu_worker.models.weights.quantized import Coded

Shape = tuple[int, ...]

FLOATS = ("F32", "F16", "BF16")


class StoredTensors(Protocol):
    """The tensors of a checkpoint, as they are stored."""

    def __contains__(self, name: str) -> bool: ...
    def entry(self, name: str) -> TensorEntry: ...
    def stored(self, name: str) -> Tensor:
        """A view of the file, in its own type. Do not keep it."""
        ...

    def done(self, name: str) -> int:
        """The tensor has been read. Returns its number of bytes in the file."""
        ...


class BlockReader(Protocol):
    """Compiled code that reads blocks of GGUF files. raw: uint8 [outputs, bytes of a row], of this type."""

    def knows(self, kind: str) -> bool: ...
    def finite(self, kind: str, raw: Tensor) -> bool:
        """Whether all that scales are made of is finite."""
        ...

    def read(self, kind: str, raw: Tensor, into: Coded) -> bool:
        """Fills memory of the type's own form, or of one to which `formats.gguf` lets it widen. Returns whether
        all that scales are made of is finite."""
        ...


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """at: the layer's name; a tensor's name is `at` + suffix. declared: what config.json says of the weights.
    compiled: reads blocks; None: torch reads them all. scanned: a format that finds damage only while it reads
    looks for it when it is asked for the form, because nobody will read."""

    source: StoredTensors
    at: str
    outputs: int
    inputs: int
    declared: QuantizationConfig
    compiled: BlockReader | None = None
    scanned: bool = False

    def has(self, *suffixes: str) -> bool:
        return all(self.at + suffix in self.source for suffix in suffixes)

    def dtype(self, suffix: str) -> str:
        """The type in the file; "" if the tensor is missing."""
        return self.source.entry(self.at + suffix).dtype if self.has(suffix) else ""

    def shape(self, suffix: str) -> Shape:
        return self.source.entry(self.at + suffix).shape

    def wrong(self, suffix: str, limit: str, got: object) -> ModelError:
        return ModelError(f"tensor {self.at}{suffix} must {limit}, got {got}")

    def tensor(self, suffix: str, types: Sequence[str], *shapes: Shape) -> Tensor:
        """A view of the tensor, which has one of these types and shapes."""
        if not self.has(suffix):
            there = ", ".join(self.at + other for other in SUFFIXES if self.has(other))
            raise ModelError(f"tensor {self.at}{suffix} is missing: the checkpoint has {there}")
        if self.dtype(suffix) not in types:
            raise self.wrong(suffix, f"be of type {' or '.join(types)}", self.dtype(suffix))
        if shapes and self.shape(suffix) not in shapes:
            limit = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise self.wrong(suffix, f"have shape {limit}", list(self.shape(suffix)))
        return self.source.stored(self.at + suffix)

    def scales(self, suffix: str, types: Sequence[str], *shapes: Shape) -> Tensor:
        """A tensor of finite numbers."""
        found = self.tensor(suffix, types, *shapes)
        if found.numel() and not bool(torch.isfinite(found.float()).all()):
            raise self.wrong(suffix, "have finite numbers", "inf or NaN")
        return found

    def scalar(self, suffix: str) -> float:
        """A finite number that is not zero."""
        number = float(self.scales(suffix, FLOATS, (), (1,)))
        if number == 0:
            raise self.wrong(suffix, "not be zero", number)
        return number

    def grouped(self, suffix: str, *, by_row: bool = True) -> tuple[int, Tensor]:
        """The inputs of a group, and the scales [outputs, groups]; not `by_row`: [groups, outputs]."""
        scales, n = self.scales(suffix, FLOATS), self.outputs
        if scales.ndim != 2 or scales.shape[0 if by_row else 1] != n:
            limit = f"[{n}, groups]" if by_row else f"[groups, {n}]"
            raise self.wrong(suffix, f"have shape {limit}", list(scales.shape))
        return self.group(suffix, scales.shape[1 if by_row else 0]), scales

    def group(self, suffix: str, groups: int) -> int:
        """The inputs that share one scale, of which the tensor has this many for each output."""
        if groups == 1:
            return self.inputs
        size = self.declared.group
        if size is None:
            size = self.inputs // groups if groups and self.inputs % groups == 0 else 0
        expected = 1 if size == -1 else -(-self.inputs // size) if size else 0
        if groups != expected:
            limit = f"{expected} groups of {size}" if size else "groups of one size"
            raise self.wrong(suffix, f"have {limit} for {self.inputs} inputs", f"{groups} groups")
        return size

    def read(self, *suffixes: str) -> int:
        """Notes that these tensors have been read. Returns their bytes."""
        return sum(self.source.done(self.at + suffix) for suffix in suffixes if self.has(suffix))


SUFFIXES = (
    ".weight",
    ".weight_packed",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
)
"""Tensors that are a part of a linear layer's weight in some format."""

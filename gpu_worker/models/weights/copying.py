"""Copies tensors from their source to their place on the device, and reads linear layers.

Tensors are copied one by one. On the way they are converted, joined with others if one product computes them
together, and quantized if the settings say so. The host never holds more than the weights and one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.weights.host_memory import Room, new_tensor
from petiole.gpu_worker.models.weights.linear import (
    DenseLinear,
    Fp8Linear,
    Int8Linear,
    JoinedLinear,
    Linear,
    quantize_fp8,
    quantize_int8,
)
from petiole.gpu_worker.models.weights.quantization import int4_form, quantise_int4
from petiole.gpu_worker.models.weights.quantized import Coded, CodedLinear, CodedTable, CodeLayout, common_form
from petiole.gpu_worker.models.weights.source import QuantisedLayer
from petiole.gpu_worker.models.weights.threads import for_each

_VALUES_AT_ONCE = 2**19
_SMALL_TENSORS = 2**24  # bytes for several of them
_HEAD_ROWS = 8192  # of a head that is quantised, as many at a time are floats

Quantization = Literal["none", "int8", "int4", "fp8"]
HeadQuantization = Literal["none", "int8", "int4"]


class TensorSource(Protocol):
    """The source of a model's tensors: a `Checkpoint`, or generated ones in benchmarks."""

    def __contains__(self, name: str) -> bool: ...

    def copy(self, name: str, into: Tensor) -> int:
        """Copy the named tensor to `into`. Returns the number of bytes read."""
        ...

    def quantised(self, name: str, outputs: int, inputs: int) -> QuantisedLayer | None:
        """The layer of this name, if it is stored quantised."""
        ...


class Storage:
    """The memory of a model's tensors. After `rewind`, `empty` returns the same tensors in the same order, so
    that another model of the same layout can be read into them. `empty` calls `progress` first."""

    def __init__(self) -> None:
        self.progress: Callable[[], None] = lambda: None
        self._tensors: list[Tensor] = []
        self._used = 0
        self._room = Room(_SMALL_TENSORS)

    @property
    def layout(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(tensor.shape, tensor.dtype) for tensor in self._tensors]

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def rewind(self) -> None:
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.progress()
        if self._used == len(self._tensors):
            on_host = device.type == "cpu"
            new = self._room.tensor(shape, dtype) if on_host else new_tensor(shape, dtype, device)
            self._tensors.append(new)
        tensor = self._tensors[self._used]
        self._used += 1
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (tuple(shape), dtype, device.type)
        return tensor


class Destination(Protocol):
    """Where tensors go, and in which form: see `loading.LoadOptions`."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def quantization(self) -> Quantization: ...
    @property
    def head_quantization(self) -> HeadQuantization: ...
    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor: ...
    def advance(self, n_bytes: int) -> object: ...
    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]: ...
    def held(self, form: CodeLayout) -> CodeLayout: ...
    def coded(self, weight: Coded, bias: Tensor | None) -> CodedLinear: ...


def read_tensor(
    source: TensorSource, name: str, shape: Sequence[int], to: Destination, dtype: torch.dtype | None = None
) -> Tensor:
    tensor = to.empty(shape, dtype)
    to.advance(source.copy(name, tensor))
    return tensor


def read_linear(
    source: TensorSource, names: Sequence[str], sizes: Sequence[int], inputs: int, to: Destination, *, bias: bool
) -> Linear:
    """Several linear layers with the same inputs, as one. names: of the stored layers, without `.weight`; sizes:
    how many outputs each of them has."""
    joint = _joined(source, [n + ".bias" for n in names], sizes, (), to) if bias else None
    stored = [source.quantised(name, size, inputs) for name, size in zip(names, sizes, strict=True)]
    if any(stored):
        return _as_stored(source, names, stored, sizes, inputs, to, joint)
    if to.quantization == "int4":
        return _in_four_bits(source, names, sizes, inputs, to, joint)
    if to.quantization != "none":
        return _quantized(source, names, sizes, inputs, to, joint)
    return DenseLinear(_joined(source, [n + ".weight" for n in names], sizes, (inputs,), to), joint)


def read_head(
    source: TensorSource, name: str, embedding: Tensor | CodedTable, to: Destination, *, tied: bool, bias: bool
) -> Linear:
    """name: of the stored head. tied: its weight is the embedding. A token reads all of the head, but one row of
    the embedding: so the head alone is quantised."""
    wanted = to.head_quantization
    if not tied and source.quantised(name, *embedding.shape) is not None:
        return read_linear(source, (name,), embedding.shape[:1], embedding.shape[1], to, bias=bias)
    if tied and isinstance(embedding, CodedTable):
        return to.coded(
            embedding.weight, read_tensor(source, f"{name}.bias", embedding.shape[:1], to) if bias else None
        )
    if tied:
        assert isinstance(embedding, Tensor)
        weight = embedding
    else:
        new = torch.empty(embedding.shape, dtype=to.dtype, device=to.device)
        weight = to.empty(embedding.shape) if wanted == "none" else new
        to.advance(source.copy(name + ".weight", weight))
    added = read_tensor(source, f"{name}.bias", embedding.shape[:1], to) if bias else None
    if wanted == "none":
        return DenseLinear(weight, added)
    if wanted == "int4":
        coded = int4_form(*weight.shape).empty(to.empty)
        for start in range(0, len(weight) if to.device.type != "meta" else 0, _HEAD_ROWS):
            end = min(start + _HEAD_ROWS, len(weight))
            quantise_int4(weight[start:end].float(), coded.rows(start, end))
        return to.coded(coded, added)
    values, scale = to.empty(weight.shape, torch.int8), to.empty(weight.shape[:1])
    parts = zip(*(torch.split(tensor, _HEAD_ROWS) for tensor in (weight, values, scale)), strict=True)
    for part, to_values, to_scale in parts:
        quantized, scales = quantize_int8(part)
        to_values.copy_(quantized)
        to_scale.copy_(scales)
    return Int8Linear(values, scale, added)


def _joined(
    source: TensorSource, names: Sequence[str], sizes: Sequence[int], rest: tuple[int, ...], to: Destination
) -> Tensor:
    joint = to.empty((sum(sizes), *rest))
    for name, part in zip(names, torch.split(joint, list(sizes)), strict=True):
        to.advance(source.copy(name, part))
    return joint


def _as_stored(
    source: TensorSource,
    names: Sequence[str],
    stored: Sequence[QuantisedLayer | None],
    sizes: Sequence[int],
    inputs: int,
    to: Destination,
    bias: Tensor | None,
) -> Linear:
    """Layers of which some are quantised: one weight if one form holds all, else one linear layer each."""
    if to.quantization != "none":
        raise ModelError(
            f"weight_quantization: must be none for a checkpoint that is quantised ({names[0]}),"
            f" got {to.quantization}"
        )
    there = [layer for layer in stored if layer is not None]
    form = common_form([layer.form for layer in there])
    if len(there) == len(names) and form is not None:
        return to.coded(coded_layers(there, to.held(form), to), bias)
    parts = [
        DenseLinear(_joined(source, [name + ".weight"], [size], (inputs,), to))
        if layer is None
        else to.coded(coded_layers([layer], to.held(layer.form), to), None)
        for name, size, layer in zip(names, sizes, stored, strict=True)
    ]
    return JoinedLinear(tuple(parts), bias)


def coded_layers(layers: Sequence[QuantisedLayer], form: CodeLayout, to: Destination) -> Coded:
    """Quantised layers as one. form: one that holds all layers."""
    sizes = [layer.form.outputs for layer in layers]
    whole = form.of(sum(sizes)).empty(to.empty)
    if to.device.type != "meta":
        for layer, part in zip(layers, whole.split(sizes), strict=True):
            if layer.fills(form):
                to.advance(layer.read(part))
                continue
            own = layer.form.empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype, device=to.device))
            to.advance(layer.read(own))
            rows = _VALUES_AT_ONCE // form.inputs + 1 if to.device.type == "cpu" else form.outputs

            def put(start: int, own: Coded = own, part: Coded = part, rows: int = rows) -> None:
                end = min(start + rows, own.form.outputs)
                own.rows(start, end).put_into(part.rows(start, end))

            for_each(put, range(0, own.form.outputs, rows))
    return whole


def _in_four_bits(
    source: TensorSource,
    names: Sequence[str],
    sizes: Sequence[int],
    inputs: int,
    to: Destination,
    bias: Tensor | None,
) -> Linear:
    """Part by part, as in `_quantized`."""
    whole = int4_form(sum(sizes), inputs).empty(to.empty)
    for name, size, part in zip(names, sizes, whole.split(sizes), strict=True):
        full = torch.empty((size, inputs), dtype=torch.float32, device=to.device)
        to.advance(source.copy(name + ".weight", full))
        if to.device.type != "meta":
            quantise_int4(full, part)
    return to.coded(whole, bias)


def _quantized(
    source: TensorSource,
    names: Sequence[str],
    sizes: Sequence[int],
    inputs: int,
    to: Destination,
    bias: Tensor | None,
) -> Linear:
    """Quantize part by part: memory holds the unquantized weights of one part at a time."""
    int8 = to.quantization == "int8"
    weight = to.empty((sum(sizes), inputs), torch.int8 if int8 else torch.float8_e4m3fn)
    scale = to.empty((sum(sizes),), None if int8 else torch.float32)
    parts = zip(names, torch.split(weight, list(sizes)), torch.split(scale, list(sizes)), strict=True)
    for name, weight_part, scale_part in parts:
        full = torch.empty(weight_part.shape, dtype=torch.float32, device=to.device)
        to.advance(source.copy(name + ".weight", full))
        quantized, scales = (quantize_int8 if int8 else quantize_fp8)(full)
        weight_part.copy_(quantized)
        scale_part.copy_(scales)
    return Int8Linear(weight, scale, bias) if int8 else Fp8Linear(weight, scale[None, :], to.quantize_rows, bias)

"""`Weights`: tensors as `pack.c` rearranges them, kept alive while it does."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint8, c_void_p

import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.weights.host_memory import Room
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear, Linear
from petiole.gpu_worker.models.weights.quantized import CodedLinear, CodeLayout

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 4}
_BF16, _INT8_HALF, _TWELVE, _FOUR, _SIX = 1, 3, 5, 7, 9
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float16: 6, torch.float8_e8m0fnu: 8}
_VALUES = 16
_EIGHT = 8  # inputs whose four-bit codes lie together
_PANEL = 32
_ROOM = 2**30
_LARGE = 1 << 20  # weights that are worth keeping in 12 bits: smaller matrices stay in the caches


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("tail", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("kind", c_int32),
        ("stride", c_int64),
        ("groups", c_void_p),
        ("activation", c_int32),
    ]


class GroupsStruct(ctypes.Structure):
    _fields_ = [
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("tail_scales", c_void_p),
        ("tail_zeros", c_void_p),
        ("size", c_int64),
        ("scale_kind", c_int32),
        ("zero_kind", c_int32),
        ("values", c_float * _VALUES),
        ("halves", c_uint8 * (2 * _VALUES)),
        ("inputs", c_int32),
        ("offsets", c_int32),
        ("factors", c_void_p),
        ("zero_factors", c_void_p),
        ("tail_factors", c_void_p),
        ("tail_zero_factors", c_void_p),
        ("shift", c_int32),
    ]


def unknown_form(form: CodeLayout) -> str | None:
    """What the C code does not multiply of codes of a form; None: it multiplies them."""
    if form.in_runs:
        return "codes in runs"
    if form.inputs % _EIGHT:
        return f"codes of {form.inputs} inputs"
    if form.group < form.inputs and form.group % 16:
        return f"groups of {form.group} inputs"
    if form.steps & (form.steps - 1):
        return f"factors of {form.steps} groups"
    if form.table:
        halves = torch.tensor(form.table).bfloat16().tolist()
        return None if len(form.table) == _VALUES and halves == list(form.table) else "a table of such values"
    return None if form.bits == 6 or form.codes in (torch.int8, torch.float8_e4m3fn) else f"codes in {form.codes}"


def _numbers(tensor: Tensor) -> Tensor:
    """Scales or zeros in a type that the C code reads, which holds each of them exactly. A power of two it reads
    as the exponent of a normal float."""
    if tensor.dtype == torch.float8_e8m0fnu:
        exponents = tensor.view(torch.uint8)
        is_normal = exponents.numel() == 0 or (exponents.min() > 0 and exponents.max() < 255)
        return tensor if is_normal else tensor.float().bfloat16()
    return tensor if tensor.dtype in _NUMBERS else tensor.half()


EMPTY = LinearStruct()
"""A map without outputs."""


class Weights:
    """dtype: of the model."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype = torch.float32) -> None:
        self.library = library
        self._half = dtype == torch.bfloat16 and bool(library.petiole_halves())
        self._kept: list[object] = []
        self._room = Room(_ROOM)

    def linear(self, linear: Linear) -> LinearStruct:
        """Rearranges the weights. Nobody else can use them afterwards."""
        if isinstance(linear, CodedLinear):
            return self._coded(linear)
        assert isinstance(linear, (DenseLinear, Int8Linear))
        weight, (n, k) = linear.weight, linear.weight.shape
        assert weight.is_contiguous()
        kind = self._kind(linear)
        if kind == _BF16 and weight.numel() >= _LARGE and self.library.petiole_halves():
            kind = _TWELVE
        scale = self.floats(linear.scale) if isinstance(linear, Int8Linear) else None
        packed = LinearStruct(
            weight=self.pointer(weight),
            tail=self.pointer(torch.empty((k, _PANEL), dtype=weight.dtype)) if n % _PANEL else None,
            scale=self.pointer(torch.empty(n)) if kind == _TWELVE else scale,
            bias=self.floats(linear.bias),
            n=n,
            k=k,
            kind=kind,
        )
        n_threads = torch.get_num_threads()
        copies = torch.empty((n_threads, k, _PANEL), dtype=weight.dtype)
        room = c_void_p(self._room.at_least(weight.nbytes).data_ptr() if kind == _TWELVE else None)
        self.library.petiole_pack(ctypes.byref(packed), c_void_p(copies.data_ptr()), room, c_int32(n_threads))
        if packed.kind == _TWELVE:
            self._room.take(n // _PANEL * packed.stride)
        return packed

    def _coded(self, linear: CodedLinear) -> LinearStruct:
        """In place, as the others: no number is held twice, and none as a float."""
        form, weight = linear.weight.form, linear.weight
        n, k, rest = form.outputs, form.inputs, form.outputs % _PANEL > 0
        scales, zeros = _numbers(weight.scales), None if weight.zeros is None else _numbers(weight.zeros)
        groups = GroupsStruct(
            scales=self.pointer(scales),
            zeros=self._optional(zeros),
            tail_scales=self._panel(form.groups, scales.dtype) if rest else None,
            tail_zeros=self._panel(form.groups, zeros.dtype) if rest and zeros is not None else None,
            size=form.group,
            scale_kind=_NUMBERS[scales.dtype],
            zero_kind=_NUMBERS[torch.float32 if zeros is None else zeros.dtype],
            values=(c_float * _VALUES)(*form.table),
            inputs=KINDS[torch.int8] if linear.int8_inputs else _BF16 if self._half else KINDS[torch.float32],
            offsets=form.offsets,
            factors=self._optional(weight.factors),
            zero_factors=self._optional(weight.zero_factors),
            tail_factors=self._panel(form.n_factors, torch.float16) if rest and form.steps else None,
            tail_zero_factors=self._panel(form.n_factors, torch.float16)
            if rest and weight.zero_factors is not None
            else None,
            shift=max(form.steps, 1).bit_length() - 1,
        )
        self._kept.append(groups)
        packed = LinearStruct(
            weight=self.pointer(weight.codes),
            tail=self._panel(form.code_bytes, torch.uint8) if rest else None,
            scale=self.floats(weight.multiplier),
            bias=self.floats(linear.bias),
            n=n,
            k=k,
            kind={4: _FOUR, 6: _SIX}.get(form.bits) or KINDS[form.codes],
            groups=ctypes.addressof(groups),
        )
        n_threads = torch.get_num_threads()
        self.library.petiole_pack_groups_copies.restype = c_int64
        each = self.library.petiole_pack_groups_copies(ctypes.byref(packed))
        copies = torch.empty(n_threads * each, dtype=torch.uint8)
        self.library.petiole_pack_groups(
            ctypes.byref(packed), ctypes.byref(groups), c_void_p(copies.data_ptr()), c_int32(n_threads)
        )
        return packed

    def _optional(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self.pointer(tensor)

    def _panel(self, rows: int, dtype: torch.dtype) -> int:
        return self.pointer(torch.empty((rows, _PANEL), dtype=dtype))

    def _kind(self, linear: DenseLinear | Int8Linear) -> int:
        """The kind of the weights. In a bfloat16 model with int8 weights, inputs are bfloat16 if the processor
        multiplies bfloat16."""
        if (
            isinstance(linear, Int8Linear)
            and linear.scale.dtype == torch.bfloat16
            and self.library.petiole_halves()
        ):
            return _INT8_HALF
        return KINDS[linear.weight.dtype]

    def floats(self, tensor: Tensor | None) -> int | None:
        """The address of a copy in float32, which lives as long as this object."""
        return None if tensor is None else self.pointer(tensor.float())

    def pointer(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def described(layers: Sequence[LayerWeights], head: Linear | None) -> list[str]:
    """How the weights of linear maps are kept, and how many bytes of each kind there are."""
    linears = [] if head is None else [head]
    for layer in layers:
        linears += [layer.mixer.first, layer.mixer.out]
        if (fed := layer.feed_forward) is not None:
            linears += [fed.gate_up, fed.down]
        if (experts := layer.experts) is not None:
            linears += [experts.gate_up.whole, experts.down.whole]
    n_bytes: Counter[str] = Counter()
    for linear in linears:
        if isinstance(linear, CodedLinear):
            inputs = " beside inputs rounded to int8" if linear.int8_inputs else ""
            n_bytes[f"{linear.weight.form}{inputs}"] += linear.weight.n_bytes
        elif isinstance(linear, DenseLinear | Int8Linear):
            n_bytes[str(linear.weight.dtype).removeprefix("torch.")] += linear.weight.nbytes
    return [f"{kind} ({total / 1e6:.0f} MB)" for kind, total in n_bytes.most_common()]

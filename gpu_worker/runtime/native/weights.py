"""`Weights`: tensors as `matrix.c` reads them, and kept alive for as long as it does."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p

import torch
from torch import Tensor

from gpu_worker.models.layers import DenseLinear, Int8Linear, Linear

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_PANEL = 32


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("tail", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("kind", c_int32),
        ("pad", c_int32),
    ]


class Weights:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._kept: list[object] = []

    def linear(self, linear: Linear) -> LinearStruct:
        """Rearranges the weights in the memory where they are: nobody else can use them afterwards."""
        assert isinstance(linear, (DenseLinear, Int8Linear))
        weight, (n, k) = linear.weight, linear.weight.shape
        assert weight.is_contiguous()
        packed = LinearStruct(
            weight=self.pointer(weight),
            tail=self.pointer(torch.empty((k, _PANEL), dtype=weight.dtype)) if n % _PANEL else None,
            scale=self.floats(linear.scale if isinstance(linear, Int8Linear) else None),
            bias=self.floats(linear.bias),
            n=n,
            k=k,
            kind=KINDS[weight.dtype],
        )
        n_threads = torch.get_num_threads()
        copies = torch.empty((n_threads, k, _PANEL), dtype=weight.dtype)
        self.library.petiole_pack(ctypes.byref(packed), c_void_p(copies.data_ptr()), c_int32(n_threads))
        return packed

    def floats(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self.pointer(tensor.float())

    def pointer(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

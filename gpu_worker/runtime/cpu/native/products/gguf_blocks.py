"""`NativeBlocks` reads blocks of GGUF files in one pass, as `packed/blocks.c` does, on torch's threads."""

from __future__ import annotations

import ctypes
from ctypes import c_int8, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.models.checkpoint.gguf.block_types import NAMES, TYPES
from petiole.gpu_worker.models.weights.formats.gguf import layout
from petiole.gpu_worker.models.weights.quantized import Coded
from petiole.gpu_worker.runtime.cpu.native.build import load_library

_NUMBERS = {name: number for number, name in NAMES.items()}
_VALUES = 16


class BlocksInto(ctypes.Structure):
    _fields_ = [
        ("blocks", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("zeros", c_void_p),
        ("factors", c_void_p),
        ("zero_factors", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("finer", c_int64),
        ("bits", c_int32),
        ("table", c_int8 * _VALUES),
    ]


class NativeBlocks:
    """Implements `formats.layer_tensors.BlockReader`. Nothing is compiled before there is a block to read."""

    @property
    def _library(self) -> ctypes.CDLL | None:
        return load_library() if switch("native") == "on" else None

    def knows(self, kind: str) -> bool:
        library = self._library
        return library is not None and bool(library.petiole_knows_blocks(c_int32(_NUMBERS[kind])))

    def finite(self, kind: str, raw: Tensor) -> bool:
        library, raw = self._library, raw.contiguous()
        assert library is not None
        n = raw.numel() // TYPES[kind].n_bytes
        n_threads = c_int32(torch.get_num_threads())
        return bool(
            library.petiole_finite_blocks(c_int32(_NUMBERS[kind]), c_void_p(raw.data_ptr()), c_int64(n), n_threads)
        )

    def read(self, kind: str, raw: Tensor, into: Coded) -> bool:
        form, library, raw = into.form, self._library, raw.contiguous()
        assert library is not None
        own = layout(kind, form.outputs, form.inputs)
        numbers = own.table if not form.table else ()
        assert all(tensor.is_contiguous() for tensor in into.tensors)
        for absent in () if own.offsets else (into.zeros, into.zero_factors):
            if absent is not None:
                absent.zero_()
        to = BlocksInto(
            blocks=raw.data_ptr(),
            codes=into.codes.data_ptr(),
            scales=into.scales.data_ptr(),
            zeros=_address(into.zeros if own.offsets else None),
            factors=_address(into.factors),
            zero_factors=_address(into.zero_factors if own.offsets else None),
            n=form.outputs,
            k=form.inputs,
            finer=own.group // form.group,
            bits=form.bits,
            table=(c_int8 * _VALUES)(*map(int, numbers)),
        )
        n_threads = c_int32(torch.get_num_threads())
        return bool(library.petiole_read_blocks(c_int32(_NUMBERS[kind]), ctypes.byref(to), n_threads))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

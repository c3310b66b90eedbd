"""`NativeAdapters`: the bank's adapters as `adapters.c` reads them, their ranks padded to even ones."""

from __future__ import annotations

import ctypes
from ctypes import c_int64

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.models.weights.names import LINEARS
from petiole.gpu_worker.runtime.cpu.native.products.weights import LinearStruct, Weights
from petiole.gpu_worker.runtime.interface import Int32Array

MAPS = LINEARS
MOST_PARTS = 3


class _LowRank(ctypes.Structure):
    _fields_ = [("a", LinearStruct), ("b", LinearStruct * MOST_PARTS), ("parts", c_int64)]


BYTES_OF_LAYER = ctypes.sizeof(_LowRank) * len(MAPS)
"""Bytes of an adapter's maps in one layer; the layers follow each other."""


class NativeAdapters:
    """Repacks a slot when a step first uses the adapter that was put there."""

    def __init__(self, library: ctypes.CDLL, bank: AdapterBank) -> None:
        self._library, self._bank = library, bank
        self._packed: dict[int, tuple[int, Weights, ctypes.Array[_LowRank]]] = {}
        self._addresses = np.zeros(bank.n_slots + 1, dtype=np.int64)

    @staticmethod
    def reduced_width(bank: AdapterBank) -> int:
        """The maximum number of floats of A x for one position."""
        return MOST_PARTS * (bank.max_rank + bank.max_rank % 2)

    def addresses(self, slots: Int32Array) -> npt.NDArray[np.int64]:
        """int64 [T]: where each position's low-rank maps lie, 0 for slot 0."""
        for slot in np.unique(slots).tolist():
            if slot and (slot not in self._packed or self._packed[slot][0] != self._bank.version(slot)):
                self._pack(slot)
        return self._addresses[slots]

    def _pack(self, slot: int) -> None:
        weights = Weights(self._library)
        n_layers = self._bank.n_layers
        maps = (_LowRank * (n_layers * len(MAPS)))()
        for layer in range(n_layers):
            for i, name in enumerate(MAPS):
                a, b = self._bank.matrices(layer, name, slot)
                if not b:  # the layer has no such product: neither inputs nor outputs
                    maps[layer * len(MAPS) + i] = _LowRank(parts=1)
                    continue
                odd = a[0].shape[0] % 2
                maps[layer * len(MAPS) + i] = _LowRank(
                    weights.linear(DenseLinear(torch.cat([F.pad(part, (0, 0, 0, odd)) for part in a]))),
                    (LinearStruct * MOST_PARTS)(
                        *(weights.linear(DenseLinear(F.pad(part, (0, odd)).clone())) for part in b)
                    ),
                    len(b),
                )
        self._packed[slot] = (self._bank.version(slot), weights, maps)
        self._addresses[slot] = ctypes.addressof(maps)

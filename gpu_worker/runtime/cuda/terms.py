"""Adds adapters to the linear layers of a captured decode step. `models.adapters.lora` has the formula."""

from __future__ import annotations

from torch import Tensor

from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.weights.names import LinearName


class CapturedTerms:
    """The terms of a decode step on CUDA, each position with its own adapter's matrices.

    The host decides nothing, so the terms can be captured in a graph. adapter_slots: int32 [T].
    """

    def __init__(self, bank: AdapterBank, adapter_slots: Tensor) -> None:
        self._bank = bank
        self._of = adapter_slots

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None:
        from petiole.gpu_worker.runtime.cuda.fused.adapters import add_terms

        slots = self._bank.slots(layer, name)
        add_terms(x, y, slots.a, slots.b, self._of, self._bank.ranks)

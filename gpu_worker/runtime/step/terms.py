"""Adds adapters to the linear layers of a step, in plain torch. `models.adapters.lora` has the formula."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.weights.names import LinearName
from petiole.gpu_worker.runtime.device.device import upload


class GroupedTerms:
    """The terms of one step, grouped by adapter: one pair of products for all positions with the same adapter."""

    def __init__(self, bank: AdapterBank, adapter_slots: np.ndarray) -> None:
        self._bank = bank
        self._groups = [
            (int(slot), upload(np.flatnonzero(adapter_slots == slot), bank.device))
            for slot in np.unique(adapter_slots)
            if slot
        ]

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None:
        slots = self._bank.slots(layer, name)
        for slot, positions in self._groups:
            inner = x[positions].to(slots.a.dtype) @ slots.a[slot].T
            parts = [h @ b[slot].T for h, b in zip(inner.chunk(len(slots.b), dim=-1), slots.b, strict=True)]
            y.index_add_(0, positions, torch.cat(parts, dim=-1).to(y.dtype))

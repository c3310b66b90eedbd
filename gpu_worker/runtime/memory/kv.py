"""The paged KV pool and the device's page table.

    keys[layer], values[layer]:  [n_pages * page_size, kv_heads, head_dim], of the layer's own sizes
    table[row, column]:          the page that holds positions [column * page_size, (column + 1) * page_size)

A *slot* is the index of one position in the pool: page * page_size + offset. Row 0 and page 0 are reserved:
padding entries of a batch read and write there. A layer that reads another one's keys has the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from petiole.gpu_worker.models.host_memory import new_zeros
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.device.interface import upload
from petiole.gpu_worker.runtime.interface import PageUpdates


@dataclass(frozen=True, slots=True)
class KVCache:
    """keys, values: of each layer, views of one allocation in the order of the layers; table: int32 [rows,
    columns]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor
    page_size: int

    @property
    def n_pages(self) -> int:
        return self.n_slots // self.page_size

    @property
    def n_slots(self) -> int:
        return self.keys[0].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """int64 [T]: the pool slots of the given positions of the given rows."""
        pages = self.table[rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def update(self, updates: PageUpdates) -> None:
        """Write these entries of the table, in stream order."""
        if self.table.device.type == "cpu":
            self.table.numpy()[updates.rows, updates.columns] = updates.pages
        elif len(updates.rows):
            entries = np.stack([updates.rows, updates.columns, updates.pages])
            rows, columns, pages = upload(entries, self.table.device)
            self.table[rows.long(), columns.long()] = pages


def new_kv_cache(
    plan: ModelPlan,
    *,
    n_pages: int,
    page_size: int,
    rows: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    columns = -(-max_model_len // page_size)
    return KVCache(
        keys=_pool(plan, n_pages * page_size, dtype, device),
        values=_pool(plan, n_pages * page_size, dtype, device),
        table=torch.zeros((rows, columns), dtype=torch.int32, device=device),
        page_size=page_size,
    )


def _pool(plan: ModelPlan, n_slots: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """The keys, or the values, of each layer."""
    own = dict(plan.caches)
    memory = new_zeros((n_slots * sum(mixer.kv_size for mixer in own.values()),), dtype, device)
    parts = torch.split(memory, [n_slots * mixer.kv_size for mixer in own.values()])
    views = {
        i: part.view(n_slots, mixer.kv_heads, mixer.head_dim)
        for (i, mixer), part in zip(own.items(), parts, strict=True)
    }
    return tuple(views[i if mixer.keys_of is None else mixer.keys_of] for i, mixer in enumerate(plan.mixers))

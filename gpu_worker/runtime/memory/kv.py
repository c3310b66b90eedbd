"""The paged KV pools and the device's page tables.

    keys[layer], values[layer]:  [pages of its group * page_size, kv_heads, head_dim], of the layer's own sizes
    tables[group][row, column]:  the page that holds positions [column * page_size, (column + 1) * page_size)

Group 0 is the layers that keep everything. Each other group is the layers that keep a window; its entries behind
the window name any page, which nothing may read. A *slot* is the index of one position in a pool: page * page_size
+ offset. Row 0 and page 0 are reserved: padding entries of a batch read and write there. A layer that reads
another one's keys has the same tensors, and one that keeps a state has empty ones. A text that is computed whole
takes no pages: an executor may have memory for the keys of a step (`new_step_cache`), which layers share
(`ModelPlan.kv_homes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from petiole.cache import WindowPages
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.host_memory import new_zeros
from petiole.gpu_worker.runtime.device.device import upload
from petiole.gpu_worker.runtime.interface import PageUpdates


@dataclass(frozen=True, slots=True)
class KVCache:
    """keys, values: of each layer, views of one allocation in the order of the layers; tables: int32 [groups,
    rows, columns]; groups: of each layer. n_pages: of group 0; windows: the pools of the other groups."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tables: Tensor
    groups: tuple[int, ...]
    page_size: int
    n_pages: int
    windows: tuple[WindowPages, ...] = ()

    @property
    def table(self) -> Tensor:
        """The table of group 0."""
        return self.tables[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys[0].dtype

    @property
    def device(self) -> torch.device:
        return self.table.device

    def of_layer(self, i: int) -> KVCache:
        """The memory of one layer, as that of a model with this layer alone."""
        return replace(self, keys=(self.keys[i],), values=(self.values[i],), groups=(self.groups[i],))

    def slots(self, rows: Tensor, positions: Tensor, group: int = 0) -> Tensor:
        """int64 [T]: the slots of the given positions of the given rows, in the pool of a group."""
        pages = self.tables[group][rows, positions // self.page_size].long()
        return pages * self.page_size + positions % self.page_size

    def update(self, updates: PageUpdates) -> None:
        """Write these entries of the tables, in stream order."""
        pages = np.stack((updates.pages, *updates.windows))
        if self.device.type == "cpu":
            self.tables.numpy()[:, updates.rows, updates.columns] = pages
        elif len(updates.rows):
            found = upload(np.concatenate(([updates.rows, updates.columns], pages)), self.device)
            self.tables[:, found[0].long(), found[1].long()] = found[2:]


def new_kv_cache(
    plan: ModelPlan,
    *,
    n_pages: int,
    page_size: int,
    rows: int,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    windows: Sequence[WindowPages] = (),
) -> KVCache:
    """windows: the pools of groups of layers with these windows (`ModelPlan.kept_windows`). The layers of other
    windows keep everything."""
    columns = -(-max_model_len // page_size)
    at = {pool.window: i for i, pool in enumerate(windows, 1)}
    groups = tuple(at.get(window, 0) for window in plan.kept_windows)
    slots = [pages * page_size for pages in (n_pages, *(pool.n_pages for pool in windows))]
    of_layers = [slots[group] for group in groups]
    keys = _pool(plan, of_layers, dtype, device)
    return KVCache(
        keys=keys,
        values=_pool(plan, of_layers, dtype, device, keys),
        tables=torch.zeros((len(slots), rows, columns), dtype=torch.int32, device=device),
        groups=groups,
        page_size=page_size,
        n_pages=n_pages,
        windows=tuple(windows),
    )


def new_step_cache(plan: ModelPlan, cache: KVCache, positions: int) -> KVCache:
    """Memory for the keys and values of a step of whole texts. cache: the one without pages. Its tables say where
    in the step the positions of a text are, and are written before each."""
    rows, columns = cache.table.shape
    return new_kv_cache(
        plan,
        n_pages=positions,
        page_size=1,
        rows=rows,
        max_model_len=columns * cache.page_size,
        dtype=cache.dtype,
        device=cache.device,
    )


def _pool(
    plan: ModelPlan,
    slots: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    keys: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The keys of each layer, or beside those the values. slots: of each layer."""
    own = {i: mixer for i, mixer in plan.caches if keys is None or mixer.latent is None}
    homes = {i: home for i, home in plan.kv_homes.items() if i in own}
    sizes = {i: slots[i] * own[i].kv_size for i in dict.fromkeys(homes.values())}
    whole = new_zeros((sum(sizes.values()),), dtype, device)
    parts = dict(zip(sizes, torch.split(whole, list(sizes.values())), strict=True))
    views = {i: parts[homes[i]].view(slots[i], mixer.kv_heads, mixer.head_dim) for i, mixer in own.items()}
    read = {i: i if mixer.keys_of is None else mixer.keys_of for i, mixer in plan.attending}
    views |= {i: keys[i] for i, mixer in plan.caches if keys is not None and mixer.latent is not None}
    return tuple(
        views[read[i]] if i in read else torch.empty(0, dtype=dtype, device=device) for i in range(plan.n_layers)
    )

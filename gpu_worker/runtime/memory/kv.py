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

from petiole.gpu_worker.config import EngineConfig
from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.host_memory import new_zeros
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.device.interface import upload
from petiole.gpu_worker.runtime.interface import PageUpdates
from petiole.gpu_worker.runtime.memory.container import memory_left
from petiole.gpu_worker.runtime.memory.room import require_room

_CPU_KV_BYTES = 2**30
_CPU_LENGTH_EACH = 2048


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


def decide_n_pages(
    engine: EngineConfig,
    model: ModelPlan,
    *,
    max_model_len: int,
    bytes_per_element: int,
    free_bytes: int,
    on_cuda: bool,
) -> int:
    """Number of pages of the pool, including page 0: `num_pages`, or a default from the free memory.

    The default on CUDA is all of `free_bytes`: the rest of the memory fraction after weights and working memory.
    Pages that running sequences do not need hold cached prefixes. The default on the CPU is 2,048 tokens for every
    row, within 1 GiB or a quarter of the free memory, whichever is less, but at least one sequence of full length
    if that fits into half of the free memory. Raises InvalidRequest if `num_pages` does not fit into a CPU's
    memory: the system would grant the memory, and kill the process when the pages are used."""
    page_bytes = model.kv_elements_per_token * engine.page_size * bytes_per_element
    per_sequence = -(-max_model_len // engine.page_size)
    if engine.num_pages:
        if not on_cuda:
            require_room("num_pages", engine.num_pages, page_bytes, free_bytes)
        return engine.num_pages
    if on_cuda:
        n_pages = free_bytes // page_bytes
    else:
        wanted = engine.max_num_seqs * -(-min(max_model_len, _CPU_LENGTH_EACH) // engine.page_size) + 1
        budget = min(_CPU_KV_BYTES, free_bytes // 4) // page_bytes
        n_pages = max(min(wanted, budget), min(per_sequence + 1, free_bytes // 2 // page_bytes))
    if n_pages < 2:
        raise ModelError(
            f"no memory for the KV cache: a page takes {page_bytes} bytes, and {max(free_bytes, 0)} are left "
            f"beside the weights, max_num_seqs {engine.max_num_seqs}, max_num_batched_tokens "
            f"{engine.max_num_batched_tokens} and lora_slots {engine.lora_slots}: lower these, or raise "
            f"gpu_memory_utilization ({engine.gpu_memory_utilization:g})"
        )
    return n_pages


def free_bytes(device: torch.device, utilization: float) -> int:
    """Bytes of memory that the KV pool may use."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - utilization))
    limit = memory_left()
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            line = next(line for line in lines if line.startswith("MemAvailable"))
        available = int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        available = 4 * 2**30
    return available if limit is None else min(available, limit)

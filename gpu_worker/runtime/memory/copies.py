"""Copies of keys and values between the KV pool and the host.

A copy of n positions is bytes: for each pool of keys, then of values, the positions one after the other. Both
directions run in stream order: a copy to the host sees what launched steps write, and later steps see what a copy
from the host has written.

    compute stream   [step t][gather into block k of the device]          [step t + 1]
    copy stream                                      └► [block k to the host] ► event ► a thread writes a file

Copies to the host have a *ring* of blocks, each of which is free or holds one copy. It is as large as it was made:
no step waits for a copy, and while no block is free, nothing is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.device.device import DeviceEvent, DeviceStream, upload
from petiole.gpu_worker.runtime.interface import Int64Array, Progress, nothing
from petiole.gpu_worker.runtime.memory.kv import KVCache

Bytes = npt.NDArray[np.uint8]


class CopyToHost:
    """See `interface.HostCopy`."""

    __slots__ = ("_block", "_done", "_free", "_host")

    def __init__(self, done: DeviceEvent, host: Tensor, block: int, free: deque[int]) -> None:
        self._done, self._host, self._block, self._free = done, host, block, free

    def wait(self) -> Bytes:
        self._done.synchronize()
        return self._host.numpy()

    def release(self) -> None:
        self._free.append(self._block)


class PoolCopies:
    """See `interface.KVCopies`. cache: with one pool of pages."""

    def __init__(
        self,
        cache: KVCache,
        plan: ModelPlan,
        stream: DeviceStream,
        copy_stream: Callable[[], DeviceStream],
        *,
        before: Progress = nothing,
    ) -> None:
        """copy_stream: makes one for these copies alone: behind them the outputs of steps would be late. before:
        called in stream order before positions are read or written."""
        of_layers = [pools[i] for pools in (cache.keys, cache.values) for i, _ in plan.caches]
        pools = {id(pool): pool for pool in of_layers}.values()  # latents are keys and values at once
        words = [_as_words(pool.view(len(pool), -1)) for pool in pools]
        self._runs = _runs(words)
        self._place, self._stream, self._copy_stream, self._new_stream = cache.device, stream, stream, copy_stream
        self._before = before
        widths = [pool.shape[1] * pool.itemsize for pool in words]
        self.layout, self.position_bytes = f"{cache.dtype} {widths}".removeprefix("torch."), sum(widths)
        self._free: deque[int] = deque()

    @property
    def _pinned(self) -> bool:
        return self._place.type != "cpu"

    def make_ring(self, n_blocks: int, n_positions: int) -> None:
        """The device has a ring of its own, unless one thread computes and copies in the host's memory."""
        self._copy_stream = self._new_stream()
        size = (n_blocks, n_positions * self.position_bytes)
        self._on_host = self._on_device = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        if self._copy_stream is not self._stream:
            self._on_device = torch.empty(size, dtype=torch.uint8, device=self._place)
        self._free.extend(range(n_blocks))

    def to_host(self, slots: Int64Array) -> CopyToHost | None:
        if not self._free:
            return None
        block = self._free[0]
        host, gathered = self._on_host[block], self._on_device[block]
        assert len(host) == len(slots) * self.position_bytes
        self._enqueue(self._stream, lambda: self._gather(upload(slots, self._place), gathered))
        if self._copy_stream is not self._stream:
            self._copy_stream.wait_event(self._stream.record())
            self._enqueue(self._copy_stream, lambda: host.copy_(gathered, non_blocking=True))
        copy = CopyToHost(self._copy_stream.record(), host, block, self._free)
        self._free.popleft()
        return copy

    def staging(self, n_bytes: int) -> Tensor:
        """On CUDA in pinned memory, which torch keeps until it has been read."""
        return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def from_host(self, slots: Int64Array, staged: Tensor, first: int) -> None:
        def write() -> None:
            self._before()
            copy = staged.to(self._place, non_blocking=True)
            at, where = 0, upload(slots, self._place)
            n = len(copy) // self.position_bytes
            for run in self._runs:
                size = n * len(run) * run.shape[2] * run.itemsize
                part = copy[at : at + size].view(run.dtype).view(len(run), n, -1)
                run.index_copy_(1, where, part[:, first : first + len(slots)])
                at += size

        self._enqueue(self._stream, write)

    def _gather(self, slots: Tensor, out: Tensor) -> None:
        self._before()
        at = 0
        for run in self._runs:
            size = len(slots) * len(run) * run.shape[2] * run.itemsize
            part = out[at : at + size].view(run.dtype).view(len(run), len(slots), -1)
            torch.index_select(run, 1, slots, out=part)
            at += size

    @staticmethod
    def _enqueue(stream: DeviceStream, task: Callable[[], object]) -> None:
        def run() -> None:
            with torch.inference_mode():
                task()

        stream.enqueue(run, "kv copy")


def _runs(pools: Sequence[Tensor]) -> list[Tensor]:
    """[pools, slots, words]: pools of one size that lie one behind the other, as one tensor. So a copy is few
    kernels, whatever the number of layers."""
    runs: list[list[Tensor]] = []
    for pool in pools:
        last = runs[-1][-1] if runs else None
        if last is not None and _is_behind(pool, last):
            runs[-1].append(pool)
        else:
            runs.append([pool])
    return [run[0].as_strided((len(run), *run[0].shape), (run[0].numel(), *run[0].stride())) for run in runs]


def _is_behind(pool: Tensor, last: Tensor) -> bool:
    same = pool.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    same = same and (pool.shape, pool.dtype) == (last.shape, last.dtype)
    return same and pool.storage_offset() == last.storage_offset() + last.numel()


def _as_words(pool: Tensor) -> Tensor:
    """The same memory in the largest elements that divide a row: torch copies rows of bytes six times as slowly as
    rows of words."""
    row = pool.shape[1] * pool.itemsize
    words = (dtype for dtype in (torch.int64, torch.int32, torch.int16) if row % dtype.itemsize == 0)
    return pool.view(next(words, torch.uint8))

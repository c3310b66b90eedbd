"""Copies of keys and values between the KV pool and the host.

A copy of n positions is bytes: for each pool of keys, then of values, the positions one after the other. Both
directions run in stream order: a copy to the host sees what launched steps write, and later steps see what a copy
from the host has written.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.device.device import DeviceEvent, DeviceStream, upload
from petiole.gpu_worker.runtime.memory.kv import KVCache

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class CopyToHost:
    """See `interface.HostCopy`."""

    __slots__ = ("_done", "_host")

    def __init__(self, done: DeviceEvent, host: Tensor) -> None:
        self._done, self._host = done, host

    def wait(self) -> Bytes:
        self._done.synchronize()
        return self._host.numpy()


class PoolCopies:
    """See `interface.KVCopies`. cache: with one pool of pages."""

    def __init__(self, cache: KVCache, plan: ModelPlan, stream: DeviceStream, copy_stream: DeviceStream) -> None:
        of_layers = [pools[i] for pools in (cache.keys, cache.values) for i, _ in plan.caches]
        pools = {id(pool): pool for pool in of_layers}.values()  # latents are keys and values at once
        self._pools = [_as_words(pool.view(len(pool), -1)) for pool in pools]
        self._place, self._stream, self._copy_stream = cache.device, stream, copy_stream
        widths = [pool.shape[1] * pool.itemsize for pool in self._pools]
        self.layout, self.position_bytes = f"{cache.dtype} {widths}".removeprefix("torch."), sum(widths)

    def to_host(self, slots: Int64Array) -> CopyToHost:
        pinned = self._place.type != "cpu"
        host = torch.empty(len(slots) * self.position_bytes, dtype=torch.uint8, pin_memory=pinned)
        if self._place.type == "cpu":
            self._enqueue(self._stream, lambda: self._gather(torch.from_numpy(slots), host))
            return CopyToHost(self._stream.record(), host)
        gathered: list[Tensor] = []

        def gather() -> None:
            found = torch.empty(len(host), dtype=torch.uint8, device=self._place)
            self._gather(upload(slots, self._place), found)
            gathered.append(found)

        def copy() -> None:
            found = gathered.pop()
            host.copy_(found, non_blocking=True)
            found.record_stream(torch.cuda.current_stream())

        self._enqueue(self._stream, gather)
        if self._copy_stream is not self._stream:
            self._copy_stream.wait_event(self._stream.record())
        self._enqueue(self._copy_stream, copy)
        return CopyToHost(self._copy_stream.record(), host)

    def staged(self, copy: Bytes) -> Tensor:
        """On CUDA in pinned memory."""
        host = torch.from_numpy(copy)
        return host if self._place.type == "cpu" else host.pin_memory()

    def from_host(self, slots: Int64Array, staged: Tensor, first: int) -> None:
        def write() -> None:
            copy = staged.to(self._place, non_blocking=True)
            at, where = 0, upload(slots, self._place)
            n = len(copy) // self.position_bytes
            for pool in self._pools:
                size = n * pool.shape[1] * pool.itemsize
                part = copy[at : at + size].view(pool.dtype).view(n, -1)[first : first + len(slots)]
                pool.index_copy_(0, where, part)
                at += size

        self._enqueue(self._stream, write)

    def _gather(self, slots: Tensor, out: Tensor) -> None:
        at = 0
        for pool in self._pools:
            size = len(slots) * pool.shape[1] * pool.itemsize
            torch.index_select(pool, 0, slots, out=out[at : at + size].view(pool.dtype).view(len(slots), -1))
            at += size

    @staticmethod
    def _enqueue(stream: DeviceStream, task: Callable[[], None]) -> None:
        def run() -> None:
            with torch.inference_mode():
                task()

        stream.enqueue(run, "kv copy")


def _as_words(pool: Tensor) -> Tensor:
    """The same memory in the largest elements that divide a row: torch copies rows of bytes six times as slowly as
    rows of words."""
    row = pool.shape[1] * pool.itemsize
    words = (dtype for dtype in (torch.int64, torch.int32, torch.int16) if row % dtype.itemsize == 0)
    return pool.view(next(words, torch.uint8))

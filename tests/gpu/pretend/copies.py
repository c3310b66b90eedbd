"""Copies of KV to files and back, over a pretended card: `python -m tests.gpu.pretend python -m
tests.gpu.pretend.copies`.

Shows that the ring is pinned and as large as it was made, that a full one drops, that a chunk is a launch for the
keys and one for the values, and that nothing is left on the device. No kernel computes here: bits are compared in
`tests/gpu/test_cuda.py`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.gpu.host import counts
from bench.harness.checkpoints.decoders import TINY, config
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.runtime.device.cuda import CudaDevice
from petiole.gpu_worker.runtime.memory.chunk_files import ChunkFiles
from petiole.gpu_worker.runtime.memory.copies import CopyToHost, PoolCopies
from petiole.gpu_worker.runtime.memory.kv import new_kv_cache

BLOCKS, CHUNK, N = 4, 64, 20
KEY = bytes(32)


def main() -> None:
    before = counts()
    assert before is not None, "python -m tests.gpu.pretend runs this on a pretended card"
    device = CudaDevice()
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        copied(device, dtype)
    after = counts()
    assert after is not None
    print(f"{after.refused - before.refused} calls refused")
    if after.refused > before.refused:
        raise SystemExit(1)


def copied(device: CudaDevice, dtype: torch.dtype) -> None:
    plan, stream = model_of(config(TINY)).plan, device.new_stream("compute")
    sizes = {"n_pages": N * CHUNK, "page_size": 1, "rows": 2, "max_model_len": 512}
    cache = new_kv_cache(plan, **sizes, dtype=dtype, device=device.torch_device)
    copies = PoolCopies(cache, plan, stream, lambda: device.new_stream("kv"))
    before = torch.cuda.memory_allocated()
    copies.make_ring(BLOCKS, CHUNK)
    ring = torch.cuda.memory_allocated()
    assert ring - before == BLOCKS * CHUNK * copies.position_bytes
    held: list[CopyToHost] = []
    for n in range(N):
        launched = counts()
        copy = copies.to_host(np.arange(n * CHUNK, (n + 1) * CHUNK))
        assert (copy is None) == (len(held) == BLOCKS), "a full ring drops"
        if copy is None:
            held.pop(0).release()
            continue
        now = counts()
        assert launched is not None
        assert now is not None
        assert now.launched - launched.launched == 2
        held.append(copy)
    files = ChunkFiles(Path(tempfile.mkdtemp(prefix="petiole-pretend-")) / "kv", 1 << 30)
    assert files.write("layout", KEY, held[0].wait())
    staged = copies.staging(CHUNK * copies.position_bytes)
    assert staged.is_pinned()
    assert files.read("layout", KEY, np.asarray(staged))
    copies.from_host(np.arange(100, 140), staged, 10)
    device.synchronize()
    assert torch.cuda.memory_allocated() == ring
    print(f"{dtype}: {N} chunks of {CHUNK * copies.position_bytes:,} bytes through {BLOCKS} blocks")


if __name__ == "__main__":
    main()

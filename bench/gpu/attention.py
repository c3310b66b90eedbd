"""The attention of a decode step alone, by each of its possible kernels, against the time to read the keys and
values."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from bench.gpu.card import QWEN3_8B, SMALL, Card, release, seconds
from bench.harness.checkpoints.decoders import Shape, config
from bench.harness.report import Report
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.runtime.cuda.attention import flashinfer as attention, split
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture
from petiole.gpu_worker.runtime.cuda.fused.split import pieces
from petiole.gpu_worker.runtime.device.cuda import CudaDevice
from petiole.gpu_worker.runtime.device.device import staged, upload
from petiole.gpu_worker.runtime.memory.kv import new_kv_cache

LAYERS = 8
"""One after another, so that no layer finds its keys and values in the card's cache."""

SHORT = 128
"""Positions of all rows of a skewed batch but one."""

LONG = 32_768
"""Positions of the one long row of a batch, beside short ones."""

FLASHINFER = {"tensor cores": 1, "CUDA cores": 1 + 1024}
"""Its kernels, and the `attention.TENSOR_CORES_FROM` that makes it choose each."""

SPLIT = {f"split by {piece}": piece for piece in (256, 512)}
"""Our own, and the positions of its pieces."""

KERNELS = (*FLASHINFER, *SPLIT)

IN_EIGHT_BITS = ("equal lengths", f"one of {LONG}")
"""The batches that are measured with keys and values in eight bits as well."""


def attending(report: Report, card: Card, mean: int = 640) -> None:
    """Rows of equal length, of lengths between a tenth of the mean and nearly twice, of one long row among short
    ones, which take as many positions altogether, and of one of `LONG` among short ones."""
    draw = random.Random(0)
    for shape in (SMALL, QWEN3_8B):
        for batch in (16, 64, 256):
            short = [SHORT] * (batch - 1)
            mixes = {
                "equal lengths": [mean] * batch,
                "uneven lengths": [draw.randint(mean // 10, 2 * mean - mean // 10) for _ in range(batch)],
                "skewed lengths": [mean * batch - sum(short), *short],
                f"one of {LONG}": [*short, LONG],
            }
            cases = [(name, torch.bfloat16, "") for name in mixes]
            cases += [(name, torch.float8_e4m3fn, " in eight bits") for name in IN_EIGHT_BITS]
            for name, stored, told in cases:
                lengths = np.array(mixes[name], np.int32)
                n_bytes = lengths.sum() * shape.kv_bytes_per_token / shape.n_layers * stored.itemsize / 2
                for kernel, took in layer_seconds(shape, lengths, stored):
                    report.add(
                        f"{shape.name}: a layer's attention{told}, batch {batch}, {name}, {kernel}",
                        took * 1e6,
                        "us",
                        floor=float(n_bytes) / card.bandwidth * 1e6,
                        better="lower",
                    )
                release()


def layer_seconds(shape: Shape, lengths: np.ndarray, stored: torch.dtype) -> Iterator[tuple[str, float]]:
    """By each of `KERNELS`; in eight bits by one of FlashInfer alone, because the other would have to compile."""
    device = CudaDevice()
    on = device.torch_device
    model = model_of(config(dataclasses.replace(shape, n_layers=LAYERS))).plan
    mixer = model.attentions[0]
    kind = attention.AttentionKind.of(mixer)
    n_pages, longest = 1 + int(lengths.sum()), int(lengths.max())
    cache = new_kv_cache(
        model, n_pages=n_pages, page_size=1, rows=1, max_model_len=longest, dtype=stored, device=on
    )
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape, dtype=torch.bfloat16, device=on))
    geometry = attention.Geometry(model, cache, torch.bfloat16)
    _, (indptr,), last = attention.host_page_counts(cache, lengths - 1, np.ones_like(lengths), lengths)
    indices = upload(np.arange(1, n_pages, dtype=np.int32), on)
    q = torch.randn(len(lengths), mixer.heads, mixer.head_dim, dtype=torch.bfloat16, device=on)
    out = torch.empty_like(q)
    usual = "tensor cores" if mixer.heads >= attention.TENSOR_CORES_FROM * mixer.kv_heads else "CUDA cores"
    for kernel in KERNELS if stored == torch.bfloat16 else (usual, *SPLIT):
        wrappers = new_wrappers(kernel, geometry, kind, len(lengths), indices)
        with piece_of(kernel):
            wrappers.plan([attention.PageList(staged(indptr, on), indices)], staged(last, on))

        def attend(wrappers: attention.DecodeWrappers | split.SplitWrappers = wrappers) -> None:
            for layer in range(LAYERS):
                wrappers.wrappers[kind].run(q, geometry.pages(layer), out=out)

        attend()
        device.synchronize()
        yield kernel, seconds(cuda_capture(device.new_stream("compute"))(attend)) / LAYERS


def new_wrappers(
    kernel: str, geometry: attention.Geometry, kind: attention.AttentionKind, rows: int, indices: torch.Tensor
) -> attention.DecodeWrappers | split.SplitWrappers:
    with piece_of(kernel):
        longest = geometry.cache.table.shape[1]
        n_bytes = max(attention.WORKSPACE_BYTES, split.part_bytes(kind, rows, 1, longest))
        workspace = attention.new_workspace(geometry.device, n_bytes)
        if kernel in SPLIT:
            return split.SplitWrappers(geometry, rows, workspace, [indices])
    usual, attention.TENSOR_CORES_FROM = attention.TENSOR_CORES_FROM, FLASHINFER[kernel]
    try:
        return attention.DecodeWrappers(geometry, rows, workspace, [indices])
    finally:
        attention.TENSOR_CORES_FROM = usual


@contextmanager
def piece_of(kernel: str) -> Iterator[None]:
    """While wrappers are made and plan, pieces are as long as this kernel's."""
    usual, pieces.PIECE = pieces.PIECE, SPLIT.get(kernel, pieces.PIECE)
    try:
        yield
    finally:
        pieces.PIECE = usual

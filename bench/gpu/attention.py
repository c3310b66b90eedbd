"""The attention of a decode step alone, by each of its two possible kernels, against the time to read the keys and
values."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import torch

from bench.gpu.card import QWEN3_8B, SMALL, Card, release, seconds
from bench.harness.checkpoints.decoders import Shape, config
from bench.harness.report import Report
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.runtime.cuda.attention import flashinfer as attention
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture
from petiole.gpu_worker.runtime.device.cuda import CudaDevice
from petiole.gpu_worker.runtime.device.device import staged, upload
from petiole.gpu_worker.runtime.memory.kv import new_kv_cache

LAYERS = 8
"""One after another, so that no layer finds its keys and values in the card's cache."""


SHORT = 128
"""Positions of all rows of a skewed batch but one."""


def attending(report: Report, card: Card, mean: int = 640) -> None:
    """Rows of equal length, of lengths between a tenth of the mean and nearly twice, and of one long row among
    short ones, which take as many positions altogether."""
    draw = random.Random(0)
    for shape in (SMALL, QWEN3_8B):
        for batch in (16, 64, 256):
            uneven = [draw.randint(mean // 10, 2 * mean - mean // 10) for _ in range(batch)]
            skewed = [mean * batch - (batch - 1) * SHORT, *[SHORT] * (batch - 1)]
            for name, lengths in (("equal", [mean] * batch), ("uneven", uneven), ("skewed", skewed)):
                floor = sum(lengths) * shape.kv_bytes_per_token / shape.n_layers / card.bandwidth
                for kernel, least in (("tensor cores", 1), ("CUDA cores", 1 + shape.n_heads)):
                    took = layer_seconds(shape, np.array(lengths, np.int32), least)
                    report.add(
                        f"{shape.name}: a layer's attention, batch {batch}, {name} lengths, {kernel}",
                        took * 1e6,
                        "us",
                        floor=floor * 1e6,
                        better="lower",
                    )
                    release()


def layer_seconds(shape: Shape, lengths: np.ndarray, tensor_cores_from: int) -> float:
    """`tensor_cores_from`: as in `attention.TENSOR_CORES_FROM`, which is put back."""
    device, usual = CudaDevice(), attention.TENSOR_CORES_FROM
    on = device.torch_device
    model = model_of(config(dataclasses.replace(shape, n_layers=LAYERS))).plan
    mixer = model.attentions[0]
    n_pages, dtype = 1 + int(lengths.sum()), torch.bfloat16
    cache = new_kv_cache(model, n_pages=n_pages, page_size=1, rows=1, max_model_len=1, dtype=dtype, device=on)
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
    geometry = attention.Geometry(model, cache, dtype)
    _, (indptr,), last = attention.host_page_counts(cache, lengths - 1, np.ones_like(lengths), lengths)
    indices = upload(np.arange(1, n_pages, dtype=np.int32), on)
    q = torch.randn(len(lengths), mixer.heads, mixer.head_dim, dtype=dtype, device=on)
    out = torch.empty_like(q)
    attention.TENSOR_CORES_FROM = tensor_cores_from
    try:
        wrappers = attention.DecodeWrappers(geometry, len(lengths), attention.new_workspace(on), [indices])
    finally:
        attention.TENSOR_CORES_FROM = usual
    wrappers.plan([attention.PageList(staged(indptr, on), indices)], staged(last, on))

    def attend() -> None:
        for layer in range(LAYERS):
            wrappers.wrappers[geometry.kind(layer)].run(q, geometry.pages(layer), out=out)

    attend()
    device.synchronize()
    return seconds(cuda_capture(device.new_stream("compute"))(attend)) / LAYERS

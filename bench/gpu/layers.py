"""The layers of a small batch without their attention, by the usual kernels and by fused products, against the
time to read their weights."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor

from bench.gpu.card import QWEN3_8B, SMALL, Card, release, seconds
from bench.harness.checkpoints.decoders import config
from bench.harness.checkpoints.random_weights import RandomWeights
from bench.harness.report import Report
from petiole.gpu_worker.models.decoder import Forward
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.loading import LoadOptions, read_decoder
from petiole.gpu_worker.models.parts.attention import Distances
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture
from petiole.gpu_worker.runtime.cuda.graphs import Layers
from petiole.gpu_worker.runtime.device.cuda import CudaDevice

LAYERS = 8
"""One after another, so that no layer finds its weights in the card's cache."""


class _Nothing:
    """An attention that gives the queries back. See `StepAttention`."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotation: Rotation,
        sinks: Tensor | None = None,
        distances: Distances | None = None,
    ) -> Tensor:
        return q.reshape(len(q), -1)


def layering(report: Report, card: Card) -> None:
    from petiole.gpu_worker.runtime.cuda.fused.linear import decode

    on = CudaDevice().torch_device
    for shape in (SMALL, QWEN3_8B):
        model = model_of(config(dataclasses.replace(shape, n_layers=LAYERS)))
        options = LoadOptions(on, torch.bfloat16, max_positions=8, kernels=FlashInferKernels())
        decoder = read_decoder(RandomWeights(), model, options)
        floor = 2 * shape.layer_parameters / card.bandwidth
        for batch in (1, 2, 4, 8, 16):
            ways: dict[str, Layers] = {
                "usual kernels": decoder.forward,
                "fused products": partial(decode.forward, decoder),
            }
            for name, layers in ways.items():
                report.add(
                    f"{shape.name}: a layer without attention, batch {batch}, {name}",
                    layer_seconds(layers, batch, model.plan.hidden_size) * 1e6,
                    "us",
                    floor=floor * 1e6,
                    better="lower",
                )
        del decoder
        release()


def layer_seconds(layers: Layers, batch: int, width: int) -> float:
    device = CudaDevice()
    hidden = torch.randn(batch, width, dtype=torch.bfloat16, device=device.torch_device)
    step = Forward(torch.zeros(batch, dtype=torch.int64, device=device.torch_device), _Nothing())

    def work() -> None:
        with torch.inference_mode():
            layers(hidden.clone(), step)

    work()
    device.synchronize()
    return seconds(cuda_capture(device.new_stream("compute"))(work)) / LAYERS

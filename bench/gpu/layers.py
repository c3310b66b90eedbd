"""The layers of a small batch without their attention, and its head, by the usual kernels and by fused products,
against the time to read their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from bench.gpu.card import QWEN3_8B, SMALL, Card, captured_seconds, release
from bench.harness.checkpoints.decoders import config
from bench.harness.checkpoints.random_weights import RandomWeights
from bench.harness.report import Report
from petiole.gpu_worker.models.decoder import Forward
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.loading import LoadOptions, read_decoder
from petiole.gpu_worker.models.parts.attention import Distances
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.graphs import Layers
from petiole.gpu_worker.runtime.device.cuda import CudaDevice
from petiole.gpu_worker.runtime.step.sampling import likeliest

if TYPE_CHECKING:
    from petiole.gpu_worker.runtime.cuda.fused.linear import split_k

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


ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def layering(report: Report, card: Card) -> None:
    from petiole.gpu_worker.runtime.cuda.fused.linear import decode, split_k

    on = CudaDevice().torch_device
    candidates = {name: blocks for name, blocks in split_k.BLOCKS.items() if name != "small"}
    for shape in (QWEN3_8B, SMALL):
        model = model_of(config(dataclasses.replace(shape, n_layers=LAYERS)))
        options = LoadOptions(on, torch.bfloat16, max_positions=8, kernels=FlashInferKernels())
        decoder = read_decoder(RandomWeights(), model, options)
        floor = 2 * shape.layer_parameters / card.bandwidth
        for batch in ROWS:
            ways: dict[str, Layers] = {"usual kernels": decoder.forward}
            if batch <= decode.MOST_ROWS:
                ways["fused products"] = partial(decode.forward, decoder)
            if batch in (1, *ROWS[4:]):
                ways |= {
                    f"products in shares, {name}": partial(split_k.forward, decoder, blocks=blocks)
                    for name, blocks in candidates.items()
                }
            for name, layers in ways.items():
                report.add(
                    f"{shape.name}: a layer without attention, batch {batch}, {name}",
                    layer_seconds(layers, batch, model.plan.hidden_size) * 1e6,
                    "us",
                    floor=floor * 1e6,
                    better="lower",
                )
        head, bytes_of_head = cast(DenseLinear, decoder.head), 2 * shape.vocab_size * shape.hidden_size
        for batch in (1, 16, 64):
            writes: dict[str, Callable[[Tensor, Tensor], object]] = {
                "usual kernels": partial(_write_usually, head),
                **{
                    f"products in shares, {name}": partial(_write, head, blocks)
                    for name, blocks in candidates.items()
                },
            }
            for name, write in writes.items():
                report.add(
                    f"{shape.name}: the head with its likeliest tokens, batch {batch}, {name}",
                    head_seconds(write, batch, head) * 1e6,
                    "us",
                    floor=bytes_of_head / card.bandwidth * 1e6,
                    better="lower",
                )
        del decoder, head
        release()


def _write_usually(head: DenseLinear, x: Tensor, logits: Tensor) -> Tensor:
    head.write(x, logits)
    return likeliest(logits)


def _write(head: DenseLinear, blocks: split_k.ProductBlocks, x: Tensor, logits: Tensor) -> None:
    from petiole.gpu_worker.runtime.cuda.fused.linear import split_k

    split_k.write_logits(x, head, logits, torch.empty(len(x), dtype=torch.int64, device=x.device), blocks)


def head_seconds(write: Callable[[Tensor, Tensor], object], batch: int, head: DenseLinear) -> float:
    """On the device alone. The weights of every head are many times what its cache holds."""
    x = torch.randn(batch, head.weight.shape[1], dtype=torch.bfloat16, device=head.weight.device)
    logits = x.new_empty((batch, head.weight.shape[0]))
    return captured_seconds(lambda: write(x, logits))


def layer_seconds(layers: Layers, batch: int, width: int) -> float:
    on = CudaDevice().torch_device
    hidden = torch.randn(batch, width, dtype=torch.bfloat16, device=on)
    step = Forward(torch.zeros(batch, dtype=torch.int64, device=on), _Nothing())
    return captured_seconds(lambda: layers(hidden.clone(), step)) / LAYERS

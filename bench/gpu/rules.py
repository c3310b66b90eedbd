"""The gated delta rule of a layer of Qwen3.5-0.8B alone, for one row: position by position as in exact mode, in
chunks of our own, and by fla-core if it is installed. And the switches by which an engine takes each."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.gpu.card import Card, seconds, switched
from bench.harness.report import Report
from petiole.gpu_worker.runtime.device.cuda import CudaDevice

LENGTHS = (512, 2048, 8192)
HEADS, SIZE = 16, 128

WAYS = {
    "position by position": {"PETIOLE_EXACT": "on", "PETIOLE_UNTIMED": "off"},
    "in chunks": {"PETIOLE_EXACT": "off", "PETIOLE_UNTIMED": "off"},
    "by fla-core": {"PETIOLE_EXACT": "off", "PETIOLE_UNTIMED": "chunks"},
}


def ways(report: Report) -> Iterator[str]:
    """The ways that can be taken here, each with its switches while it is measured."""
    for way, switches in WAYS.items():
        if way == "by fla-core" and importlib.util.find_spec("fla") is None:
            report.absent["fla-core"] = "it is not installed: pip install fla-core"
            continue
        with switched(switches):
            yield way


def ruling(report: Report, card: Card) -> None:
    """The floor is the time to read queries, keys and values and to write the outputs, all in float32."""
    for n in LENGTHS:
        for way in ways(report):
            took = seconds(rule(way, n, CudaDevice().torch_device), rounds=10)
            floor = 4 * n * HEADS * SIZE * 4 / card.bandwidth
            name = f"a layer's delta rule, {n} positions, {way}"
            report.add(name, took * 1e6, "us", floor=floor * 1e6, better="lower")


def rule(way: str, n: int, on: torch.device) -> Callable[[], object]:
    """On states that fade, so that no number grows from round to round."""
    from petiole.gpu_worker.runtime.cuda.fused.states import chunks, fla, recurrent

    heads = torch.randn(n, 3, HEADS, SIZE, device=on)
    heads[:, :2] = torch.nn.functional.normalize(heads[:, :2], dim=-1)
    g, beta = -torch.rand(n, HEADS, device=on), torch.rand(n, HEADS, device=on)
    bounds, copies = np.array([0, n], np.int32), np.full(n, -1, np.int32)
    places, ends, kept = (torch.from_numpy(array).to(on) for array in (np.zeros(1, np.int32), bounds, copies))
    given = heads.flatten(1), g, beta, torch.randn(1, HEADS, SIZE, SIZE, device=on), None, places, ends, kept
    if way == "by fla-core":
        parts = fla.parts_of(bounds, copies, on)
        return lambda: fla.apply_delta_rule_by_fla(*given, parts)
    by = chunks.apply_delta_rule_in_chunks if way == "in chunks" else recurrent.apply_delta_rule
    return lambda: by(*given)

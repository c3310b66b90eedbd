"""One run of a benchmark that drives engines: its size, its device, and the report for its figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bench import load, report
from bench.checkpoints import Shape
from bench.report import Report
from petiole.gpu_worker import Engine, EngineConfig
from petiole.gpu_worker.tracing import NO_TRACE, Tracer


@dataclass
class Bench:
    """`large`: with the Qwen3-0.6B shape; `curves`: the data of the plots."""

    report: Report
    device: str = "cpu"
    threads: int = 0
    quick: bool = False
    large: bool = True
    curves: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def engine(self, model: str, shape: Shape, tracer: Tracer = NO_TRACE, **options: Any) -> Iterator[Engine]:
        config = EngineConfig(
            model=model,
            device=self.device,  # type: ignore[arg-type]
            num_threads=self.threads,
            **{**shape.settings, **options},
        )
        with Engine(config, tracer=tracer) as engine:
            load.at_concurrency(engine, load.requests(2, 8, 4), 2)
            load.settle()
            yield engine

    def pick(self, quick: Any, full: Any) -> Any:
        return quick if self.quick else full


def arguments(description: str | None, *devices: str) -> argparse.ArgumentParser:
    """The options of a run, which may choose among `devices`."""
    parser = report.arguments(description)
    if devices:
        parser.add_argument("--device", default=devices[0], choices=devices)
    parser.add_argument("--threads", type=int, default=0, help="of the model on the CPU; 0: torch decides")
    return parser


def opened(title: str, options: argparse.Namespace) -> Bench:
    if options.threads:
        torch.set_num_threads(options.threads)
    return Bench(Report(title), getattr(options, "device", "cpu"), options.threads, options.quick)

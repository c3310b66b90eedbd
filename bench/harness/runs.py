"""One run of a benchmark that drives engines: its size, its device, and the report for its figures."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.harness import load, report
from bench.harness.checkpoints.decoders import Shape
from bench.harness.report import NotAvailableError, Report
from petiole.gpu_worker import Engine, EngineConfig
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer

OURS = "petiole"
_FINALISTS = 2  # peers that go on after the first round


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


@dataclass(frozen=True)
class Turns:
    """Rates of each side that took part to the end, ours under OURS, and of others one round. best: of the others
    that need not stay; None: there are none."""

    rates: Mapping[str, Sequence[float]]
    best: str | None

    @property
    def medians(self) -> dict[str, float]:
        return {name: statistics.median(rates) for name, rates in self.rates.items()}

    def spread(self, ours: str, peer: str) -> tuple[float, float]:
        """The least and the greatest ratio of one side to another."""
        ratios = [a / b for a, b in zip(self.rates[ours], self.rates[peer], strict=True)]
        return min(ratios), max(ratios)


def in_turns(
    bench: Bench, sides: Mapping[str, Callable[[], float]], rounds: int, stay: Collection[str] = ()
) -> Turns:
    """One round of all sides, then the rest of the rounds of ours, of those that `stay` and of the best few, in
    turns. Every other round runs in the opposite order. A peer that fails is left out, and the report says why."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    turns, others = list(sides), list[str]()
    for _ in range(rounds):
        for name in turns:
            if bench.device == "cpu" and not bench.quick:
                load.rest()
            try:
                rates[name].append(sides[name]())
            except NotAvailableError as error:
                bench.report.absent[name] = str(error)
                del rates[name]
        left = [name for name in turns if name in rates and name not in (OURS, *stay)]
        others = sorted(left, key=lambda name: -statistics.median(rates[name]))
        kept = (OURS, *stay, *others[:_FINALISTS])
        turns = [name for name in reversed(turns) if name in kept]
    return Turns(rates, others[0] if others else None)

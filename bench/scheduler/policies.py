"""Prefill policies on paper: the real scheduler, with the time that an H200 would take for each step.

A step takes the longer of the times for its bytes and for its arithmetic. It reads all weights once, and the KV of
all attended positions. Every token costs two operations for each parameter. The model has nothing else: no host,
no launches, no kernel that is slower than the card. So the figures compare policies, and predict no card.

Requests are Poisson arrivals at 75 % of the rate that today's default policy can serve, the same for all policies.
A gap is the time between two tokens of a stream, as its reader sees them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness import load
from bench.harness.checkpoints.decoders import Shape
from bench.harness.report import Report, arguments, percentile, progress
from bench.scheduler.simulate import Task, run
from bench.scheduler.steps import Step
from petiole.contract.settings.engine import BATCHING

BYTES_PER_S, OPERATIONS_PER_S = 4.8e12, 990e12
"""The peaks of an H200: of its memory, and of bfloat16 without sparsity."""

REACHED = 0.7
"""The share of either peak that good kernels reach."""

SHARE = 0.75
TODAY, MIXED = "pipelined", "mixed"
LONGEST = 8192


@dataclass(frozen=True)
class Card:
    """A model's step times."""

    shape: Shape
    in_s: float = 0.0
    out_s: float = 0.0
    delay_s: float = 0.0

    def seconds(self, step: Step) -> float:
        moved = self.shape.decode_bytes(1, step.context + step.tokens)
        computed = 2 * self.shape.parameters * step.tokens
        return max(moved / BYTES_PER_S, computed / OPERATIONS_PER_S) / REACHED


@dataclass(frozen=True)
class Traffic:
    """Requests of `prompt` and `output` tokens on average. The lengths of prompts vary as people's do: a few are
    very long."""

    name: str
    prompt: int
    output: int

    def tasks(self, n: int, rate: float = 0.0, seed: int = 1) -> list[Task]:
        draw = np.random.default_rng(seed)
        prompts = np.clip(draw.lognormal(np.log(self.prompt) - 0.5, 1.0, n), 16, LONGEST).astype(int).tolist()
        outputs = draw.integers(self.output // 2, self.output * 3 // 2 + 1, n).tolist()
        arrived = np.cumsum(load.arrival_gaps(n, rate, seed)).tolist() if rate else [0.0] * n
        return [Task(*drawn) for drawn in zip(arrived, prompts, outputs, strict=True)]


TRAFFIC = (Traffic("chat", 512, 256), Traffic("documents", 3000, 256))
QWEN3_8B = Shape("Qwen3-8B shape, bf16", "bfloat16", 151_936, 4096, 12_288, 36, 32, 8, 128)
CURVE = ((TODAY, 2048), (TODAY, 512), (MIXED, 2048), (MIXED, 1024), (MIXED, 512), (MIXED, 256), (MIXED, 128))


@dataclass(frozen=True)
class Seen:
    """Milliseconds, and tokens a second, from the middle of a load, without its beginning and end."""

    ttft: float
    ttft_99: float
    gap: float
    gap_99: float
    tokens_per_s: float

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> Seen:
        ttfts = [1e3 * (task.first - task.arrived) for task in tasks]
        gaps = [1e3 * gap for task in tasks for gap in task.gaps]
        seconds = max(task.ended for task in tasks) - min(task.arrived for task in tasks)
        return cls(
            statistics.median(ttfts),
            percentile(ttfts, 0.99),
            statistics.median(gaps),
            percentile(gaps, 0.99),
            sum(task.output for task in tasks) / seconds,
        )


def measure(report: Report, card: Card, traffic: Traffic, n: int) -> None:
    batching = BATCHING["cuda"]

    def served(policy: str, chunk: int, rate: float) -> list[Task]:
        settings: dict[str, Any] = {
            "prefill_policy": policy,
            "chunk_size": chunk,
            "max_num_batched_tokens": batching.max_num_batched_tokens,
            "max_model_len": 2 * LONGEST,
            "n_pages": 1 << 20,
            "prefix_cache": "off",
        }
        return run(card, traffic.tasks(n, rate), slots=batching.max_num_seqs, **settings)

    done = served(TODAY, batching.chunk_size, 0.0)
    rate = SHARE * len(done) / max(task.ended for task in done)
    today: Seen | None = None
    for policy, chunk in CURVE:
        seen = Seen.of(served(policy, chunk, rate))
        today = today or seen
        judged = policy == MIXED and chunk == 512
        add, what = report.add, f"{traffic.name}: {policy}, chunks of {chunk:,}"
        add(
            f"{what}: gap, 99 of 100",
            seen.gap_99,
            "ms",
            peer=today.gap_99,
            better="lower",
            target=0.5 if judged else None,
        )
        add("  gap, median", seen.gap, "ms", peer=today.gap, better="lower")
        add("  TTFT, median", seen.ttft, "ms", peer=today.ttft, better="lower", target=1.0 if judged else None)
        add("  TTFT, 99 of 100", seen.ttft_99, "ms", peer=today.ttft_99, better="lower")
        add("  output", seen.tokens_per_s, "tokens/s", peer=today.tokens_per_s, target=0.99 if judged else None)


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    report = Report("Prefill policies on paper: the real scheduler with an H200's step time")
    for traffic in progress(TRAFFIC, "traffic"):
        measure(report, Card(QWEN3_8B), traffic, 24 if options.quick else 400)
    report.finish(options.json)


if __name__ == "__main__":
    main()

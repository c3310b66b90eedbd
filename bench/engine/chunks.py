"""Prefill policies and chunk sizes on this machine's engine: who waits for whose prompt.

Poisson arrivals at 75 % of what the default does when all requests are there at once, the same for all. A gap is
the time between two deltas of a stream. Each policy and size has an engine of its own; they take turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from bench.harness import load
from bench.harness.checkpoints.decoders import TINY, checkpoint
from bench.harness.report import Report, percentile, progress
from bench.harness.runs import Bench, arguments, opened
from petiole.contract.settings.engine import BATCHING, EngineConfig
from petiole.gpu_worker import Engine, Request

Variant = tuple[str, int]
DEFAULT: Variant = (EngineConfig().prefill_policy, BATCHING["cpu"].chunk_size)
CURVE: tuple[Variant, ...] = (
    DEFAULT,
    *(("pipelined", size) for size in (1024, 256, 128)),
    *(("mixed", size) for size in (1024, 512, 256, 128, 64)),
)
PROMPT, OUTPUT, LONGEST = 384, 64, 1900
SHARE, ROUNDS = 0.75, 5

FIGURES: dict[str, tuple[str, str, Callable[[load.Run], float]]] = {
    "gap, 99 of 100": ("ms", "lower", lambda run: percentile(run.gaps_ms, 0.99)),
    "gap, median": ("ms", "lower", lambda run: statistics.median(run.gaps_ms)),
    "TTFT, 99 of 100": ("ms", "lower", lambda run: run.ttft_ms(0.99)),
    "TTFT, median": ("ms", "lower", lambda run: run.ttft_ms(0.5)),
    "output": ("tokens/s", "higher", lambda run: run.tokens_per_s),
}


def requests(n: int, seed: int, prompt: int = PROMPT, output: int = OUTPUT) -> list[Request]:
    """Prompts and outputs of this many tokens on average; prompts are spread as people's are, a few very long."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(prompt) - 0.5, 1.0, n), 16, LONGEST).astype(int).tolist()
    outputs = draw.integers(output // 2, output * 3 // 2 + 1, n).tolist()
    ids = [draw.integers(3, 500, length).tolist() for length in lengths]
    return [Request(prompt=tokens, sampling=load.greedy(most)) for tokens, most in zip(ids, outputs, strict=True)]


def measure(bench: Bench, n: int, rounds: int) -> None:
    with ExitStack() as stack:
        folder = stack.enter_context(checkpoint(TINY))
        engines: dict[Variant, Engine] = {
            (policy, size): stack.enter_context(
                bench.engine(folder, TINY, prefill_policy=policy, chunk_size=size, prefix_cache="off")
            )
            for policy, size in CURVE
        }
        found: dict[Variant, list[load.Run]] = {variant: [] for variant in CURVE}
        rate = SHARE * load.at_concurrency(engines[DEFAULT], requests(n, 0), n).requests_per_s
        for seed in progress(range(rounds), "rounds"):
            for variant in CURVE if seed % 2 else reversed(CURVE):
                found[variant].append(load.poisson(engines[variant], requests(n, seed), rate, seed))
    compare(bench.report, "", found, DEFAULT)


def compare(report: Report, what: str, found: Mapping[Variant, Sequence[load.Run]], usual: Variant) -> None:
    """A row for each figure and variant, beside the usual one's. Runs of one round have the same arrivals."""
    for name, (unit, better, figure) in FIGURES.items():
        for variant in found:
            ours, peers = ([figure(run) for run in found[one]] for one in (variant, usual))
            ratios = [a / b for a, b in zip(ours, peers, strict=True)]
            value, peer = statistics.median(ours), statistics.median(peers)
            label = f"{what}{name}: {variant[0]}, chunks of {variant[1]:,}"
            spread = None if variant == usual else (min(ratios), max(ratios))
            report.add(label, value, unit, peer=peer, spread=spread, better=better)


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    bench = opened("Prefill policies and chunk sizes on a CPU", options)
    measure(bench, *bench.pick((12, 1), (120, ROUNDS)))
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()

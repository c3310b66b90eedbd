"""Does a worker keep up with a GPU? The whole way from Redis to the readers, around a device that only keeps time.

A real worker, as `celery -A tasks worker` starts it, runs on a real Redis, with a reader for each stream. Its
engine is the real one, with scheduler, prefix cache, tokenizer and text thread. A device takes the place of the
model: it takes a fixed time for a step and computes nothing, and each launch keeps the interpreter as long as a
launch on the CUDA path. The floor is the device's limit: a token of each sequence in each step. The host causes
the difference to the floor: steps before all sequences run, and times in which the device waits for its next step.

The peer, in turns, is the same engine driven directly. Nothing here measures a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.engine.observed import Watch
from bench.engine.profiling import environment, taken
from bench.harness import load, report
from bench.harness.checkpoints.decoders import TINY
from bench.harness.stand_ins import TimedRuntime
from bench.queue import serving
from petiole.gpu_worker import Engine, EngineConfig
from petiole.gpu_worker.engine.loading import load_text
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE

LETTERS = range(40, 900)
"""Token ids of petiole-tiny that have a text."""
SWITCH_INTERVAL_S = 0.005


@dataclass(frozen=True)
class Pace:
    """`rows` sequences at a time, of `output` tokens each, on a device that takes `device_ms` for a step."""

    rows: int
    device_ms: float
    output: int
    rounds: int

    @property
    def name(self) -> str:
        return f"{self.rows} sequences, {self.device_ms:g} ms a step"

    @property
    def launch_s(self) -> float:
        """Seconds to launch a decode step of the Qwen3-0.6B shape (copies, plan, replay, sampling), measured over
        a pretended card (`tests/gpu/pretend`) on the author's processor."""
        return 0.4e-3 + 2.5e-6 * self.rows

    @property
    def case(self) -> load.Case:
        return load.Case(TINY, self.rows, 32, self.output, self.rows, self.rounds)

    @property
    def most(self) -> float:
        """The most tokens a second that the device allows."""
        return self.rows / self.device_ms * 1e3


QUICK = [Pace(4, 1, 8, 1)]
PACES = [Pace(64, 5, 600, 3), Pace(64, 2, 1200, 3), Pace(256, 7, 600, 3)]


# ---------------------------------------------------------------- in the worker


def busy(seconds: float) -> None:
    """Keep the interpreter for `seconds`."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def timed(pace: Pace) -> TimedRuntime:
    return TimedRuntime(pace.device_ms / 1e3, partial(busy, pace.launch_s), rows=pace.rows, token_ids=LETTERS)


class PacedWatch(Watch):
    """A `Watch` that also says what the device did."""

    device: TimedRuntime

    def begin(self, switch_interval_s: float) -> None:
        super().begin(switch_interval_s)
        self.device.restart()

    def end(self) -> dict[str, Any]:
        return {**super().end(), "steps": self.device.steps, "idle_s": self.device.idle_s}


def engine(config: EngineConfig) -> Engine:
    """`PETIOLE_ENGINE_FACTORY=bench.engine.pace:engine`, with a `Pace` in `BENCH_PACE`, as JSON."""
    runtime = timed(Pace(**json.loads(os.environ["BENCH_PACE"])))
    watch = PacedWatch(NO_TRACE)
    watch.device = runtime
    watch.start()
    return Engine(config, runtime=runtime, tokenizer=load_text(config)[0])


# ---------------------------------------------------------------- the workload


def measure(result: report.Report, pace: Pace) -> None:
    case, config = pace.case, EngineConfig(max_num_seqs=pace.rows)
    served, direct, seen = list[float](), list[float](), list[dict[str, Any]]()
    gaps: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.mkfifo(pipe := folder / "pipe")
        factory = {"BENCH_PIPE": str(pipe), "PETIOLE_ENGINE_FACTORY": "bench.engine.pace:engine"}
        stack.enter_context(environment(**factory, BENCH_PACE=json.dumps(vars(pace))))
        beside = stack.enter_context(Engine(config, runtime=timed(pace), tokenizer=load_text(config)[0]))
        load.settle()
        stack.enter_context(serving.fleet("petiole-tiny", TINY, pace.rows, 1))
        asyncio.run(serving.read_all(load.Case(TINY, pace.rows, 8, 4, pace.rows, 1), 99))
        for i in range(pace.rounds):
            pipe.write_text(f"begin {SWITCH_INTERVAL_S}\n")
            run = asyncio.run(serving.read_all(case, i))
            pipe.write_text(f"end {folder / 'seen.json'}\n")
            seen.append(taken(folder / "seen.json"))
            served.append(run.tokens / run.seconds)
            gaps += run.gaps_ms
            requests = load.requests(case.n, case.prompt, case.output, seed=i)
            direct.append(load.at_concurrency(beside, requests, pace.rows).tokens_per_s)
    middle = statistics.median
    for name, rates in ((f"{pace.name}: a worker with readers", served), ("  the engine alone", direct)):
        shares = [rate / pace.most for rate in rates]
        spread = (min(shares), max(shares))
        result.add(name, middle(rates), "tokens/s", floor=pace.most, spread=spread, samples=rates)
    idle = [100 * s["idle_s"] / (s["idle_s"] + s["steps"] * pace.device_ms / 1e3) for s in seen]
    result.add("  worker: the device waits for its next step", middle(idle), "%", better="lower", samples=idle)
    cores = middle(sum(s["cpu_s"].values()) / s["seconds"] for s in seen)
    result.add("  worker: processor time", cores, "cores", better="lower")
    launches = middle(s["steps"] * pace.launch_s / s["seconds"] for s in seen)
    result.add("  of which launches, as the CUDA path would take", launches, "cores", better="lower")
    if gaps:
        result.add("  readers: between deltas, 99 of 100", report.percentile(gaps, 0.99), "ms", better="lower")


def main(argv: list[str] | None = None) -> None:
    options = report.arguments(__doc__).parse_args(argv)
    result = report.Report("A worker at the pace of a GPU: a device that only keeps time")
    for pace in report.progress(QUICK if options.quick else PACES, "pace"):
        measure(result, pace)
    result.finish(options.json)


if __name__ == "__main__":
    main()

"""End to end through Celery: a real worker, an embedded Redis, a producer, and readers of every stream.

It asks two questions. What does the way through the broker cost? Tokens a second with streaming readers are
compared with those of the same engine driven directly in this process, in turns. And what does it gain? It is
compared with a Celery worker as people write it today, with all tasks submitted at once. Redis, producer and
readers share the processor with the engine."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import load
from bench.harness.checkpoints.decoders import QWEN3_06B, SMALL, TINY, Shape, checkpoint
from bench.harness.load import Case
from bench.harness.report import Report, arguments, percentile, progress
from bench.peers.workers import starting as workers

PATIENCE_S = 600.0
PLAIN_RATE = 4.0  # at least this many times the tokens a second, and at most the inverse of the completion time


def requests(case: Case, seed: int = 0) -> list[dict[str, Any]]:
    options = {"max_tokens": case.output, "temperature": 0, "ignore_eos": True}
    return [{"prompt": p, **options} for p in load.prompts(case.n, case.prompt, seed=seed)]


@dataclass
class Seen:
    """The figures of the readers of one round."""

    tokens: int = 0
    seconds: float = 0.0
    ttfts_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    deltas: int = 0

    def add(self, submitted: float, stamps: list[float]) -> None:
        self.ttfts_ms.append(1e3 * (stamps[0] - submitted))
        self.gaps_ms += [1e3 * (b - a) for a, b in itertools.pairwise(stamps)]
        self.deltas += len(stamps)


# ---------------------------------------------------------------- through Celery


@contextmanager
def fleet(model: str, shape: Shape, concurrency: int, threads: int, **more: str) -> Iterator[None]:
    """A worker with this model on the embedded Redis, as `celery -A tasks worker` starts it. `more`: settings."""
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    os.environ.update(
        {
            "PETIOLE_MODEL": model,
            "PETIOLE_DTYPE": shape.dtype,
            "PETIOLE_DEVICE": "cpu",
            "PETIOLE_MAX_NUM_SEQS": str(concurrency),
            "PETIOLE_PREFIX_CACHE": "off",
            "PETIOLE_NUM_THREADS": str(threads),
            "PETIOLE_NUM_PAGES": "0",
            **more,
        }
    )
    settings.cache_clear()
    with demo.worker():
        yield


async def read_all(case: Case, seed: int) -> Seen:
    """Submit and stream every task from one event loop, as a web app would."""
    from petiole.tasks import generate

    seen, free = Seen(), asyncio.Semaphore(case.concurrency)

    async def one(request: dict[str, Any]) -> None:
        async with free:
            submitted, stamps = time.perf_counter(), []
            async for delta in generate.astream(timeout_s=PATIENCE_S, **request):
                stamps.append(time.perf_counter())
                seen.tokens += len(delta.token_ids)
            seen.add(submitted, stamps)

    began = time.perf_counter()
    await asyncio.gather(*(one(request) for request in requests(case, seed)))
    seen.seconds = time.perf_counter() - began
    return seen


def read_in_threads(case: Case, seed: int) -> Seen:
    """Submit and stream every task, with a thread for each open stream."""
    from petiole.tasks import generate

    seen, lock, waiting = Seen(), threading.Lock(), iter(requests(case, seed))

    def reader() -> None:
        while True:
            with lock:
                request = next(waiting, None)
            if request is None:
                return
            submitted, stamps, tokens = time.perf_counter(), [], 0
            with generate.stream(timeout_s=PATIENCE_S, **request) as deltas:
                for delta in deltas:
                    stamps.append(time.perf_counter())
                    tokens += len(delta.token_ids)
            with lock:
                seen.tokens += tokens
                seen.add(submitted, stamps)

    began = time.perf_counter()
    readers = [threading.Thread(target=reader) for _ in range(case.concurrency)]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join()
    seen.seconds = time.perf_counter() - began
    return seen


CLIENTS: dict[str, Callable[[Case, int], Seen]] = {
    "asyncio": lambda case, seed: asyncio.run(read_all(case, seed)),
    "threads": read_in_threads,
}


def through_broker(report: Report, case: Case, client: str, threads: int) -> Seen:
    """Tokens a second at the readers, beside the same engine without Celery. Returns the last round."""
    from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams

    config = EngineConfig(
        device="cpu",
        dtype=case.shape.dtype,  # type: ignore[arg-type]
        max_num_seqs=case.concurrency,
        prefix_cache="off",
        num_threads=threads,
    )
    rounds: list[Seen] = []

    def served() -> float:
        rounds.append(CLIENTS[client](case, len(rounds)))
        assert rounds[-1].tokens == case.tokens
        return rounds[-1].tokens / rounds[-1].seconds

    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(case.shape))
        engine = stack.enter_context(Engine(replace(config, model=model)))
        load.settle()
        stack.enter_context(fleet(model, case.shape, case.concurrency, threads))

        def direct() -> float:
            asked = [
                Request(
                    prompt=request["prompt"],
                    sampling=SamplingParams(**{k: v for k, v in request.items() if k != "prompt"}),
                )
                for request in requests(case, len(rounds))
            ]
            return load.at_concurrency(engine, asked, case.concurrency).tokens_per_s

        small = Case(case.shape, 2, 8, 4, 2, 1)
        CLIENTS[client](small, 99)
        report.compare(case.name, "tokens/s", served, direct, rounds=case.rounds, target=case.target)
    last = rounds[-1]
    report.add("  TTFT at the readers, median", statistics.median(last.ttfts_ms), "ms", samples=last.ttfts_ms)
    report.add("  TTFT at the readers, 99 of 100", percentile(last.ttfts_ms, 0.99), "ms")
    if last.gaps_ms:  # empty if every answer came in one delta
        report.add("  between deltas, median", percentile(last.gaps_ms, 0.5), "ms")
    report.add("  tokens in a delta", last.tokens / last.deltas, "")
    return last


# ---------------------------------------------------------------- against workers as people write them

PEERS = {"a plain worker": workers.plain, "a worker that calls a model server": workers.server}


Round = tuple[float, list[float]]
"""Tokens a second, and each task's completion time, s."""


def all_at_once(submit: Callable[[dict[str, Any]], Any], case: Case) -> Round:
    """All tasks at once, as a caller that only waits for results sees them."""
    began = time.perf_counter()
    results = [submit(request) for request in requests(case)]
    completions = []
    for result in results:
        result.get(timeout=PATIENCE_S)
        completions.append(time.perf_counter() - began)
    return case.tokens / completions[-1], completions


def against_others(report: Report, case: Case, threads: int) -> None:
    """Compare with other workers in turns, on the same Redis; the other sides are idle. The target is for the
    plain worker."""
    from petiole.tasks import generate

    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(case.shape))
        stack.enter_context(fleet(model, case.shape, case.concurrency, threads))

        def ours() -> Round:
            return all_at_once(lambda request: generate.delay(**request), case)

        all_at_once(lambda request: generate.delay(**request), Case(case.shape, 2, 8, 4, 2, 1))
        for peer, start in PEERS.items():
            with start(model, case.shape, threads) as plain:
                rounds = [(ours(), all_at_once(partial(ask, plain), case)) for _ in range(case.rounds)]
            target = case.target if peer == "a plain worker" else None
            name = f"{case.name}, against {peer}"
            compared(report, f"{name}: tokens a second", "tokens/s", [(a[0], b[0]) for a, b in rounds], target)
            medians = [(statistics.median(a[1]), statistics.median(b[1])) for a, b in rounds]
            inverse = 1 / target if target else None
            compared(report, f"{name}: median completion time", "s", medians, inverse, better="lower")


def compared(
    report: Report, name: str, unit: str, rounds: list[tuple[float, float]], target: float | None, **more: Any
) -> None:
    ours, theirs = (statistics.median(side) for side in zip(*rounds, strict=True))
    ratios = [a / b for a, b in rounds]
    spread = (min(ratios), max(ratios))
    report.add(name, ours, unit, peer=theirs, spread=spread, target=target, **more)


def ask(task: Any, request: dict[str, Any]) -> Any:
    return task.delay(request["prompt"], request["max_tokens"])


# ---------------------------------------------------------------- the workload


BROKER = {
    "small": [Case(TINY, 192, 32, 96, 64, 3, target=0.6), Case(SMALL, 64, 32, 48, 32, 2)],
    "large": [Case(QWEN3_06B, 16, 32, 24, 16, 3, target=0.9)],
}
OTHERS = {
    "small": Case(SMALL, 32, 64, 48, 32, 1),
    "large": Case(QWEN3_06B, 32, 32, 24, 32, 1, target=PLAIN_RATE),
}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=0, help="of each engine; 0: torch decides")
    parser.add_argument("--client", choices=list(CLIENTS), default="asyncio", help="how the streams are read")
    parser.add_argument("--only", choices=list(BROKER), help="the small shapes, or the Qwen3-0.6B shape")
    parser.add_argument("--no-others", action="store_true", help="leave out the plain Celery workers")
    options = parser.parse_args(argv)
    chosen = [options.only] if options.only else list(BROKER)
    brokered, beside = [case for key in chosen for case in BROKER[key]], [OTHERS[key] for key in chosen]
    if options.quick:
        brokered, beside = [Case(TINY, 4, 16, 8, 4, 1)], [Case(TINY, 2, 16, 4, 2, 1)]
    report = Report("End to end through Celery, with streaming readers (peer: the same engine driven directly)")
    latencies = {}
    for case in progress(brokered, "through the broker"):
        seen = through_broker(report, case, options.client, options.threads)
        latencies[case.shape.name] = (seen.ttfts_ms, seen.gaps_ms)
        report.save(options.json)
    for case in [] if options.no_others else progress(beside, "beside other workers"):
        against_others(report, case, options.threads)
        report.save(options.json)
    report.extra |= {"client": options.client, "threads": options.threads}
    if options.plots and not options.quick:
        from bench.harness import plots

        plots.latency(Path(options.plots) / "serving_latency.png", latencies)
    report.finish(options.json)


if __name__ == "__main__":
    main()

"""The time from `delay()` until a reader has the first delta, on an idle worker and on a full one; and the cost of
a reader.

A real worker runs the tiny model on the embedded Redis. One client submits a task, waits for its first delta, and
begins again when that task has ended. Then many tasks come at once: in turns to an idle worker, and to a worker
whose places are all taken by tasks of a lower priority. Readers are measured without a worker: a process writes a
stream as fast as Redis takes it, and one reader follows it, beside a bare redis-py subscription that only
receives."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.harness.report import Report, arguments
from bench.harness.writer import writing

TARGET_MS = 15.0
PROMPT = "What is 17 + 25?"
FULL = 64
"""The worker's places."""

TOGETHER = 100
"""Deltas that the writer sends at once: it must be faster than any reader."""


def first_delta(report: Report, tasks_count: int) -> None:
    from petiole.tasks import generate, stream

    options: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}

    def delay_then_stream() -> tuple[float, float]:
        began = time.perf_counter()
        result = generate.delay(**options)
        submitted = time.perf_counter()
        with stream(result, timeout_s=30) as deltas:
            next(deltas)
            first = time.perf_counter()
            list(deltas)
        result.get(timeout=30)
        return submitted - began, first - began

    def submit_and_stream() -> tuple[float, float]:
        began = time.perf_counter()
        with generate.stream(timeout_s=30, **options) as deltas:
            submitted = time.perf_counter()
            next(deltas)
            first = time.perf_counter()
            list(deltas)
        return submitted - began, first - began

    async def with_asyncio() -> list[tuple[float, float]]:
        samples = []
        for _ in range(tasks_count):
            began = time.perf_counter()
            first = 0.0
            async for _delta in generate.astream(timeout_s=30, **options):
                first = first or time.perf_counter()
            samples.append((0.0, first - began))
        return samples

    for _ in range(20):
        delay_then_stream()
    add(report, "delay() to the first delta", [delay_then_stream() for _ in range(tasks_count)], TARGET_MS)
    add(report, "generate.stream() to the first delta", [submit_and_stream() for _ in range(tasks_count)])
    add(report, "generate.astream() to the first delta", asyncio.run(with_asyncio()))


def burst(report: Report, n: int, rounds: int) -> None:
    """`n` tasks at once: from the submission of the first to the first delta of each."""
    from petiole.contract.types import GenerateOptions
    from petiole.tasks import generate, stream
    from petiole.tasks.fleet import control

    urgent: GenerateOptions = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    patient: GenerateOptions = {
        "prompt": "Count from 1 to 500.",
        "max_tokens": 1900,
        "temperature": 0,
        "ignore_eos": True,
    }
    taken: dict[str, list[float]] = {"an idle worker": [], "a worker full of tasks at priority 9": []}

    async def first_deltas() -> list[float]:
        began = time.perf_counter()

        async def first_delta() -> float:
            deltas = generate.astream(timeout_s=60, **urgent)
            await anext(deltas)
            seconds = time.perf_counter() - began
            async for _ in deltas:
                pass
            return seconds

        return await asyncio.gather(*(first_delta() for _ in range(n)))

    for _ in range(rounds):
        taken["an idle worker"] += asyncio.run(first_deltas())
        batch = [generate.apply_async(kwargs=patient, priority=9) for _ in range(FULL)]
        with stream(batch[-1], timeout_s=60) as deltas:
            next(deltas)
        taken["a worker full of tasks at priority 9"] += asyncio.run(first_deltas())
        for result in batch:
            control.cancel(result)
        for result in batch:
            result.get(timeout=60, propagate=False)
    idle = statistics.median(taken["an idle worker"]) * 1e3
    for where, seconds in taken.items():
        first = sorted(1000 * s for s in seconds)
        peer = None if where == "an idle worker" else idle
        name = f"{n} at once, {where}: to the first delta, median"
        report.add(name, statistics.median(first), "ms", peer=peer, better="lower", samples=first)
        report.add("  95 of 100", first[int(0.95 * len(first))], "ms", better="lower")


def add(report: Report, name: str, samples: list[tuple[float, float]], target: float | None = None) -> None:
    submission = [1000 * submitted for submitted, _ in samples if submitted]
    first = sorted(1000 * seconds for _, seconds in samples)
    report.add(name, statistics.median(first), "ms", target=target, better="lower", samples=first)
    report.add(f"{name}, 95 of 100", first[int(0.95 * len(first))], "ms", better="lower")
    if submission:
        report.add("  of which the submission", statistics.median(submission), "ms", better="lower")


def readers(report: Report, deltas: int, rounds: int) -> None:
    from petiole.tasks.servers import connections
    from petiole.tasks.streams import readers
    from petiole.tasks.wire.keys import stream_keys

    def bare() -> float:
        subscription = connections.streams().pubsub()
        subscription.subscribe(stream_keys("bench").channel)
        subscription.get_message(timeout=5)

        def receive() -> None:
            while b'"stop"' not in (subscription.get_message(timeout=5) or {"data": b""})["data"]:
                pass

        seconds = while_written(receive, deltas)
        subscription.close()
        return seconds

    def reader() -> float:
        with readers.Stream("bench") as stream:
            stream.open()
            return while_written(lambda: [None for _ in stream], deltas)

    async def follow() -> float:
        stream = readers.AsyncStream("bench")
        await stream.open()
        writer = writing("bench", deltas, TOGETHER)
        await anext(stream)
        began = time.process_time()
        async for _ in stream:
            pass
        seconds = time.process_time() - began
        await stream.aclose()
        writer.wait()
        return seconds

    sides: dict[str, Callable[[], float]] = {
        "a bare subscription": bare,
        "stream()": reader,
        "astream()": lambda: asyncio.run(follow()),
    }
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            connections.streams().delete(stream_keys("bench").log)
            taken[name].append(side())
    best = {name: min(seconds) / deltas * 1e6 for name, seconds in taken.items()}
    for name, microseconds in best.items():
        peer = None if name == "a bare subscription" else best["a bare subscription"]
        report.add(f"CPU of {name} for a delta", microseconds, "us", peer=peer, better="lower")

    def again(count: int = 200) -> float:
        """A whole stream, late: the log of a task of four deltas."""
        began = time.perf_counter()
        for _ in range(count):
            with readers.Stream("late") as stream:
                list(stream)
        return (time.perf_counter() - began) / count * 1e6

    assert writing("late", 4).wait() == 0
    report.add("a late reader of four deltas, in all", min(again() for _ in range(rounds)), "us", better="lower")


def while_written(read: Callable[[], object], deltas: int) -> float:
    """Processor seconds that `read` takes while another process writes the stream."""
    writer = writing("bench", deltas, TOGETHER)
    began = time.process_time()
    read()
    seconds = time.process_time() - began
    writer.wait()
    return seconds


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    settings.cache_clear()
    report = Report("From delay() to the first delta, and what a reader costs (embedded Redis, tiny model)")
    with demo.worker():
        first_delta(report, 20 if options.quick else 300)
        burst(report, 30, 1 if options.quick else 5)
    readers(report, 2_000 if options.quick else 20_000, 1 if options.quick else 5)
    report.extra["settings"] = json.loads(settings().model_dump_json(exclude={"broker_url"}))
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

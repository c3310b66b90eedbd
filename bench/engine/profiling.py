"""Where the time of a decode step goes: host and device by phase, and which threads waited for the interpreter.

First the engine runs alone, then a whole worker with its readers. The engine's own tracer gives the spans. The
host's phases are those of the engine thread. `wait` is its wait for the device; all other phases are work. A
thread that works for longer than its processor time has been waiting: for Python's interpreter lock, which all
threads of a worker share, or for a core."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.harness import load
from bench.harness.checkpoints.decoders import QWEN3_06B, SMALL, TINY, Shape, checkpoint
from bench.harness.report import progress
from bench.harness.runs import Bench, arguments, opened
from petiole.gpu_worker.runtime.device.tracing import Tracer

HOST = ("plan", "launch", "mask", "sample", "wait", "commit")
NOTICED = 0.005
SWITCH_INTERVALS_S = (0.005, 0.0005, 0.00005)


def cpu_seconds() -> dict[str, float]:
    """Processor seconds so far of each Python thread, and of all native ones together as "native"."""
    seconds: dict[str, float] = defaultdict(float)
    for thread in threading.enumerate():
        if thread.ident is not None:
            seconds[thread.name] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    seconds["native"] = max(0.0, time.process_time() - sum(seconds.values()))
    return dict(seconds)


def steady(spans: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The spans from the tenth decode forward to the tenth before the last: without prefill and tail."""
    starts = [span["ts"] for span in spans if span["line"] == "compute" and span["name"] == "decode"]
    if len(starts) < 24:
        return list(spans)
    return [span for span in spans if starts[10] <= span["ts"] < starts[-10]]


def phases(spans: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Microseconds of a step: the host's phases, the device's tasks, the device's idle time, and the whole
    step."""
    chosen = steady(spans)
    decodes = [span for span in chosen if span["line"] == "compute" and span["name"] == "decode"]
    steps = max(1, len(decodes))
    total = max(span["ts"] for span in decodes) - min(span["ts"] for span in decodes)
    step = total / max(1, steps - 1)
    host: dict[str, float] = dict.fromkeys(HOST, 0.0)
    device: dict[str, float] = defaultdict(float)
    for span in chosen:
        if span["line"] == "engine" and span["name"] in host:
            host[span["name"]] += span["dur"] / steps
        elif span["line"] == "compute":
            device[span["name"]] += span["dur"] / steps
    rest = max(0.0, step - sum(host.values()))
    busy = sum(device.values())
    return {
        "step": step,
        **{f"host: {name}": cost for name, cost in host.items()},
        "host: the rest of the loop": rest,
        **{f"device: {name}": cost for name, cost in device.items()},
        "device: idle": max(0.0, step - busy),
    }


def profile(bench: Bench, shape: Shape, batch: int, output: int) -> None:
    tracer = Tracer()
    with checkpoint(shape) as model, bench.engine(model, shape, tracer, prefix_cache="off") as engine:
        before = cpu_seconds()
        run = load.at_concurrency(engine, load.requests(batch, 16, output), batch)
        used = {name: cost - before.get(name, 0.0) for name, cost in cpu_seconds().items()}
    spans = tracer.spans()
    costs = phases(spans)
    name = f"{shape.name}, batch {batch}"
    bench.report.add(f"{name}: a step", costs.pop("step"), "us", better="lower")
    for phase, cost in costs.items():
        if cost >= 0.05:
            bench.report.add(f"  {phase}", cost, "us", better="lower")
    waits = sum(s["dur"] for s in spans if s["line"] == "engine" and s["name"] == "wait") / 1e6
    working = max(0.0, run.seconds - waits)
    bench.report.add("  engine thread: not waiting for the device", working / run.seconds, "of the time")
    held_up = max(0.0, working - used.get("engine", 0.0))
    note = "for the interpreter's lock, a core, or requests"
    bench.report.add("  engine thread: of that, held up", held_up / run.seconds, "of the time", note=note)
    for thread, cost in sorted(used.items(), key=lambda pair: -pair[1]):
        if cost / run.seconds >= NOTICED:
            bench.report.add(f"  processor time of {thread}", cost / run.seconds, "cores")


# ---------------------------------------------------------------- in a worker


def in_a_worker(bench: Bench) -> None:
    """The engine, text, publisher and completion threads of a real worker share one interpreter. Which of them
    wait for it, and does handing it over sooner help? Python's default is 5 ms. Tasks and readers are those of
    bench/queue/serving.py."""
    from bench.queue import serving

    case = bench.pick(load.Case(TINY, 4, 16, 8, 4, 1), load.Case(TINY, 192, 32, 96, 64, 3))
    rates: dict[float, list[float]] = defaultdict(list)
    seen: dict[float, list[dict[str, Any]]] = defaultdict(list)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.mkfifo(pipe := folder / "pipe")
        stack.enter_context(
            environment(BENCH_PIPE=str(pipe), PETIOLE_ENGINE_FACTORY="bench.engine.observed:engine")
        )
        stack.enter_context(serving.fleet("petiole-tiny", TINY, case.concurrency, bench.threads))
        asyncio.run(serving.read_all(case, 99))
        for i in range(case.rounds):
            for interval in SWITCH_INTERVALS_S:
                pipe.write_text(f"begin {interval}\n")
                run = asyncio.run(serving.read_all(case, i))
                pipe.write_text(f"end {folder / 'seen.json'}\n")
                seen[interval].append(taken(folder / "seen.json"))
                rates[interval].append(run.tokens / run.seconds)
    usual = SWITCH_INTERVALS_S[0]
    middle = statistics.median
    bench.report.add(
        f"a worker, {case.name}, with readers", middle(rates[usual]), "tokens/s", samples=rates[usual]
    )
    for name, shares in threads_of(seen[usual]).items():
        bench.report.add(f"  {name}", middle(shares), "of the time", better="lower")
    for interval, rounds in seen.items():
        name = f"a worker, switch interval {interval * 1e3:g} ms"
        bench.report.add(name, middle(rates[interval]), "tokens/s", peer=middle(rates[usual]))
        for part in ("mean", "99"):
            late = middle(1e3 * watched["late_s"][part] for watched in rounds)
            about = "on average" if part == "mean" else "99 of 100"
            bench.report.add(f"  a thread that is woken runs late by, {about}", late, "ms", better="lower")
        core = middle(1e3 * watched["queued_s"]["bench-probe"] / max(1, watched["probes"]) for watched in rounds)
        bench.report.add("  of which for a core, on average", core, "ms", better="lower")


def threads_of(rounds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The share of the time that each thread takes, round by round. Threads that take none are left out."""
    shares: dict[str, list[float]] = defaultdict(list)
    for seen in rounds:
        seconds, cpu, queued = seen["seconds"], dict(seen["cpu_s"]), seen["queued_s"]
        working = seconds - seen["engine_waited_s"]
        held_up = max(0.0, working - cpu["engine"] - queued["engine"])
        shares["engine thread: waiting for the device"].append(seen["engine_waited_s"] / seconds)
        shares["engine thread: ready, but no core free"].append(queued["engine"] / seconds)
        shares["engine thread: waiting for the interpreter, or for requests"].append(held_up / seconds)
        for thread, cost in grouped(cpu).items():
            shares[f"processor time of {thread}"].append(cost / seconds)
    return {name: parts for name, parts in shares.items() if statistics.median(parts) >= NOTICED}


def grouped(seconds: Mapping[str, float]) -> dict[str, float]:
    """The threads of a pool together: their names differ only by a number."""
    together: dict[str, float] = defaultdict(float)
    for name, cost in seconds.items():
        together[name.rstrip("0123456789").rstrip("_-")] += cost
    return dict(sorted(together.items(), key=lambda pair: -pair[1]))


def taken(path: Path) -> dict[str, Any]:
    """Wait for the worker's file, and return its content."""
    while not path.exists():
        time.sleep(0.01)
    seen: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return seen


@contextmanager
def environment(**settings: str) -> Iterator[None]:
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, "cpu", "cuda", "auto")
    parser.add_argument("--no-large", action="store_true", help="leave out the Qwen3-0.6B shape")
    options = parser.parse_args(argv)
    bench = opened("Where the time of a decode step goes", options)
    cases = bench.pick(
        [(TINY, 4, 40)], [(TINY, 1, 300), (TINY, 8, 300), (TINY, 32, 200), (TINY, 64, 200), (SMALL, 32, 100)]
    )
    if not (options.quick or options.no_large):
        cases = [*cases, (QWEN3_06B, 16, 40)]
    for shape, batch, output in progress(cases, "profile"):
        profile(bench, shape, batch, output)
    if bench.device == "cpu":
        in_a_worker(bench)
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()

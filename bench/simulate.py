"""A fleet on paper: the real scheduler and its admission, with a model that only says how long a step would take.

    check       seconds of a decode step by batch and of a prefill by tokens, measured in turns with a closed loop;
                then what the simulation says of that loop, and of Poisson arrivals, beside what the engine did
    fleet       workers that take tasks from one queue, as Celery's do: throughput, TTFT, and the load on Redis

Everything happens in virtual time. A worker is the loop of `gpu_worker.loop` over the real `Scheduler`, two steps
deep; its device is a queue of steps that begin one after the other. Only the figures of a single worker can be
checked here; those of fleets follow from them as long as Redis keeps up, so its share stands beside them.
"""

from __future__ import annotations

import heapq
import json
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import load
from bench.checkpoints import TINY, checkpoint
from bench.engine import Bench
from bench.growth import enqueue, null_scheduler
from bench.profiling import phases
from bench.report import Report, arguments, percentile, progress
from gpu_worker import Engine
from gpu_worker.scheduling.scheduled import ScheduledSequence
from gpu_worker.tracing import Tracer

WITHIN = 0.15
SLOTS, LOOK_AHEAD = 64, 4
RESULTS = Path(__file__).parent / "results" / "cpu" / "redis_cost.json"


@dataclass(frozen=True)
class TimedModel:
    """Seconds of a step: decode by batch, prefill by tokens; straight lines between what was measured.

    More work never takes less time: where the measurements say so, that is noise.
    """

    decode: Sequence[tuple[int, float]]
    prefill: Sequence[tuple[int, float]]

    def seconds(self, kind: str, sequences: int, tokens: int) -> float:
        points, at = (self.prefill, tokens) if kind == "prefill" else (self.decode, sequences)
        xs = [size for size, _ in points]
        ys = np.maximum.accumulate([seconds for _, seconds in points])
        if at <= xs[-1]:
            return float(np.interp(at, xs, ys))
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        return float(ys[-1] + slope * (at - xs[-1]))


@dataclass
class Task:
    """One request on paper. Times are virtual seconds."""

    arrived: float
    prompt: int
    output: int
    first: float = 0.0
    ended: float = 0.0


@dataclass
class Worker:
    """An engine in virtual time. `now`: how far its loop has got; `free_at`: when its device will be idle."""

    model: TimedModel
    now: float = 0.0
    free_at: float = 0.0
    held: dict[int, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler, self.pipeline = null_scheduler(
            rows=SLOTS, max_model_len=4096, n_pages=SLOTS * 2048, chunk=512
        )
        self.ends: deque[float] = deque()
        self.arrivals = 0

    def take(self, task: Task) -> None:
        self.now = max(self.now, task.arrived)
        self.held[self.arrivals] = task
        prompt = np.random.default_rng(self.arrivals).integers(1, 1000, task.prompt)
        enqueue(self.scheduler, prompt, task.output, self.arrivals)
        self.arrivals += 1

    def round(self) -> list[Task]:
        """One trip of the loop. Returns the tasks that ended in it."""
        launched = self._launch()
        if (self.pipeline.is_full or not launched) and (oldest := self.pipeline.pop_oldest()) is not None:
            self.now = max(self.now, self.ends.popleft())
            self.scheduler.commit_step(oldest)
            self.pipeline.on_step_completed()
        return self._ended()

    def _launch(self) -> bool:
        slot_id = self.pipeline.free_slot_id()
        plan = self.scheduler.schedule_step(self.pipeline) if slot_id is not None else None
        if plan is None or slot_id is None:
            return False
        handle = self.scheduler.launch_forward_async(plan, slot_id)
        assert handle is not None
        self.pipeline.on_launch(handle)
        self.pipeline.on_pending_commit(self.scheduler.finalize_sampling(handle, None))
        tokens = sum(plan.lengths or ())
        self.free_at = max(self.free_at, self.now) + self.model.seconds(plan.kind, len(plan.sequences), tokens)
        self.ends.append(self.free_at)
        return True

    def _ended(self) -> list[Task]:
        state, done = self.scheduler.state, []
        for seq, tokens, _, end in state.outbox:
            task = self.held[number(seq)]
            if len(tokens) and not task.first:
                task.first = self.now
            if end is not None:
                task.ended = self.now
                done.append(self.held.pop(number(seq)))
        state.outbox = []
        return done


def number(seq: ScheduledSequence) -> int:
    return int(seq.request.request_id)


def run(model: TimedModel, tasks: Sequence[Task], workers: int = 1, concurrency: int = 0) -> list[Task]:
    """All tasks through one queue. With `concurrency` a task arrives when one has ended, as in a closed loop."""
    fleet = [Worker(model) for _ in range(workers)]
    queue, done = deque(sorted(tasks, key=lambda task: task.arrived)), list[Task]()
    limit = concurrency or workers * (SLOTS + LOOK_AHEAD)
    clocks = [(0.0, i) for i in range(workers)]
    while len(done) < len(tasks):
        now, i = heapq.heappop(clocks)
        worker = fleet[i]
        worker.now = max(worker.now, now)
        while queue and len(worker.held) < SLOTS + LOOK_AHEAD and len(tasks) - len(queue) - len(done) < limit:
            if concurrency:
                queue[0].arrived = worker.now
            if queue[0].arrived > worker.now:
                break
            worker.take(queue.popleft())
        if worker.held:
            done += worker.round()
            heapq.heappush(clocks, (worker.now, i))
        elif queue:
            heapq.heappush(clocks, (max(queue[0].arrived, now + 1e-4), i))
    return done


# ---------------------------------------------------------------- against the engine


PROMPT, OUTPUT = 64, 48
CLOSED = "closed loop of 64"
COMPLETION = "arrivals at half of that: median completion"
TTFT = "arrivals at half of that: median TTFT"


@dataclass
class Measured:
    """petiole-tiny on this machine, whose speed drifts with what else runs.

    So a round measures all that it compares: steps of each kind and size, then the loads that they must reproduce.
    """

    bench: Bench
    engine: Engine
    tracer: Tracer
    models: list[TimedModel] = field(default_factory=list)
    figures: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def round(self, i: int) -> None:
        pick, n = self.bench.pick, self.bench.pick(8, 192)
        decode = [(batch, self.decode_step_s(batch)) for batch in pick((1, 4), (1, 8, 16, 32, 48, SLOTS))]
        prefill = [
            (k * PROMPT, statistics.median(self.prefill_step_s(k) for _ in range(5)))
            for k in pick((1, 2), (1, 2, 4, 8, 16, 32))
        ]
        model = TimedModel(decode, prefill)
        self.models.append(model)

        closed = load.at_concurrency(self.engine, load.requests(n, PROMPT, OUTPUT, seed=i), SLOTS)
        paper = run(model, [Task(0.0, PROMPT, OUTPUT) for _ in range(n)], concurrency=SLOTS)
        self.note(CLOSED, n * OUTPUT / max(task.ended for task in paper), closed.tokens_per_s)

        rate = 0.5 * closed.requests_per_s
        opened = load.poisson(self.engine, load.requests(n, PROMPT, OUTPUT, seed=i), rate, seed=i)
        arrived = np.cumsum(load.arrival_gaps(n, rate, seed=i))
        paper = run(model, [Task(float(at), PROMPT, OUTPUT) for at in arrived])
        seen = [1e3 * (stream.stamps[-1] - stream.submitted) for stream in opened.streams]
        middle = statistics.median
        self.note(COMPLETION, middle(1e3 * (task.ended - task.arrived) for task in paper), middle(seen))
        self.note(TTFT, middle(1e3 * (task.first - task.arrived) for task in paper), middle(opened.ttfts_ms))

    def note(self, what: str, simulated: float, measured: float) -> None:
        self.figures.setdefault(what, []).append((simulated, measured))

    def decode_step_s(self, batch: int) -> float:
        """From one launch to the next, in the steady state."""
        self.tracer.reset()
        load.at_concurrency(self.engine, load.requests(batch, PROMPT, self.bench.pick(32, 80)), batch)
        return phases(self.tracer.spans())["step"] / 1e6

    def prefill_step_s(self, n: int) -> float:
        """Of one step that holds the prompts of `n` requests, with all that the host does for it."""
        self.engine.pause()
        streams = [load.submit(self.engine, request) for request in load.requests(n, PROMPT, 1)]
        while int(self.engine.stats()["waiting"]) < n:
            time.sleep(0.001)
        began = time.perf_counter()
        self.engine.resume()
        load.finished(streams)
        return max(stream.stamps[0] for stream in streams) - began


def check(bench: Bench) -> TimedModel:
    """The same loads on the engine and on paper; the middle round counts."""
    tracer = Tracer()
    with checkpoint(TINY) as folder, bench.engine(folder, TINY, tracer, prefix_cache="off") as engine:
        measured = Measured(bench, engine, tracer)
        for i in progress(range(bench.pick(1, 5)), "steps and loads, in turns"):
            measured.round(i)
    for what, pairs in measured.figures.items():
        simulated, seen = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = [a / b for a, b in pairs]
        spread = (min(ratios), max(ratios))
        unit = "tokens/s" if what == CLOSED else "ms"
        bench.report.add(what, simulated, unit, peer=seen, spread=spread, note="peer: measured")
        off = abs(statistics.median(ratios) - 1)  # either way
        judged = (
            what != TTFT and not bench.quick
        )  # a few ms, in which the way to the reader counts as much as steps
        bench.report.add("  off by", off, "", target=WITHIN if judged else None, better="lower")
    return TimedModel(
        middle_of([model.decode for model in measured.models]),
        middle_of([model.prefill for model in measured.models]),
    )


def middle_of(rounds: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The same sizes in each round."""
    return [
        (points[0][0], statistics.median(seconds for _, seconds in points)) for points in zip(*rounds, strict=True)
    ]


# ---------------------------------------------------------------- fleets


def fleets(bench: Bench, model: TimedModel, sizes: Sequence[int]) -> None:
    """Poisson arrivals at 80 % of what the fleet can do; Redis's share from bench/redis_cost.py's figures."""
    costs = redis_costs()
    share = 0.8
    paper = run(model, [Task(0.0, PROMPT, OUTPUT) for _ in range(bench.pick(8, 256))], concurrency=SLOTS)
    capacity = len(paper) / max(task.ended for task in paper)
    for workers in progress(sizes, "fleets"):
        rate = share * capacity * workers
        arrived = np.cumsum(load.arrival_gaps(bench.pick(16, 256) * workers, rate, seed=workers))
        paper = run(model, [Task(float(at), PROMPT, OUTPUT) for at in arrived], workers)
        seconds = max(task.ended for task in paper)
        ttfts = [1e3 * (task.first - task.arrived) for task in paper]
        name = f"{workers} workers like this one, at {share:.0%}"
        bench.report.add(name, len(paper) * OUTPUT / seconds, "tokens/s")
        bench.report.add("  TTFT, median", statistics.median(ttfts), "ms")
        bench.report.add("  TTFT, 99 of 100", percentile(ttfts, 0.99), "ms")
        if costs:
            deltas = OUTPUT / costs["tokens in a delta"]
            busy = rate * (costs["task"] + deltas * costs["delta"]) / 1e6
            bench.report.add("  Redis is busy", busy, "of one core")


def redis_costs() -> dict[str, float]:
    """Microseconds of Redis for a task and for a delta, as last recorded."""
    if not RESULTS.exists():
        return {}
    found: dict[str, Any] = {r["name"]: r["value"] for r in json.loads(RESULTS.read_text())["results"]}
    return {
        "task": found["processor us: a task with one reader, without its deltas"],
        "delta": found["processor us: a delta with one reader"],
        "tokens in a delta": found["tokens in a delta"],
    }


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=0, help="of the model on the CPU; 0: torch decides")
    options = parser.parse_args(argv)
    bench = Bench(
        Report("Simulation: the real scheduler with a timed model"), "cpu", options.threads, options.quick
    )
    model = check(bench)
    fleets(bench, model, [1, 2] if options.quick else options.workers)
    bench.report.extra["model"] = {"decode": list(model.decode), "prefill": list(model.prefill)}
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()

"""A fleet on paper: the real scheduler and its admission, with a model that only says how long a step would take.

    check       a closed loop and Poisson arrivals, simulated and on the engine; the times of steps
                (bench/scheduler/steps.py) are measured in the same loads, and in other loads in turns with them
    fleet       workers that take tasks from one queue, as Celery's do: throughput, TTFT, and the load on Redis

Everything happens in virtual time. A worker is the loop of `gpu_worker.threads.loop` over the real `Scheduler`,
two steps deep. Its device is a queue of steps that begin one after the other. Only the figures of a single worker
can be checked. The figures of fleets follow from them while Redis keeps up, so the share of Redis stands beside
them."""

from __future__ import annotations

import heapq
import itertools
import json
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import load
from bench.harness.checkpoints.decoders import TINY, checkpoint
from bench.harness.report import percentile, progress
from bench.harness.runs import Bench, arguments, opened
from bench.scheduler.costs import Harness
from bench.scheduler.steps import Recorder, Step, StepTime, TimedModel
from petiole.gpu_worker import Engine, Request
from petiole.gpu_worker.runtime.device.tracing import Tracer
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.state import Generated, SequenceEnded

WITHIN = 0.15
SLOTS, LOOK_AHEAD = 64, 4
CONCURRENCIES = (1, 2, 4, 8, 16, 32, SLOTS)
ROUNDS = 9
RESULTS = Path(__file__).parents[1] / "results" / "cpu" / "redis_cost.json"


@dataclass
class Task:
    """One request on paper. Times are virtual seconds; `gaps`: between its tokens."""

    arrived: float
    prompt: int
    output: int
    first: float = 0.0
    last: float = 0.0
    ended: float = 0.0
    gaps: list[float] = field(default_factory=list)


@dataclass
class Worker:
    """An engine in virtual time. `now`: the time of its loop; `free_at`: when its device will be idle; `takes`:
    whether it takes tasks. One that takes none ends with the last that it holds."""

    model: StepTime
    slots: int = SLOTS
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    free_at: float = 0.0
    takes: bool = True
    held: dict[int, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.harness = Harness(self.slots, **{"n_pages": self.slots * 2048, **self.settings})
        self.ends: deque[float] = deque()
        self.arrivals = 0

    def take(self, task: Task) -> None:
        self.held[self.arrivals] = task
        self.harness.submit(np.random.default_rng(self.arrivals).integers(1, 1000, task.prompt), task.output)
        self.arrivals += 1

    def round(self) -> list[Task]:
        """One trip of the loop. Returns the tasks that ended in it."""
        launched = self._launch()
        if self.ends and (not launched or self.harness.pipeline.is_full):
            self.now = max(self.now, self.ends.popleft())
            self.harness.commit()
        return self._ended()

    def _launch(self) -> bool:
        plan = self.harness.plan()
        if plan is None:
            return False
        tokens, running = sum(plan.lengths or ()), len(self.harness.scheduler.state.running)
        context = sum([seq.scheduled_position for seq in plan.sequences])
        step = Step(plan.kind, len(plan.sequences), tokens or len(plan.sequences), running, context)
        before = next(self.harness.pipeline.steps(), None)
        if self.model.delay_s and plan.kind == "prefill" and before is not None and before.kind == "decode":
            self.ends[-1] += self.model.delay_s
            self.free_at = self.ends[-1]
        self.free_at = max(self.free_at, self.now) + self.model.seconds(step)
        self.harness.launch(plan)
        self.ends.append(self.free_at)
        return True

    def _ended(self) -> list[Task]:
        state, done = self.harness.scheduler.state, []
        for emission in state.emissions:
            task = self.held[number(emission.seq)]
            match emission:
                case Generated():
                    seen = self.now + self.model.out_s
                    if task.first:
                        task.gaps.append(seen - task.last)
                    task.first, task.last = task.first or seen, seen
                case SequenceEnded():
                    task.ended = self.now + self.model.out_s
                    done.append(self.held.pop(number(emission.seq)))
        state.emissions = []
        return done


def number(seq: ScheduledSequence) -> int:
    return int(seq.request.request_id)


@dataclass
class Scaler:
    """Looks at a fleet every `every_s` seconds, and has as many workers as `wanted` says of the tasks that wait or
    are held. A new worker takes its first task `start_s` after that. `worker_s`: seconds of all workers, with
    their starts."""

    wanted: Callable[[float, int], int]
    every_s: float
    start_s: float
    worker_s: float = 0.0
    starts: int = 0

    def look(self, now: float, fleet: Sequence[Worker], waiting: int) -> int:
        """Sends workers away. Returns how many are to start."""
        taking = [worker for worker in fleet if worker.takes]
        self.worker_s += self.every_s * sum(worker.takes or bool(worker.held) for worker in fleet)
        missing = self.wanted(now, waiting + sum(len(worker.held) for worker in fleet)) - len(taking)
        for worker in taking[missing:] if missing < 0 else ():
            worker.takes = False
        self.starts += max(0, missing)
        return max(0, missing)


def run(
    model: StepTime,
    tasks: Sequence[Task],
    workers: int = 1,
    concurrency: int = 0,
    slots: int = SLOTS,
    scaler: Scaler | None = None,
    **settings: Any,
) -> list[Task]:
    """Run all tasks through one queue. With `concurrency`, a task arrives when another has ended, as in a closed
    loop. `slots`, `settings`: those of each engine. `scaler`: decides how many workers there are."""
    fleet = [Worker(model, slots, settings) for _ in range(workers)]
    ordered, done = deque(sorted(tasks, key=lambda task: task.arrived)), list[Task]()
    queue = deque(ordered.popleft() for _ in range(min(concurrency or len(tasks), len(tasks))))
    looks = len(tasks) + workers  # the scaler's place among the clocks: no worker has this number
    clocks = [(0.0, i) for i in range(workers)] + ([(0.0, looks)] if scaler else [])
    while len(done) < len(tasks):
        now, i = heapq.heappop(clocks)
        if scaler and i == looks:
            waiting = bisect_right(queue, now - model.in_s, key=lambda task: task.arrived)
            for _ in range(scaler.look(now, fleet, waiting)):
                heapq.heappush(clocks, (now + scaler.start_s, len(fleet)))
                fleet.append(Worker(model, slots, settings))
            heapq.heappush(clocks, (now + scaler.every_s, looks))
            continue
        worker = fleet[i]
        worker.now = max(worker.now, now)
        while (
            worker.takes
            and queue
            and len(worker.held) < slots + LOOK_AHEAD
            and queue[0].arrived + model.in_s <= worker.now
        ):
            worker.take(queue.popleft())
        if worker.held:
            ended = worker.round()
            done += ended
            for _ in ended[: len(ordered)]:
                ordered[0].arrived = worker.now + model.out_s
                queue.append(ordered.popleft())
            heapq.heappush(clocks, (worker.now, i))
        elif worker.takes:
            arrives = queue[0].arrived + model.in_s if queue else now
            heapq.heappush(clocks, (max(arrives, now + 1e-4), i))
    return done


# ---------------------------------------------------------------- against the engine


PROMPT, OUTPUT = 64, 48
CLOSED = "closed loop of 64"
COMPLETION = "arrivals at half of that: mean completion"
TTFT = "arrivals at half of that: mean TTFT"
OTHERS = ", from the steps of other loads alone"


def outputs(n: int, seed: int) -> list[int]:
    """The lengths of `n` answers in tokens, `OUTPUT` on average, so that sequences come and go one by one."""
    drawn: list[int] = np.random.default_rng(seed).integers(OUTPUT // 2, OUTPUT * 3 // 2 + 1, n).tolist()
    return drawn


def requests(lengths: Sequence[int], seed: int) -> list[Request]:
    asked = load.prompts(len(lengths), PROMPT, seed=seed)
    return [Request(prompt=p, sampling=load.greedy(n)) for p, n in zip(asked, lengths, strict=True)]


@dataclass(frozen=True)
class Observed:
    """A load on the engine, and its steps."""

    run: load.Run
    steps: list[Step]

    @property
    def in_s(self) -> float:
        """Seconds from the submission until the scheduler chooses the request, on an idle engine."""
        return statistics.fmean(stream.result.timing.queue_ms for stream in self.run.streams) / 1e3

    @property
    def out_s(self) -> float:
        """Seconds from the commit of a first token until its reader has it."""
        return statistics.fmean(
            stream.ttft_s - (stream.result.timing.ttft_ms or 0.0) / 1e3 for stream in self.run.streams
        )


@dataclass
class Measured:
    """petiole-tiny on this machine, whose speed changes with the other processes on it.

    So the seconds of steps of each kind and size come from the load to reproduce. For sizes that this load may
    lack, they come from other loads right before it. The simulation decides which steps there are, and who waits
    for which."""

    bench: Bench
    engine: Engine
    tracer: Tracer
    seeds: Iterator[int] = field(default_factory=itertools.count)
    models: list[TimedModel] = field(default_factory=list)
    figures: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.engine, self.tracer)

    def observe(self, work: Callable[[], load.Run]) -> Observed:
        self.recorder.reset()
        return Observed(work(), self.recorder.steps())

    def closed(self, lengths: Sequence[int], concurrency: int) -> Observed:
        asked = requests(lengths, next(self.seeds))
        return self.observe(lambda: load.at_concurrency(self.engine, asked, concurrency))

    def others(self) -> TimedModel:
        """The seconds of steps from closed loops of each size."""
        loops = [
            self.closed(outputs(max(4, 3 * concurrency // 2), next(self.seeds)), concurrency)
            for concurrency in self.bench.pick((1, 4), CONCURRENCIES)
        ]
        return TimedModel.fit([step for loop in loops for step in loop.steps], loops[0].in_s, loops[0].out_s)

    def round(self) -> None:
        n, seed = self.bench.pick(8, 160), next(self.seeds)
        lengths, asked = outputs(n, seed), requests(outputs(n, seed), seed)
        others = self.others()
        closed = self.closed(lengths, SLOTS)
        rate = 0.5 * closed.run.requests_per_s
        opened = self.observe(lambda: load.poisson(self.engine, asked, rate, seed))
        self.models.append(others.adjusted(closed.steps + opened.steps, opened.out_s))

        arrived = np.cumsum(load.arrival_gaps(n, rate, seed))
        seen = [stream.stamps[-1] - stream.submitted for stream in opened.run.streams]
        for part in ("", OTHERS):
            model = others if part else others.adjusted(closed.steps, closed.out_s)
            paper = run(model, [Task(0.0, PROMPT, output) for output in lengths], concurrency=SLOTS)
            self.note(CLOSED + part, sum(lengths) / max(task.ended for task in paper), closed.run.tokens_per_s)
            model = others if part else others.adjusted(opened.steps, opened.out_s)
            tasks = [Task(float(at), PROMPT, output) for at, output in zip(arrived, lengths, strict=True)]
            paper = run(model, tasks)
            self.note(COMPLETION + part, mean_ms([t.ended - t.arrived for t in paper]), mean_ms(seen))
            self.note(
                TTFT + part,
                mean_ms([t.first - t.arrived for t in paper]),
                mean_ms([stream.ttft_s for stream in opened.run.streams]),
            )

    def note(self, what: str, simulated: float, measured: float) -> None:
        self.figures.setdefault(what, []).append((simulated, measured))


def mean_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.fmean(seconds)


def check(bench: Bench) -> TimedModel:
    """Run the same loads on the engine and simulated. The middle round counts. Returns a model of all rounds."""
    tracer = Tracer()
    with checkpoint(TINY) as folder, bench.engine(folder, TINY, tracer, prefix_cache="off") as engine:
        measured = Measured(bench, engine, tracer)
        for _ in progress(range(bench.pick(1, ROUNDS)), "steps and loads, in turns"):
            measured.round()
    for what, pairs in measured.figures.items():
        simulated, seen = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios = [a / b for a, b in pairs]
        spread = (min(ratios), max(ratios))
        unit = "tokens/s" if what.startswith(CLOSED) else "ms"
        bench.report.add(what, simulated, unit, peer=seen, spread=spread, note="peer: measured")
        off = abs(statistics.median(ratios) - 1)  # either way
        target = None if bench.quick or what.endswith(OTHERS) else WITHIN
        bench.report.add(
            f"  {what}: off by", off, "", target=target, better="lower", note=f"median of {len(pairs)} rounds"
        )
    return TimedModel.middle(measured.models)


# ---------------------------------------------------------------- fleets


def fleets(bench: Bench, model: TimedModel, sizes: Sequence[int]) -> None:
    """Poisson arrivals at 80 % of what the fleet can do; Redis's share from the figures of `redis_cost`."""
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
    options = parser.parse_args(argv)
    bench = opened("Simulation: the real scheduler with a timed model", options)
    model = check(bench)
    fleets(bench, model, [1, 2] if options.quick else options.workers)
    bench.report.extra["model"] = asdict(model)
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()

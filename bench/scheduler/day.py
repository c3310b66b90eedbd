"""A day on paper: workers come and go with the work, down to none, as the chart's ScaledObject has it, beside a
fleet of the most workers that never sleeps.

The scheduler is the real one, in virtual time (`simulate`). The device is slow, with few slots, so that a day of a
few thousand tasks has hours with one worker, with three, and with none. KEDA looks every 30 seconds and wants a
worker for so many tasks that wait or are held; it takes one away once fewer were wanted for five minutes.

    python -m bench.scheduler.day [--quick] [--json PATH]"""

from __future__ import annotations

import copy
import math
import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from bench.harness.report import Report, arguments
from bench.scheduler.simulate import Scaler, Task, run
from bench.scheduler.steps import Step

MOST, BUSY, SLOTS, PROMPT, OUTPUT, STEP_S = 3, 0.8, 4, 16, 20, 4.0
LOOKS_S, COOLDOWN_S, START_S = 30.0, 300.0, 120.0
"""KEDA's polling; the chart's `cooldownSeconds`; from a pod's creation until it takes tasks."""
DAY_S = 86_400.0
TASKS_A_WORKER = SLOTS
"""`scaling.tasks`: what one worker has a place for."""


@dataclass(frozen=True)
class Device:
    """A decode takes `STEP_S`, a short prompt a tenth of it."""

    in_s: float = 0.0
    out_s: float = 0.0
    delay_s: float = 0.0

    def seconds(self, step: Step) -> float:
        return STEP_S if step.kind == "decode" else STEP_S / 10


@dataclass
class Wanted:
    """The workers that KEDA wants for a number of tasks: up at once, down to the most of the last minutes."""

    recent: deque[tuple[float, int]] = field(default_factory=deque)

    def __call__(self, now: float, tasks: int) -> int:
        self.recent.append((now, min(MOST, math.ceil(tasks / TASKS_A_WORKER))))
        while self.recent[0][0] <= now - COOLDOWN_S:
            self.recent.popleft()
        return max(wanted for _, wanted in self.recent)


def arrivals(seed: int, day_s: float) -> list[float]:
    """Poisson arrivals: none from six in the evening to six in the morning, at noon `BUSY` of what all workers
    do."""
    paper = run(Device(), [Task(0.0, PROMPT, OUTPUT) for _ in range(8 * SLOTS)], slots=SLOTS)
    most = BUSY * MOST * len(paper) / max(task.ended for task in paper)
    draw = np.random.default_rng(seed)
    at = np.cumsum(draw.exponential(1 / most, int(day_s * most)))
    at = at[at < day_s]
    share = np.clip(np.sin((at / day_s - 0.25) * 2 * np.pi), 0, None)
    return [float(one) for one in at[draw.random(len(at)) < share]]


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    report = Report("A day on paper: no worker at night, three at noon")
    day_s = DAY_S / 16 if options.quick else DAY_S
    tasks = [Task(at, PROMPT, OUTPUT) for at in arrivals(1, day_s)]
    scaler = Scaler(Wanted(), LOOKS_S, START_S)
    always = run(Device(), copy.deepcopy(tasks), MOST, slots=SLOTS)
    scaled = run(Device(), tasks, 0, slots=SLOTS, scaler=scaler)
    waits = [
        [task.first - task.arrived for task in sorted(side, key=lambda t: t.arrived)] for side in (scaled, always)
    ]
    later = [ours - theirs for ours, theirs in zip(*waits, strict=True)]
    report.add("tasks that have not ended", len(tasks) - len(scaled), "", target=0, better="lower")
    report.add(
        "the most that a first token comes later",
        max(later),
        "s",
        peer=START_S + LOOKS_S,
        target=1.0,
        better="lower",
    )
    report.add("  99 of 100", float(np.percentile(later, 99)), "s")
    report.add("  half", float(np.percentile(later, 50)), "s")
    hours, all_hours = scaler.worker_s / 3600, MOST * max(task.ended for task in always) / 3600
    report.add("hours of workers, with their starts", hours, "h", peer=all_hours)
    report.add("starts", scaler.starts, "")
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

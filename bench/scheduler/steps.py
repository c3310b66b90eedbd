"""How long the steps of an engine take under load, and a model of it.

The time of a step is the time between two commits in the loop: from the previous commit (or from its own launch,
if nothing was in flight) to its own commit. So it includes the model's work, the host's work, and how they delay
each other, and the steps of a busy engine add up to the time that passed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from petiole.gpu_worker import Engine
from petiole.gpu_worker.runtime.device.tracing import Tracer
from petiole.gpu_worker.runtime.interface import Runtime, StepBatch

DECODE_KNOTS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_KNOTS = (64, 512, 2048)


@dataclass(frozen=True)
class Step:
    """The content of one step, beside `running` sequences that had their first token, and its seconds.

    `context`: positions that its sequences had before the step, if they were counted.
    `delayed`: a prefill was launched after it while it was in flight, which takes the host longer than a decode.
    """

    kind: str
    sequences: int
    tokens: int
    running: int
    context: int = 0
    delayed: bool = False
    seconds: float = 0.0


class Recorder:
    """Wraps the runtime of an engine and notes the content of each step. The engine's tracer has the times."""

    def __init__(self, engine: Engine, tracer: Tracer) -> None:
        self._scheduler, self._runtime, self._tracer = engine.scheduler, engine.scheduler.runtime, tracer
        self._held: dict[int, Step] = {}
        engine.scheduler.runtime = cast(Runtime, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        state = self._scheduler.state
        self._held[state.counters.steps] = Step(
            batch.kind, len(batch.rows), int(batch.lengths.sum()), len(state.running)
        )
        self._runtime.launch_forward(slot_id, batch)

    def reset(self) -> None:
        self._tracer.reset()
        self._held.clear()

    def steps(self) -> list[Step]:
        """The steps committed since the last reset, in order."""
        launched: dict[int, float] = {}
        committed: dict[int, float] = {}
        for span in self._tracer.spans():
            if span["line"] == "engine" and span["name"] == "launch":
                launched[span["args"]["step"]] = span["ts"]
            elif span["line"] == "engine" and span["name"] == "wait":
                committed[span["args"]["step"]] = span["ts"] + span["dur"]
        steps, before = [], 0.0
        for step_id in sorted(committed):
            if (held := self._held.get(step_id)) is not None and step_id in launched:
                seconds = (committed[step_id] - max(before, launched[step_id])) / 1e6
                behind = self._held.get(step_id + 1)
                delayed = behind is not None and behind.kind == "prefill"
                delayed = delayed and launched.get(step_id + 1, committed[step_id]) < committed[step_id]
                steps.append(replace(held, delayed=delayed, seconds=seconds))
            before = committed[step_id]
        return steps


class StepTime(Protocol):
    """The times of steps. `in_s`, `out_s`: from a submission to the scheduler, and from a commit to the reader.
    `delay_s`: how much longer a decode step seems to take if a prefill is launched after it."""

    @property
    def in_s(self) -> float: ...

    @property
    def out_s(self) -> float: ...

    @property
    def delay_s(self) -> float: ...

    def seconds(self, step: Step) -> float: ...


@dataclass(frozen=True)
class TimedModel:
    """Seconds of a step: decode by batch, and by whether it was delayed; prefill by its tokens and by the
    sequences that run beside it.

    Straight lines between the knots.
    """

    decode_s: tuple[float, ...]
    prefill_s: tuple[float, ...]
    in_s: float
    out_s: float

    @classmethod
    def fit(cls, steps: Sequence[Step], in_s: float, out_s: float) -> TimedModel:
        nothing = cls((0.0,) * (len(DECODE_KNOTS) + 1), (0.0,) * (len(PREFILL_KNOTS) + 1), in_s, out_s)
        return nothing.adjusted(steps, out_s)

    @classmethod
    def middle(cls, models: Sequence[TimedModel]) -> TimedModel:
        """Each figure's median."""
        decode = np.median([model.decode_s for model in models], axis=0)
        prefill = np.median([model.prefill_s for model in models], axis=0)
        ways = np.median([(model.in_s, model.out_s) for model in models], axis=0)
        return cls(tuple(decode.tolist()), tuple(prefill.tolist()), *ways.tolist())

    def adjusted(self, steps: Sequence[Step], out_s: float) -> TimedModel:
        """The model adjusted to `steps` by least squares. It keeps their total time, with all hiccups of the
        machine. Sizes that are not among `steps` stay as they were."""
        decode = [step for step in steps if step.kind == "decode"]
        prefill = [step for step in steps if step.kind == "prefill"]
        return TimedModel(
            self._solved(self.decode_s, decode), self._solved(self.prefill_s, prefill), self.in_s, out_s
        )

    def _solved(self, before: tuple[float, ...], steps: Sequence[Step]) -> tuple[float, ...]:
        missing = np.array([step.seconds - self.seconds(step) for step in steps])
        found = np.linalg.lstsq(np.array([features(step) for step in steps]), missing, rcond=None)[0]
        return tuple((np.array(before) + found).tolist())

    @property
    def delay_s(self) -> float:
        return self.decode_s[-1]

    def seconds(self, step: Step) -> float:
        """The seconds of such a step."""
        fitted = self.decode_s if step.kind == "decode" else self.prefill_s
        return max(0.0, float(features(step) @ np.array(fitted)))


def features(step: Step) -> np.ndarray:
    """The features in which the seconds of a step are linear."""
    if step.kind == "decode":
        return np.append(hats(step.sequences, DECODE_KNOTS), step.delayed)
    return np.append(hats(step.tokens, PREFILL_KNOTS), step.running)


def hats(x: float, knots: Sequence[int]) -> np.ndarray:
    """The weight of each knot in a straight line between its neighbours."""
    return np.array([np.interp(x, knots, row) for row in np.eye(len(knots))])

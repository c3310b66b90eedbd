"""What drafts cost: how many tokens the engine makes in the time that they take.

A step of n sequences yields n tokens in s seconds. A draft that lengthens it by c seconds costs c * n / s tokens.
It brings one token if it holds. So it is worth it if it holds with a probability above its price. With many
sequences on a CPU a step takes as much longer as it has more inputs. Then the price nears 1, and hardly any draft
is worth it.

A sequence may have to wait for its steps in flight before it has drafts. Beside others it misses a step: it costs
a token, less what the step saves without it. A sequence alone costs the time between two steps, in which the
device idles."""

from __future__ import annotations

import math

from petiole.gpu_worker.scheduling.batching import StepPayload
from petiole.gpu_worker.scheduling.priorities.budget import StepLoad, StepTimes
from petiole.gpu_worker.speculation import Price

LEAST = 0.25
"""No draft is cheaper. A wrong one costs the host something, too, which no step shows."""

TRIED, TRIED_OF = 4, 512
"""So many of so many steps have drafts for the least price. Otherwise, where they are too dear, nothing would show
that they have become cheaper."""

LOOK_S, LOOKS = 20e-6, 0.005
"""About what a look for the drafts of a sequence costs the host, and the share of a step that looks may cost."""

MOST_REST = 16

MEASURED = 32
"""One step in so many is measured, and those in which drafts are tried. To measure it costs the host something."""

LATEST = 1 / 8
"""The weight of the latest wait in their average."""


class DraftPrice:
    """The price by the seconds of the last steps."""

    def __init__(self) -> None:
        self._times, self._n, self._context, self._completed_s = StepTimes(), 0, 0, 0.0
        self._idle_s = 0.0

    def of(self, n_sequences: int) -> Price:
        """The price in a step of so many sequences."""
        costs = self._times.costs
        seconds = self._times.seconds(StepLoad(n_sequences, n_sequences, self._context))
        if seconds <= 0:
            return Price(LEAST, 0.0)
        rest = min(MOST_REST, math.ceil(LOOK_S * n_sequences / (LOOKS * seconds)))
        if self._tries:
            return Price(LEAST, 0.0, rest)
        draft = (costs.row + costs.position) * n_sequences / seconds
        wait = self._idle_s / seconds if n_sequences == 1 else 1 - min(1.0, draft)
        return Price(max(LEAST, draft), wait, rest)

    def on_commit(self, payload: StepPayload, now: float) -> None:
        """Measure the step: it began when it was launched or when the step before it was completed."""
        if payload.plan.drafts is not None and (idle_s := payload.launched_s - self._completed_s) > 0:
            self._idle_s += LATEST * (idle_s - self._idle_s)
        if payload.plan.sequences and (self._tries or self._n % MEASURED == 0):
            load, seconds = StepLoad.of(payload), now - max(payload.launched_s, self._completed_s)
            self._times.observe(load, seconds)
            self._context = load.context
        self._n += 1
        self._completed_s = now

    @property
    def _tries(self) -> bool:
        return self._n % TRIED_OF < TRIED

"""How much the lowest priority class may lengthen a step in which more urgent sequences decode.

The engine measures how long such steps take, and estimates from that a step's seconds with and without sequences
of the lowest class. With a budget of 1.25 these may add a quarter of the seconds that the step takes without them:

    the more urgent sequences decode | the lowest class decodes, by rank | a chunk of its prompts, if room is left
    <------------- 1 --------------> <-------------------------------- 0.25 ----------------------------------->

Sequences that do not fit keep their rows and their pages, and wait for a later step. A chunk of the lowest class
is no step of its own then: it runs beside the decodes, cut to what fits. Two kinds of steps are exceptions:

- `PROBES` steps in `PROBED`, and the first `FIRST` ones, go without the lowest class, so that their seconds are
  known. Only those count that have others of the kind before and behind them: the host works for a step's
  neighbours while the device computes it.
- A step has no limit once the lowest class had no part in `EXEMPT` of them, so that it goes on whatever its
  sequences cost.

Tokens do not depend on the step that computes them, so a budget changes none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from petiole.gpu_worker.scheduling.batching import StepPayload, StepPlan
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence

FIRST, PROBES, PROBED, EXEMPT = 8, 4, 64, 256
"""Steps in which the lowest class is limited. See above."""

ALONE, SHARED, FITTED = 12, 64, 8
"""The estimate rests on this many of the last steps without the lowest class, and with it. It is made anew once in
so many steps, and each time at first: to make it costs the host as much as to plan a step."""

EXACT, KEPT = 0.02, 0.05
"""An error below this share of a usual step's time counts as none. And how many steps, each wrong by such a time,
the costs before are worth."""

HEAVY = 8
"""How many others a step without the lowest class weighs, so that these together outweigh the others. Medians
follow the majority: what rows cost, whatever their number, would count to the steps without any."""

FADED = 0.9
"""The share of a chunk's price that a fit keeps if no step of the window has a chunk. Otherwise no step would have
one again after a delayed one made it dearer than the room."""

_SCALES = np.array([1.0, 16.0, 16.0, 4096.0, 1.0])
"""The scales of the features, so that their costs have the same order of magnitude."""

_Floats = npt.NDArray[np.float64]


class StepLoad(NamedTuple):
    """What a step computes: `rows` outputs, `positions` that go through the layers, `context` positions before
    these that attention reads, and `chunks` of prompts."""

    rows: int = 0
    positions: int = 0
    context: int = 0
    chunks: int = 0

    @classmethod
    def of(cls, payload: StepPayload) -> StepLoad:
        batch, context = payload.batch, int(payload.batch.starts.sum())
        if payload.plan.lengths is None:
            return cls(batch.size, batch.size, context)
        return cls(int(batch.outputs.sum()), int(batch.lengths.sum()), context, payload.plan.n_chunks)


class Costs(NamedTuple):
    """Seconds of a step that computes nothing, and of each unit of its load. A chunk costs something besides its
    positions: a step with one takes more of the host's time, and other kernels than a decode."""

    step: float = 0.0
    row: float = 0.0
    position: float = 0.0
    context: float = 0.0
    chunk: float = 0.0

    def more(self, load: StepLoad) -> float:
        """Seconds by which this load lengthens a step."""
        rows, positions = self.row * load.rows, self.position * load.positions
        return rows + positions + self.context * load.context + self.chunk * load.chunks


@dataclass(slots=True)
class _Window:
    """The last steps of a kind: their features, each with 1 before the load, and their seconds."""

    features: _Floats
    seconds: _Floats
    n: int = 0

    @classmethod
    def of(cls, size: int) -> _Window:
        return cls(np.zeros((size, len(_SCALES))), np.zeros(size))

    def add(self, load: StepLoad, seconds: float) -> None:
        at = self.n % len(self.seconds)
        self.features[at] = (1.0, *load)
        self.seconds[at] = seconds
        self.n += 1


@dataclass(slots=True)
class StepTimes:
    """Estimates the costs from the last steps by least absolute deviations. No cost is below 0. `widest`: the most
    positions of a step so far.

    Step times have a long tail: another process has the processor, the garbage collector runs. A mean follows that
    tail, and least squares are means. Least absolute deviations are medians: half the steps of a load take longer
    than estimated, and how much longer does not matter. They are found as least squares in which a step weighs the
    less the further it is from the estimate before (Schlossmacher, An iterative technique for absolute deviations
    curve fitting, 1973): one iteration a fit. What the steps leave open stays as it was, for the costs before have
    a small weight, too.

    The few steps without the lowest class have a window of their own, or the others would displace them."""

    costs: Costs = field(default_factory=Costs)
    widest: int = 0
    _alone: _Window = field(default_factory=lambda: _Window.of(ALONE))
    _shared: _Window = field(default_factory=lambda: _Window.of(SHARED))

    def seconds(self, load: StepLoad) -> float:
        return self.costs.step + self.costs.more(load)

    def observe(self, load: StepLoad, seconds: float, *, alone: bool = False) -> None:
        (self._alone if alone else self._shared).add(load, seconds)
        self.widest = max(self.widest, load.positions)
        observed = self._alone.n + self._shared.n
        if observed < 2 * FITTED or observed % FITTED == 0:
            self.costs = self._fitted()

    def _fitted(self) -> Costs:
        windows = self._alone, self._shared
        features = np.concatenate([one.features[: one.n] for one in windows]) / _SCALES
        seconds = np.concatenate([one.seconds[: one.n] for one in windows])
        before = np.array(self.costs) * _SCALES
        errors, median = np.abs(seconds - features @ before), np.sort(seconds)[len(seconds) // 2]
        before[-1] *= FADED
        weights = median / np.maximum(errors, EXACT * median)
        weights[: min(self._alone.n, ALONE)] *= HEAVY
        found = _least_squares(features, seconds, weights, before)
        return Costs(*(found / _SCALES).tolist())


def _least_squares(features: _Floats, seconds: _Floats, weights: _Floats, before: _Floats) -> _Floats:
    """Costs of at least 0 with which the weighted squares of the errors are least. `before` has a small weight."""
    weighted = features.T * weights
    products, sums = weighted @ features, weighted @ seconds
    products += KEPT * np.eye(len(before))
    sums += KEPT * before
    found, kept = np.zeros(len(before)), np.arange(len(before))
    while kept.size:
        found[:] = 0.0
        found[kept] = np.linalg.solve(products[np.ix_(kept, kept)], sums[kept])
        if (found >= 0).all():
            break
        kept = kept[found[kept] > 0]
    return np.maximum(found, 0.0)


class StepBudget:
    """What the lowest class may do in the next step. `factor`: None without a budget.

    `lowest`: the priority that this plan limits; None if no more urgent sequence decodes. `held_back`: how many
    sequences of that priority could decode in this step, and wait."""

    def __init__(self, factor: float | None, positions_per_row: int) -> None:
        self.factor = factor
        self.times = StepTimes()
        self.lowest: int | None = None
        self.held_back = 0
        self._positions_per_row = positions_per_row
        self._turn = self._shared_turn = 0
        self._room_s = math.inf
        self._room_positions = math.inf
        self._completed_s = 0.0
        self._launched_alone = self._completed_alone = False

    def limits(self, seq: ScheduledSequence) -> bool:
        return self.lowest is not None and seq.rank[0] >= self.lowest

    @property
    def exempt(self) -> bool:
        """Whether the next step has no limit."""
        return self._room_s == math.inf

    # ------------------------------------------------------------ plan

    def choose(
        self, able: list[ScheduledSequence], running: Iterable[ScheduledSequence], worst: int | None
    ) -> list[ScheduledSequence]:
        """The subset of `able` that may decode in the next step. `able` can decode now, `worst` is the worst
        priority of all sequences."""
        self.lowest, self.held_back, self._room_s, self._room_positions = None, 0, math.inf, math.inf
        if self.factor is None or worst is None:
            return able
        urgent = [seq for seq in able if seq.rank[0] < worst]
        if not urgent and not any(seq.rank[0] < worst and not seq.is_idle for seq in running):
            return able
        self.lowest = worst
        self._open(urgent)
        chosen = set(urgent)
        for seq in sorted((seq for seq in able if seq.rank[0] >= worst), key=lambda seq: seq.rank):
            if not self._take(self._decodes([seq])):
                break
            chosen.add(seq)
        self.held_back = len(able) - len(chosen)
        return [seq for seq in able if seq in chosen]

    def _open(self, urgent: Sequence[ScheduledSequence]) -> None:
        """Decide the room beside these decodes. Without any, the more urgent sequences wait for a step in flight,
        and no step may come before theirs."""
        if urgent and self._turn - self._shared_turn >= EXEMPT:
            return
        self._room_s = self._room_positions = 0
        if urgent and self._turn >= FIRST and self._turn % PROBED >= PROBES:
            assert self.factor is not None
            alone = self._decodes(urgent)
            self._room_s = (self.factor - 1) * self.times.seconds(alone)
            # An estimate says little about steps much wider than those measured.
            self._room_positions = 2 * self.times.widest + 1 - alone.positions

    def _decodes(self, sequences: Sequence[ScheduledSequence]) -> StepLoad:
        """The load of a decode, or of a verification with as many drafts as there may be."""
        n = len(sequences)
        return StepLoad(n, n * self._positions_per_row, sum([seq.scheduled_position for seq in sequences]))

    def _take(self, load: StepLoad) -> bool:
        """Take the room that the load needs, if there is enough."""
        seconds = self.times.costs.more(load)
        if self._room_s <= 0 or seconds > self._room_s or load.positions > self._room_positions:
            return False
        self._room_s -= seconds
        self._room_positions -= load.positions
        return True

    def chunk(self, seq: ScheduledSequence, most: int) -> int:
        """How many positions of the sequence's prompt the next step may compute. `most`: without a budget."""
        if not self.limits(seq) or self.exempt:
            return most
        costs = self.times.costs
        left = self._room_s - costs.more(StepLoad(1, 0, seq.scheduled_position, chunks=1))
        if left <= 0:
            return 0
        room = self._room_positions if costs.position == 0 else min(self._room_positions, left / costs.position)
        return max(0, min(most, int(room)))

    def take_chunk(self, seq: ScheduledSequence, positions: int) -> None:
        if self.limits(seq):
            self._take(StepLoad(1, positions, seq.scheduled_position, chunks=1))

    # ------------------------------------------------------------ launch and commit

    def _is_limited(self, plan: StepPlan) -> bool:
        """Whether more urgent sequences than those of the lowest class decode in it."""
        lowest = self.lowest
        return lowest is not None and any(seq.rank[0] < lowest for seq in plan.sequences[: plan.n_decodes])

    def _shares(self, plan: StepPlan) -> bool:
        """Whether it computes something of the lowest class."""
        return any(self.limits(seq) for seq in plan.members)

    def on_launch(self, plan: StepPlan) -> None:
        if self.lowest is None:
            self._launched_alone = False
            return
        limited, shared = self._is_limited(plan), self._shares(plan)
        self._turn += limited
        self._launched_alone = limited and not shared
        if shared:
            self._shared_turn = self._turn

    def on_commit(self, payload: StepPayload, now: float) -> None:
        """Measure the step: it began when it was launched or when the step before it was completed."""
        if self.factor is None:
            return
        limited = self._is_limited(payload.plan)
        alone = limited and not self._shares(payload.plan)
        undisturbed = self._completed_alone and self._launched_alone
        if undisturbed if alone else limited:
            seconds = now - max(payload.launched_s, self._completed_s)
            self.times.observe(StepLoad.of(payload), seconds, alone=alone)
        self._completed_s, self._completed_alone = now, alone

"""The head that drafts, and what steps leave to it.

    step        t    t + 1    t + 2    t + 3
    left        a    b        c        d        what the layers have made of each row's input, the token behind
    the head    .    .        .        abcd     one run for four steps

What a decode leaves is *kept* while nothing is drafted behind it: one run for several steps costs little more than
one for each. The head catches up before a step that is no decode of the same rows, before drafts, and before keys
and values are copied. So its own have no holes where others see them, and it writes to no page that has become
another row's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.gpu_worker.runtime.interface import Int64Array
from petiole.gpu_worker.runtime.step.inputs import StepInputs

KEPT = 32
"""From so many kept inputs on, the head runs. More would cost hardly less, and delay the step in which it runs."""

_NOTHING = np.empty(0, np.int64)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Places:
    """Where inputs of the head stand: rows and positions, [n]. rotary: [n] or [axes, n]; None: the positions."""

    rows: Int64Array
    positions: Int64Array
    rotary: Int64Array | None = None

    def __getitem__(self, which: Int64Array) -> Places:
        """which: [m]."""
        rotary = None if self.rotary is None else self.rotary[..., which]
        return Places(self.rows[which], self.positions[which], rotary)

    @property
    def next(self) -> Places:
        return Places(self.rows, self.positions + 1, None if self.rotary is None else self.rotary + 1)


class Draft(Protocol):
    def __call__(
        self, known: Floats, token_ids: Int64Array, places: Places, at: Int64Array, *, chained: bool
    ) -> tuple[Tensor, Floats]:
        """Run the head once. known: [n, hidden], what the layers have made of each place, or the head's own one
        (chained), before its norm. token_ids: [n], the token behind each. The places of a row are neighbours, and
        their positions ascend. at: [m], ascending, the places whose results are wanted. Returns their logits,
        float32 [m, vocab], and what the head's layer makes of them, [m, hidden]."""
        ...


class Left(NamedTuple):
    """What a step leaves to the head. known: [n, hidden]; following: [n], the tokens behind."""

    known: Floats
    following: Int64Array
    places: Places


class Head:
    """The head of one executor. All methods run in stream order."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self._kept: list[Left] = []

    def begin(self, inputs: StepInputs) -> None:
        """Catch up, unless the step adds to what is kept. Called before the device knows the step's pages."""
        if self._kept and not (_decodes(inputs) and np.array_equal(inputs.rows, self._kept[0].places.rows)):
            self.catch_up()

    def behind(self, inputs: StepInputs, known: Floats) -> StepHead:
        """known: what the layers have made of the step's inputs, [T, hidden]."""
        places = Places(inputs.rows, inputs.positions, inputs.rotary)
        return StepHead(self, known, places, may_wait=_decodes(inputs))

    def keep(self, left: Left) -> bool:
        """Whether there is room for more."""
        self._kept.append(left)
        return len(self._kept) * len(left.following) < KEPT

    def catch_up(self) -> None:
        if self._kept:
            self.run(_NOTHING)

    def run(self, at: Int64Array) -> tuple[Tensor, Floats]:
        """Run over all that is kept. at: the inputs of the last step whose results are wanted. See `Draft`."""
        kept, self._kept = self._kept, []
        n = len(kept)
        return self.draft(*(kept[0] if n == 1 else _together(kept)), at * n + n - 1, chained=False)


class StepHead:
    """Implements `DraftingHead`. known, places: of the step's inputs. may_wait: whether these may be kept."""

    def __init__(self, head: Head, known: Floats, places: Places, *, may_wait: bool) -> None:
        self._head, self._known, self._places, self._may_wait = head, known, places, may_wait

    def first(self, following: Int64Array, at: Int64Array) -> Tensor:
        has_room = self._head.keep(Left(self._known, following, self._places))
        if has_room and self._may_wait and not len(at):
            return torch.empty(0)
        logits, self._known = self._head.run(at)
        self._places = self._places[at].next
        return logits

    def again(self, token_ids: Int64Array, going: Int64Array) -> Tensor:
        places, every = self._places[going], np.arange(len(going))
        logits, self._known = self._head.draft(self._known[going], token_ids, places, every, chained=True)
        self._places = places.next
        return logits


def _decodes(inputs: StepInputs) -> bool:
    return inputs.kind == "decode"


def _together(kept: Sequence[Left]) -> Left:
    """What decodes of the same rows have left, row by row."""
    places = [one.places for one in kept]
    turned = [one.rotary for one in places if one.rotary is not None]
    return Left(
        np.stack([one.known for one in kept], axis=1).reshape(-1, kept[0].known.shape[1]),
        _by_row([one.following for one in kept]),
        Places(
            _by_row([one.rows for one in places]),
            _by_row([one.positions for one in places]),
            _by_row(turned) if turned else None,
        ),
    )


def _by_row(steps: Sequence[Int64Array]) -> Int64Array:
    """[..., n] of each step -> [..., n * steps]."""
    return np.stack(steps, axis=-1).reshape(*steps[0].shape[:-1], -1)

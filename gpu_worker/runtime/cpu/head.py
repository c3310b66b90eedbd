"""The head that drafts, behind one step: it goes over all inputs of the step, and then from draft to draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from petiole.gpu_worker.runtime.interface import Int64Array


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
        self, known: Any, token_ids: Int64Array, places: Places, at: Int64Array, *, chained: bool
    ) -> tuple[Tensor, Any]:
        """Run the head once. known: [n, hidden], an array or tensor: what the layers have made of each place, or
        the head's own one (chained), before its norm. token_ids: [n], the token behind each. at: [m], ascending,
        the places whose results are wanted. Returns their logits, float32 [m, vocab], and what the head's layer
        makes of them, [m, hidden]."""
        ...


class StepHead:
    """Implements `DraftingHead`. known: what the layers make of the step's inputs; places: theirs."""

    def __init__(self, draft: Draft, known: Any, places: Places) -> None:
        self._draft, self._known, self._places = draft, known, places

    def first(self, following: Int64Array, at: Int64Array) -> Tensor:
        logits, self._known = self._draft(self._known, following, self._places, at, chained=False)
        self._places = self._places[at].next
        return logits

    def again(self, token_ids: Int64Array, going: Int64Array) -> Tensor:
        places, every = self._places[going], np.arange(len(going))
        logits, self._known = self._draft(self._known[going], token_ids, places, every, chained=True)
        self._places = places.next
        return logits

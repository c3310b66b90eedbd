"""The head that drafts, behind one step: it goes over all inputs of the step, and then from draft to draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Where inputs of the head stand: rows and positions, int64 [n]. rotary: int64 [n] or [axes, n]; None: the
    positions."""

    rows: Tensor
    positions: Tensor
    rotary: Tensor | None = None

    def __getitem__(self, which: Tensor) -> Places:
        """which: int64 [m]."""
        rotary = None if self.rotary is None else self.rotary[..., which]
        return Places(self.rows[which], self.positions[which], rotary)

    @property
    def next(self) -> Places:
        return Places(self.rows, self.positions + 1, None if self.rotary is None else self.rotary + 1)


class Draft(Protocol):
    def __call__(
        self, known: Tensor, token_ids: Tensor, places: Places, at: Tensor, *, chained: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the head once. known: [n, hidden], what the layers have made of each place, or the head's own one
        (chained), before its norm. token_ids: int64 [n], the token behind each. at: int64 [m], ascending, the
        places whose results are wanted. Returns their logits, float32 [m, vocab], and what the head's layer makes
        of them, [m, hidden]."""
        ...


class StepHead:
    """Implements `DraftingHead`. known: what the layers make of the step's inputs; places: theirs."""

    def __init__(self, draft: Draft, known: Tensor, places: Places) -> None:
        self._draft, self._known, self._places = draft, known, places

    def first(self, following: Tensor, at: Tensor) -> Tensor:
        logits, self._known = self._draft(self._known, following, self._places, at, chained=False)
        self._places = self._places[at].next
        return logits

    def again(self, token_ids: Tensor, going: Tensor) -> Tensor:
        places = self._places[going]
        logits, self._known = self._draft(
            self._known[going], token_ids, places, torch.arange(len(going)), chained=True
        )
        self._places = places.next
        return logits

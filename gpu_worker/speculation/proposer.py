"""What the scheduler asks of a source of drafts, and what it counts.

A `Proposer` is one for an engine, a `Drafter` one for a sequence. The scheduler tells the drafter every committed
token and asks for drafts when it plans a step for a sequence with nothing outstanding. A draft model or an MTP
head fits the same two methods: `extend` feeds it, `propose` returns what it has ready.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

_LOG_EVERY = 1000


class Drafter(Protocol):
    """The drafts of one sequence. A host-side exception fails that request alone."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Tokens that have been committed since the last call."""

    def propose(self, count: int) -> Sequence[int]:
        """At most `count` guesses at the next tokens; none when there is nothing to go by. Changes nothing: it may
        be asked again before the next `extend`."""


class Proposer(Protocol):
    def drafter(self, tokens: Sequence[int]) -> Drafter:
        """A drafter for a sequence that begins with `tokens`. Called on a preparation thread."""


@dataclass(slots=True)
class SpeculationStats:
    """How many drafts held."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def record(self, drafted: int, accepted: int) -> None:
        """One verified sequence. Logs every 1,000 drafts."""
        before = self.drafted // _LOG_EVERY
        self.drafted += drafted
        self.accepted += accepted
        if self.drafted // _LOG_EVERY > before:
            logger.info(
                "speculation: %d drafts, %d accepted, rate %.2f%%",
                self.drafted,
                self.accepted,
                100 * self.acceptance_rate,
            )

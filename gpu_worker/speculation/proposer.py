"""The interface of draft sources, and the acceptance statistics.

An engine has one `Proposer`, each sequence one `Drafter`. The scheduler passes every committed token to the
drafter and requests drafts when it plans a step for an idle sequence. A draft model or an MTP head can implement
the same two methods: `extend` feeds it, `propose` returns the drafts that are ready.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

_LOG_EVERY = 1000


class Drafter(Protocol):
    """The draft source of one sequence. An exception fails only that request."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Append the tokens committed since the last call."""

    def propose(self, count: int) -> Sequence[int]:
        """At most `count` drafts for the next tokens; may be empty. Changes nothing: it may be called again before
        the next `extend`."""


class Proposer(Protocol):
    def drafter(self, tokens: Sequence[int]) -> Drafter:
        """A drafter for a sequence that begins with `tokens`. Called on a preparation thread."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of drafted and accepted tokens."""

    drafted: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    def record(self, drafted: int, accepted: int) -> None:
        """Count the drafts of one verified sequence. Logs every 1,000 drafts."""
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

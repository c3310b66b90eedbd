"""Sequences that remember their last transitions: a failed invariant, a fatal error (with `debug`) and a trace
show them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any

from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.sequence import SchedulableSequence

LENGTH = 64
TRANSITIONS = (
    "match_and_add_prefix",
    "release",
    "schedule_prefill",
    "schedule_decode",
    "schedule_speculative",
    "revert_schedule",
    "apply_prefill",
    "apply_decode",
    "apply_speculative",
    "discard",
)


class Remembering(SchedulableSequence):
    """`history`: the last `LENGTH` transitions, oldest first. Each shows the committed position after it, and
    how many more positions are scheduled."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.history = deque[str](maxlen=LENGTH)
        super().__init__(*args, **options)


def _remembered(name: str) -> Callable[..., Any]:
    @wraps(getattr(SchedulableSequence, name))
    def transition(self: Remembering, *args: Any, **options: Any) -> Any:
        result = getattr(super(Remembering, self), name)(*args, **options)
        ahead = self.scheduled_position - self.kv_position
        self.history.append(f"{name}@{self.kv_position}+{ahead}")
        return result

    return transition


for _name in TRANSITIONS:
    setattr(Remembering, _name, _remembered(_name))


class RememberingSequence(Remembering, ScheduledSequence):
    """A sequence of the engine's that remembers."""


def history_of(sequence: SchedulableSequence) -> str:
    """Empty unless the sequence remembers."""
    return " ".join(sequence.history) if isinstance(sequence, Remembering) else ""

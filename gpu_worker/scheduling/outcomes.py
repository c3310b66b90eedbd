"""The types used by `SchedulableSequence`: errors, states and operations."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ScheduleError(RuntimeError):
    """An operation that must not be scheduled in this state. The state is unchanged."""


class NotIdle(ScheduleError):  # noqa: N818
    """The maximum number of operations is outstanding, or an exclusive one is."""


class PrefillNotComplete(ScheduleError):  # noqa: N818
    """Decode scheduled before the prefill has reached its target."""


class PrefillComplete(ScheduleError):  # noqa: N818
    """Prefill scheduled with no positions left to prefill."""


class PrefillOverrun(ScheduleError):  # noqa: N818
    """A chunk beyond the prefill's target."""


class AllocationFailed(ScheduleError):  # noqa: N818
    """No pages for the positions that the operation would append."""


class GenerationComplete(ScheduleError):  # noqa: N818
    """Committed and outstanding tokens use up the budget."""


class WrongDanglingCount(ScheduleError):  # noqa: N818
    """Decode needs exactly one token without KV."""


class ApplyError(RuntimeError):
    """An outcome that does not fit the oldest outstanding operation. The state is unchanged."""


class WrongState(ApplyError):  # noqa: N818
    """The oldest outstanding operation is of another kind, or there is none."""


class TokenOnNonFinalChunk(ApplyError):  # noqa: N818
    """A token from a chunk that yields none."""


class MissingTokenOnFinalChunk(ApplyError):  # noqa: N818
    """No token from the chunk that yields the first one."""


class AcceptedExceedsScheduled(ApplyError):  # noqa: N818
    """More tokens accepted than were scheduled, or none."""


class SequenceState(StrEnum):
    """The kind of the newest outstanding operation."""

    IDLE = "idle"
    PREFILL_SCHEDULED = "prefill_scheduled"
    DECODE_SCHEDULED = "decode_scheduled"
    SPECULATIVE_SCHEDULED = "speculative_scheduled"


class Operation(NamedTuple):
    """An outstanding operation: it appends `n_positions` and yields at most `max_yield` tokens."""

    state: SequenceState
    n_positions: int
    max_yield: int

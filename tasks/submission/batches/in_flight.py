"""Which rows are on their way, how many there may be, and which of their tasks are lost. Pure.

The window. Workers take tasks one by one as places become free, so a queue that never runs dry keeps them full.
More than that only fills Redis and this process. So the window is what the workers hold (their places, and as
many taken in advance), and what they finish in `AHEAD_S`. Batches that run beside each other share it: a queue is
served in the order in which tasks were sent, so who has a half of what waits gets a half of the places.

Lost tasks. A Redis that restarts without its data loses messages. Messages of one priority are taken in the order
in which they were sent. So a task that nobody has begun is lost if no message waits, or if a task that was sent
`OVERTAKEN_S` later has ended. It is sent again under its own id: if it is not lost after all, it is still one
task."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from petiole.tasks.submission.batches.progress import Progress
from petiole.tasks.submission.batches.rows.output_lines import TaskOutcome
from petiole.tasks.submission.batches.rows.row_types import RowWork
from petiole.tasks.submission.batches.rows.sources import Row

AHEAD_S = 2.0
FIRST_WINDOW = 64
SMALLEST_WINDOW, LARGEST_WINDOW = 16, 10_000
MOST_BYTES = 32 * 2**20
"""The most bytes of the rows on their way, in this process, and about as many in Redis."""
OVERTAKEN_S = 60.0
DOUBTED_S = 20.0
"""A task that was sent less long ago is not suspected."""
RATE_OVER_S = 10.0


@dataclass
class RowInFlight:
    """A row on its way. `outcomes`: by task id; None: not ended. `again`: it was sent more than once. `place`:
    among the rows as they are sent."""

    row: Row
    work: RowWork
    ids: Sequence[str]
    sent_at: float = 0.0
    again: bool = False
    place: int = 0
    outcomes: dict[str, TaskOutcome] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return len(self.outcomes) == len(self.ids)


class RowRate:
    """Rows a second, over the last `RATE_OVER_S`."""

    def __init__(self, now: float) -> None:
        self.began_at = now
        self._ends: deque[tuple[float, int]] = deque()

    def add(self, now: float, rows: int) -> None:
        self._ends.append((now, rows))

    def at(self, now: float) -> float:
        while self._ends and self._ends[0][0] < now - RATE_OVER_S:
            self._ends.popleft()
        seconds = max(min(now - self.began_at, RATE_OVER_S), 0.5)
        return sum(rows for _, rows in self._ends) / seconds


class FairShare(NamedTuple):
    """With whom a batch shares the workers. `share`: of what these hold, its own. `rows_per_s`: of all others
    together."""

    share: float = 1.0
    rows_per_s: float = 0.0


ALONE = FairShare()


class Sharing:
    """With whom a batch shares: with nobody."""

    def look(self, queue: str, progress: Progress) -> FairShare:
        """With whom it shares now. The others hear of a batch that has rows on their way to this queue."""
        return ALONE

    def leave(self) -> None:
        """The batch has ended, and shares no more."""


def window(places: int | None, rate: float, sharing: FairShare = ALONE) -> int:
    """How many tasks may be on their way. `places`: of the live workers; None: unknown."""
    held = FIRST_WINDOW if places is None else 2 * places
    whole = max(held, (places or 0) + AHEAD_S * (rate + sharing.rows_per_s))
    return min(max(SMALLEST_WINDOW, round(sharing.share * whole)), LARGEST_WINDOW)


class RowsInFlight:
    def __init__(self) -> None:
        self.rows: dict[int, RowInFlight] = {}
        self.of: dict[str, RowInFlight] = {}
        self.size = 0
        self._newest_end = 0.0

    def __len__(self) -> int:
        """Tasks on their way."""
        return len(self.of)

    def takes(self, limit: int) -> bool:
        """Whether another row may be sent."""
        return not self.rows or (len(self) < limit and self.size < MOST_BYTES)

    def add(self, sent: RowInFlight) -> None:
        self.rows[sent.row.number] = sent
        self.of |= dict.fromkeys(sent.ids, sent)
        self.size += sent.row.size

    def ending(self, outcomes: Mapping[str, TaskOutcome]) -> Iterator[tuple[RowInFlight, list[TaskOutcome]]]:
        """The rows that have ended when these tasks have, with the outcomes of all their tasks. Notes nothing."""
        for sent in {self.of[task_id].row.number: self.of[task_id] for task_id in outcomes}.values():
            known = [sent.outcomes.get(task_id) or outcomes.get(task_id) for task_id in sent.ids]
            if len(ended := [outcome for outcome in known if outcome is not None]) == len(sent.ids):
                yield sent, ended

    def end(self, task_id: str, outcome: TaskOutcome) -> RowInFlight | None:
        """Note how a task has ended. The row, if that was its last task."""
        sent = self.of.pop(task_id)
        sent.outcomes[task_id] = outcome
        self._newest_end = max(self._newest_end, sent.sent_at)
        if not sent.ended:
            return None
        del self.rows[sent.row.number]
        self.size -= sent.row.size
        return sent

    def drop(self, sent: RowInFlight) -> None:
        """The row was not sent."""
        del self.rows[sent.row.number]
        self.size -= sent.row.size
        for task_id in sent.ids:
            self.of.pop(task_id, None)
        sent.outcomes.clear()

    def doubtful(self, now: float, queue_is_empty: bool) -> Iterator[str]:
        """The tasks that are lost unless somebody has begun them."""
        for task_id, sent in self.of.items():
            overtaken = sent.sent_at < self._newest_end - OVERTAKEN_S
            if now - sent.sent_at > DOUBTED_S and (queue_is_empty or overtaken):
                yield task_id

    def resent(self, task_ids: Iterable[str], now: float) -> None:
        for task_id in task_ids:
            self.of[task_id].sent_at, self.of[task_id].again = now, True

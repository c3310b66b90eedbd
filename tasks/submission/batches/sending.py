"""A batch's rows on their way: which one is sent next, and what has come of those that were sent.

UnsentRows ─► RowSender ─► tasks ... outcomes ─► RowSender ─► EndedRows
                  ▲  └── not sent: Redis is away ──┐   └── lost ──┐
                  └──────────────────────────────────┴─────────────┘
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.submission.batches.client import AWAY, WRONG, BatchClient
from petiole.tasks.submission.batches.ended_rows import EndedRows
from petiole.tasks.submission.batches.in_flight import RowInFlight, RowsInFlight
from petiole.tasks.submission.batches.progress import Progress
from petiole.tasks.submission.batches.rows import sorting
from petiole.tasks.submission.batches.rows.output_lines import OutputLine, TaskOutcome
from petiole.tasks.submission.batches.rows.row_types import RowType
from petiole.tasks.submission.batches.rows.sorting import Sort
from petiole.tasks.submission.batches.rows.sources import Row, Source

SUSPECT_S = 10.0
SENT_TOGETHER = 16


@dataclass
class UnsentRows:
    """The rows that have not ended, read one by one. `seen`: how many were read, with those that have ended.
    `exhausted`: all were."""

    source: Source
    sort: Sort | None
    form: RowType
    ended: EndedRows
    progress: Progress
    stopping: Event
    seen: int = 0
    exhausted: bool = False
    _rows: Iterator[Row] | None = None
    _next: Row | None = None

    @property
    def empty(self) -> bool:
        """Whether none is left."""
        return self.exhausted and self._next is None

    def peek(self) -> Row | None:
        """The next row, which stays there until it is taken. None: there is none, or the batch stops."""
        if self._next is None:
            self._next = self._read()
        return self._next

    def take(self) -> None:
        self._next = None

    def order(self, source: Source, whole: bool = False) -> Iterator[Row]:
        """The rows in the order in which they are sent, which is the same in each run. `whole`: although the batch
        stops."""
        if self.sort is None:
            return iter(source)
        stopped = (lambda: False) if whole else self.stopping.is_set
        return sorting.in_order(source, self.sort, self.form.beginning, stopped)

    def _read(self) -> Row | None:
        """The next row that has not ended. Rows that cannot be read end the batch: nobody can go on in them."""
        if self._rows is None:
            self._rows = self.order(self.source)
        name = self.source.name
        while True:
            try:
                row = next(self._rows)
            except StopIteration:
                self.exhausted, self.progress.rows = True, self.seen
                return None
            except sorting.Stopped:
                return None
            except AWAY as error:
                raise BatchError(f"{name}: no row can be read after {self.seen}: {error}") from error
            self.seen += 1
            ended = self.ended.digest_of(row.number)
            if not ended:
                return row
            if ended != row.digest:
                raise BatchError(
                    f"{name}: row {row.number} has changed since its result was written: choose another output, "
                    f"or remove {self.ended.name}"
                )


@dataclass
class RowSender:
    """Sends rows, many together, and hands those that have ended to `ended`.

    `submission`: the options of all tasks. `stopping`: nothing more is sent. `retry`: rows that Redis did not
    take. `sent_before`: rows before this one may have been sent by an earlier run. `batch_id`: the ids of tasks
    begin with it. `put_off`: Redis has not taken some of the rows that were sent last.

    Methods raise one of `AWAY` while a server is away. Nothing is lost then: the same call goes on."""

    exchange: BatchClient
    form: RowType
    submission: Mapping[str, Any]
    unsent: UnsentRows
    ended: EndedRows
    progress: Progress
    stopping: Event
    batch_id: str = field(default_factory=lambda: os.urandom(6).hex())
    sent_before: int = 0
    put_off: bool = False
    flight: RowsInFlight = field(default_factory=RowsInFlight)
    retry: deque[RowInFlight] = field(default_factory=deque)
    _suspected_at: float = float("-inf")

    @property
    def idle(self) -> bool:
        """Whether no row is on its way, or waits to be sent again."""
        return not self.flight.rows and not self.retry

    # ------------------------------------------------------------ there

    def send(self, limit: int) -> None:
        """Send until this many tasks are on their way."""
        while self.flight.takes(limit) and not self.stopping.is_set():
            group = self._group(limit)
            if not group:
                return
            self._know(group)
            self._dispatch([sent for sent in group if sent.row.number in self.flight.rows])
            if self.retry:
                return

    def _group(self, limit: int) -> list[RowInFlight]:
        """The next rows to send, which are on their way from now on. A row that becomes no task ends at once."""
        group: list[RowInFlight] = []
        refused: list[tuple[Row, OutputLine]] = []
        try:
            while max(len(group), len(refused)) < SENT_TOGETHER and self.flight.takes(limit):
                if self.retry:
                    sent = self.retry.popleft()
                elif (row := self.unsent.peek()) is not None:
                    try:
                        sent = self.sendable(row, self.unsent.seen - 1)
                    except WRONG as error:
                        if isinstance(error, AWAY):
                            raise
                        refused.append((row, self.form.refusal(row, error)))
                        self.unsent.take()
                        continue
                    self.unsent.take()
                else:
                    break
                self.flight.add(sent)
                group.append(sent)
        except AWAY:
            if not group:
                raise
        finally:
            self.ended.end(refused)
        return group

    def sendable(self, row: Row, place: int) -> RowInFlight:
        """The row's tasks, with the options of all submissions of this batch. `place`: among the rows as they are
        sent. Raises `InvalidRequest`."""
        work = self.form.work(row)
        for call in work.calls:
            self.exchange.task(call.task)
        calls = [call._replace(options={**call.options, **self.submission}) for call in work.calls]
        self.exchange.goes_to(calls[-1].options.get("queue"))
        name = f"b-{self.batch_id}-{self.ended.round}-{row.number}-{row.digest:016x}"
        ids = [name] if len(calls) == 1 else [f"{name}-{k}" for k in range(len(calls))]
        return RowInFlight(row, work._replace(calls=calls), ids, again=place < self.sent_before, place=place)

    def _know(self, group: list[RowInFlight]) -> None:
        """End those rows that an earlier run has sent, and that have ended meanwhile."""
        ids = [task_id for sent in group if sent.again for task_id in sent.ids if task_id in self.flight.of]
        if ids:
            self._arrive(self.exchange.outcomes(ids))

    def _dispatch(self, group: list[RowInFlight]) -> None:
        if not group:
            return
        self.ended.sent(1 + max(sent.place for sent in group))
        refused: list[tuple[Row, OutputLine]] = []
        for sent in group:
            sent.sent_at = time.monotonic()
        try:
            for sent, error in self.exchange.send(group):
                if error is None:
                    continue
                self.flight.drop(sent)
                if isinstance(error, WRONG) and not isinstance(error, AWAY):
                    self._check_ours(error)
                    refused.append((sent.row, self.form.refusal(sent.row, error)))
                else:
                    self.progress.note = f"waiting: {error}"
                    sent.again = True
                    self.retry.append(sent)
                    self.put_off = True
        finally:
            self.ended.end(refused)

    def _check_ours(self, error: Exception) -> None:
        """Raises an error that every row would have: that of an option of the batch."""
        if isinstance(error, InvalidRequest) and error.field.partition(".")[0] in self.submission:
            raise error

    # ------------------------------------------------------------ back

    def collect(self) -> None:
        """End the rows that have ended."""
        if ids := list(self.flight.of):
            self._arrive(self.exchange.outcomes(ids))

    def _arrive(self, outcomes: Mapping[str, TaskOutcome]) -> None:
        ending = list(self.flight.ending(outcomes))
        lines = [(sent.row, self._line(sent, inputs)) for sent, inputs in ending]
        for task_id, outcome in outcomes.items():
            self.flight.end(task_id, outcome)
        self.ended.end(lines)
        self.ended.have_results(ending)

    def _line(self, sent: RowInFlight, inputs: list[TaskOutcome]) -> OutputLine:
        """Results that the form cannot show are the row's error: a later try would find the same ones."""
        try:
            return sent.work.line(inputs)
        except WRONG as error:
            return self.form.refusal(sent.row, error)

    def suspect(self, now: float) -> None:
        """Send again what is lost."""
        if now - self._suspected_at < SUSPECT_S or self.retry:
            return
        self._suspected_at = now
        doubtful = list(self.flight.doubtful(now, queue_is_empty=True))
        if not doubtful:
            return
        if self.exchange.waiting():
            doubtful = list(self.flight.doubtful(now, queue_is_empty=False))
        begun = self.exchange.begun(doubtful)
        ended = self.exchange.outcomes(doubtful).keys()
        lost = [task_id for task_id in doubtful if task_id not in begun and task_id not in ended]
        self.flight.resent(lost, now)
        rows = {sent.row.number: sent for sent in map(self.flight.of.__getitem__, lost)}
        self._dispatch(list(rows.values()))

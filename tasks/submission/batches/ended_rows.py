"""The rows of a batch that have ended: their lines, and their results in Redis until the lines are on disk.

    a row ends ─► its line is in the journal ─► sync ─► its results are forgotten in Redis
                  └► the caller sees it                                   ... all rows ─► the output

Without an output there is no journal: the caller alone sees the lines."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from petiole.tasks.errors import BatchError
from petiole.tasks.submission.batches.client import BatchClient
from petiole.tasks.submission.batches.files import storage
from petiole.tasks.submission.batches.in_flight import RowInFlight
from petiole.tasks.submission.batches.journal import Journal, JournalEntry, OutputFiles, total_digest
from petiole.tasks.submission.batches.progress import FirstRows, Progress
from petiole.tasks.submission.batches.rows.output_lines import OutputLine, RowResult, TaskOutcome
from petiole.tasks.submission.batches.rows.sources import Row, Source

SYNC_S = 1.0


class EndedRows:
    """`first`: how the first rows have ended; None: it does not matter."""

    def __init__(self, exchange: BatchClient, progress: Progress, first: FirstRows | None) -> None:
        self._exchange, self._progress, self.first = exchange, progress, first
        self.journal: Journal | None = None
        self.most_sent = 0
        """Rows before this one may have been sent."""
        self._unforgotten: list[RowInFlight] = []
        self._kept: list[str] = []
        self._results: list[RowResult] = []
        self._synced_at = float("-inf")

    def go_on(self, journal: Journal, again: bool) -> None:
        """From an earlier run's journal. `again`: rows that have failed are sent again."""
        self.journal = journal
        if again and journal.complete is None:
            journal.forget_failures()
        self._progress.before = self._progress.ended = journal.count
        self._progress.failed = journal.failed
        self.most_sent = journal.sent_before
        if journal.count:
            self.first = None

    @property
    def round(self) -> int:
        return 1 if self.journal is None else self.journal.round

    @property
    def name(self) -> str:
        """The journal's."""
        return "" if self.journal is None else self.journal.store.name

    def digest_of(self, row: int) -> int:
        return 0 if self.journal is None else self.journal.digest_of(row)

    def sent(self, most: int) -> None:
        """Note that rows before this one may have been sent."""
        if self.journal is not None and most > self.most_sent:
            self.journal.sent(most)
            self.most_sent = most

    def cancelled(self) -> None:
        """The ids of tasks that were sent are not used again."""
        if self.journal is not None:
            self.journal.note(round=self.journal.round + 1)

    # ------------------------------------------------------------ rows end

    def end(self, rows: Sequence[tuple[Row, OutputLine]]) -> None:
        """Write their lines."""
        if not rows:
            return
        if self.journal is not None:
            self.journal.append(JournalEntry(row.number, row.digest, line.good, line.json) for row, line in rows)
        self._results += [RowResult(row.number, line.good, line.value) for row, line in rows]
        self._progress.ended += len(rows)
        for row, line in rows:
            if self.first is not None:
                self.first.ended(row.number, line.why, "" if line.good else line.failure(row))
            if not line.good:
                self._progress.failed += 1
                self._progress.failure = self._progress.failure or line.failure(row)

    def have_results(self, rows: Iterable[tuple[RowInFlight, list[TaskOutcome]]]) -> None:
        """Rows that have ended have results in Redis."""
        for sent, outcomes in rows:
            self._unforgotten.append(sent)
            for outcome in outcomes:
                self._progress.prompt_tokens += outcome.usage.get("prompt_tokens", 0)
                self._progress.cached_prompt_tokens += outcome.usage.get("cached_prompt_tokens", 0)
                self._progress.completion_tokens += outcome.usage.get("completion_tokens", 0)

    def taken(self) -> list[RowResult]:
        """What the caller has not seen."""
        results, self._results = self._results, []
        return results

    def forget(self, now: float, all: bool = False) -> None:
        """Forget the results of what is on disk. Those of rows that were sent more than once stay to the end: a
        second message must find that its task is completed."""
        sync_s = SYNC_S if self.journal is None else self.journal.store.sync_s
        if not self._unforgotten or (now - self._synced_at < sync_s and not all):
            return
        self.sync()
        self._synced_at = now
        forgotten = [task_id for sent in self._unforgotten if not sent.again for task_id in sent.ids]
        self._kept += [task_id for sent in self._unforgotten if sent.again for task_id in sent.ids]
        self._exchange.forget(forgotten)
        self._unforgotten = []

    def forget_kept(self) -> None:
        self._exchange.forget(self._kept)

    def sync(self) -> None:
        if self.journal is not None:
            self.journal.sync()

    # ------------------------------------------------------------ the output

    def join(self, output: OutputFiles, in_order: bool, source: Source, seen: int) -> None:
        """Make the output of all rows, of which `seen` were read."""
        assert self.journal is not None
        if seen != (count := self.journal.count):
            raise BatchError(f"{source.name} has {seen} rows, and {self.name} has {count} results")
        self.journal.join(output, in_order)
        self.journal.conclude()

    def join_with(self, output: OutputFiles, in_order: bool, refusals: Callable[[], Iterable[OutputLine]]) -> None:
        """Make the output although rows have not ended. `refusals`: their lines."""
        assert self.journal is not None
        self.journal.join(output, in_order, refusals)

    def verify(self, output: OutputFiles, source: Source, complete: Mapping[str, Any]) -> None:
        """The output is there: see whether it is that of these rows."""
        digests = array("Q", (row.digest for row in source))
        found = storage.size(output.location) is not None or output.failures is not None
        if not found or len(digests) != complete["rows"] or total_digest(digests) != complete["digest"]:
            raise BatchError(
                f"{output.location} is of other rows than {source.name}: choose another output, or "
                f"remove it and {self.name}"
            )
        shown = self._progress
        shown.rows = shown.ended = shown.before = complete["rows"]
        shown.failed = complete["failed"]

    def close(self) -> None:
        if self.journal is not None:
            self.journal.close()

    def discard(self) -> None:
        """Leave nothing of a journal of which no row was sent."""
        if self.journal is not None and self.journal.complete is None and not self.most_sent:
            self.journal.discard()

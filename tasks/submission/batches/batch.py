"""The loop of a batch. `petiole.batch` makes it; `petiole batch` runs it.

    read rows ─► send as many as the window takes ─► look for results ─► write lines ─► sync ─► forget results
        ▲                                                                                             │
        └─────────────────────────────────────────────────────────────────────────────────────────────┘

One thread does everything, so at any instant a row is in one place: not read, to be sent, on its way, or in the
journal. While Redis is away, or refuses writes, the loop waits; a full disk ends it. Either way nothing is lost:
what is not in the journal is in Redis, or is sent again."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import redis

from petiole.tasks.app.application import App
from petiole.tasks.errors import BatchError
from petiole.tasks.servers.failover import refusals_are_losses
from petiole.tasks.settings import warn_a_producer
from petiole.tasks.submission.batches.client import AWAY, WRONG, BatchClient
from petiole.tasks.submission.batches.ended_rows import EndedRows
from petiole.tasks.submission.batches.in_flight import ALONE, RowRate, Sharing, window
from petiole.tasks.submission.batches.journal import Journal, OutputFiles
from petiole.tasks.submission.batches.progress import MOST_ALIKE, FirstRows, Progress, Watch, watched
from petiole.tasks.submission.batches.rows.output_lines import OutputLine, RowResult
from petiole.tasks.submission.batches.rows.row_types import RowType
from petiole.tasks.submission.batches.rows.sorting import Sort
from petiole.tasks.submission.batches.rows.sources import Source
from petiole.tasks.submission.batches.segments import FileStore, LineStore
from petiole.tasks.submission.batches.sending import RowSender, UnsentRows

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
AWAY_PAUSE_S = 1.0
LOOK_S = 2.0


class Host:
    """The process that runs a batch. This one is a client's: the journal is a file beside the output."""

    outlived = False
    """Whether the batch goes on without this process."""

    def line_store(self, output: str) -> LineStore:
        """Where the journal's lines are."""
        return FileStore(output)

    def rows(self) -> Source | None:
        """All rows again, of a batch that may end before they do. None: they can be read only once."""
        return None

    def opened(self, ended: int) -> None:
        """The journal is open, in which so many rows have ended."""

    def joining(self) -> None:
        """The output is about to be made."""


@dataclass
class Batch:
    """Rows on their way through the fleet. Iterating runs it, also with `async for`, and yields results as rows
    end; `run` runs it to its end. `stop` and `cancel` may be called from any thread. Without an output nobody
    finds the rows on their way later: they are cancelled when the caller stops.

    `sort`: in which order rows are sent. `again`: also send rows that have failed. `joined`: the output is made.
    `first`: ends the batch if the first rows say that all of it is a mistake."""

    app: App
    source: Source
    form: RowType
    output: OutputFiles | None = None
    submission: Mapping[str, Any] = field(default_factory=dict)
    in_order: bool = True
    sort: Sort | None = None
    again: bool = False
    progress: Progress = field(default_factory=Progress)
    host: Host = field(default_factory=Host)
    sharing: Sharing = field(default_factory=Sharing)
    first: FirstRows | None = None

    def __post_init__(self) -> None:
        self.exchange = BatchClient(self.app, self.submission.get("queue"), self.submission.get("model"))
        self.submission = {"priority": self.exchange.lowest_priority, **self.submission}
        self.joined = False
        self._stopping = threading.Event()
        self._ended = EndedRows(self.exchange, self.progress, self.first)
        self._unsent = UnsentRows(self.source, self.sort, self.form, self._ended, self.progress, self._stopping)
        self._sender = RowSender(
            self.exchange, self.form, self.submission, self._unsent, self._ended, self.progress, self._stopping
        )
        self._cancelling = False
        self._unended: Exception | None = None
        self._places: int | None = None
        self._shared = ALONE

    # ------------------------------------------------------------ for callers

    def run(self, watch: Watch | None = None) -> Progress:
        """Run to the end, or until somebody stops it. `watch` is called a few times a second; without it a
        notebook shows a bar, and elsewhere the log says why nothing goes on. Raises `BatchError`, and
        `InvalidRequest` for an option of the whole batch; a fault of the code as it is."""
        for _ in self._run(watch):
            pass
        return self.progress

    def __iter__(self) -> Iterator[RowResult]:
        return self._run(None)

    async def __aiter__(self) -> AsyncIterator[RowResult]:
        """The loop runs in a thread of its own, so that the event loop goes on, and ends when the caller stops."""
        rows, running = self._run(None), asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "petiole-batch")
        try:
            while (result := await running.run_in_executor(thread, next, rows, None)) is not None:
                yield result
        finally:
            self.stop()
            ended = running.run_in_executor(thread, rows.close)
            thread.shutdown(wait=False)
            await asyncio.shield(ended)

    def stop(self) -> None:
        """Send nothing more, write what has come, and end. The rows on their way go on in the workers, and the
        same batch finds their results later; without an output they are cancelled."""
        self._stopping.set()

    def cancel(self, error: Exception | None = None) -> None:
        """`stop`, and cancel the rows on their way. `error`: make the output all the same, in which the rows that
        have not ended have this error. It takes a host that has the `rows` again."""
        self._unended = error
        self._cancelling = True
        self._stopping.set()

    @property
    def complete(self) -> bool:
        """Whether every row has ended."""
        return self._unsent.empty and self._sender.idle

    # ------------------------------------------------------------ the loop

    def _run(self, watch: Watch | None) -> Generator[RowResult]:
        with watched(self.source.name, watch) as shown:
            yield from self._turns(shown)

    def _turns(self, watch: Watch) -> Generator[RowResult]:
        warn_a_producer()
        began_at = time.monotonic()
        self._rate = RowRate(began_at)
        self._looked_at = float("-inf")
        self.progress.rows = self.source.total
        try:
            if self.output is not None and self._open(self.output):
                return
            while True:
                now = time.monotonic()
                self._turn(now)
                yield from self._ended.taken()
                self._show(now, now - began_at)
                watch(self.progress)
                self._check_first()
                if self.complete or self._stopping.is_set():
                    break
                self._pause()
            self._finish()
            self._show(now, time.monotonic() - began_at)
            yield from self._ended.taken()
        finally:
            with contextlib.suppress(*AWAY, redis.RedisError):  # it is forgotten soon
                if self.output is None:
                    self._leave()
                self.sharing.leave()
            if not self.host.outlived:
                self._ended.discard()
            self._ended.close()

    def _open(self, output: OutputFiles) -> bool:
        """Go on where the journal of this output ends. True: the output is there."""
        output.check()
        journal = Journal(self.host.line_store(output.location), self._about, self._sender.batch_id)
        self._sender.batch_id = journal.batch
        self._ended.go_on(journal, self.again)
        self.host.opened(journal.count)
        self._sender.sent_before = self._ended.most_sent
        if (complete := journal.complete) is None:
            return False
        self._ended.verify(output, self.source, complete)
        self._unsent.exhausted = self.joined = True
        return True

    @property
    def _about(self) -> dict[str, Any]:
        return {**self.form.about(), **({} if self.sort is None else {"sort": self.sort})}

    def _turn(self, now: float) -> None:
        before, self._sender.put_off = self.progress.ended, False
        try:
            with refusals_are_losses():
                self._look(now)
                self._sender.collect()
                if not self._stopping.is_set():
                    self._sender.send(window(self._places, self._rate.at(now), self._shared))
                self._ended.forget(now)
                self._sender.suspect(now)
            if self._sender.put_off:
                self._stopping.wait(AWAY_PAUSE_S)
        except AWAY as error:
            self.progress.note = f"waiting: {error}"
            self._stopping.wait(AWAY_PAUSE_S)
        self._rate.add(now, self.progress.ended - before)

    def _pause(self) -> None:
        """Wait until about one in twenty of what is on its way has ended. While none has, nobody knows their rate:
        wait a twentieth of the time that has passed."""
        now = time.monotonic()
        rate = self._rate.at(now)
        all_s = len(self._sender.flight) / rate if rate else now - self._rate.began_at
        self._stopping.wait(min(max(0.05 * all_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))

    def _look(self, now: float) -> None:
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self._places, fault = self.exchange.fleet()
        self._shared = self.sharing.look(self.exchange.queue, self.progress)
        self.progress.note = fault or ""

    def _show(self, now: float, seconds: float) -> None:
        shown = self.progress
        shown.on_their_way, shown.seconds = len(self._sender.flight), seconds
        shown.rows_per_s = self._rate.at(now)

    # ------------------------------------------------------------ the end

    def _check_first(self) -> None:
        """Raises `BatchError` if all rows would fail as the first ones have."""
        first = self._ended.first
        if first is None or not first.alike:
            return
        said = f"the first {MOST_ALIKE} rows have failed alike: {first.failure}"
        if self.output is not None:
            with contextlib.suppress(*AWAY):
                self._cancel()
            if self.progress.failed == self.progress.ended:
                self._ended.most_sent = 0  # so there is nothing to go on from
                said += ". Nothing was written"
        raise BatchError(f"{said}. If other rows are better, keep_going=True (--keep-going) runs them")

    def _leave(self) -> None:
        """Nobody finds the rows on their way later."""
        self._cancel()
        self._ended.forget(time.monotonic(), all=True)

    def _finish(self) -> None:
        if self._cancelling and self.output is not None:
            self._cancel()
        try:
            with refusals_are_losses():
                self._ended.forget(time.monotonic(), all=True)
                if self.complete:
                    self._ended.forget_kept()
        except AWAY as error:
            self.progress.note = f"results stay in Redis until they expire: {error}"
        self._ended.sync()
        if self.output is not None and (self.complete or self._unended is not None):
            self._join(self.output)

    def _join(self, output: OutputFiles) -> None:
        """Make the output: of all rows, or with an error for those that have not ended."""
        self.host.joining()
        if self.complete:
            self._ended.join(output, self.in_order, self.source, self._unsent.seen)
        else:
            self._ended.join_with(output, self.in_order, self._refusals)
        self.joined = True

    def _refusals(self) -> Iterator[OutputLine]:
        rows, error = self.host.rows(), self._unended
        assert rows is not None
        assert error is not None
        return (self.form.refusal(row, error) for row in rows if not self._ended.digest_of(row.number))

    def _cancel(self) -> None:
        if ids := {*self._sender.flight.of, *self._sent_by_others()}:
            self.exchange.cancel(sorted(ids))
        self._ended.cancelled()

    def _sent_by_others(self) -> Iterator[str]:
        """The tasks that an earlier run may have sent, and that are not known to have ended."""
        if self.output is None or (rows := self.host.rows()) is None:
            return
        for place, row in enumerate(self._unsent.order(rows, whole=True)):
            if place >= self._sender.sent_before:
                return
            if not self._ended.digest_of(row.number):
                with contextlib.suppress(*WRONG, *AWAY):
                    yield from self._sender.sendable(row, place).ids

"""Which row a runner handles. It says so in memory that its host reads when the runner has died: a line that kills
each runner is known by that, without a note in Redis for each row.

    the form ─ `TrackedRowType` ─► holds a row's number while it handles the row
    the rows ─ `without` ─► rows that were set aside have a fault, so that nothing looks at them"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from petiole.tasks.submission.batches.client import AWAY, WRONG
from petiole.tasks.submission.batches.durable.records import DEATHS_OF_A_ROW
from petiole.tasks.submission.batches.rows.output_lines import OutputLine
from petiole.tasks.submission.batches.rows.row_types import Fault, RowType, RowWork
from petiole.tasks.submission.batches.rows.sources import Row, Source

_NUMBER = struct.Struct("<q")
SET_ASIDE = f"ended {DEATHS_OF_A_ROW} processes that handled it, and is set aside"


def shared() -> int:
    """A file descriptor of memory for a `CurrentRow`, which a child process may inherit."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("petiole-row")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, _NUMBER.size)
    return file


class CurrentRow:
    """The row that is handled. `file`: of `shared`; None: nobody else looks."""

    def __init__(self, file: int | None = None) -> None:
        self._memory = bytearray(_NUMBER.size) if file is None else mmap.mmap(file, _NUMBER.size)

    @property
    def row(self) -> int | None:
        found: int = _NUMBER.unpack_from(self._memory)[0]
        return found - 1 if found else None

    def take(self, row: Row) -> None:
        _NUMBER.pack_into(self._memory, 0, row.number + 1)

    def let_go(self) -> None:
        _NUMBER.pack_into(self._memory, 0, 0)

    @contextmanager
    def holding(self, row: Row) -> Iterator[None]:
        """After an error that nobody expects it still says the row."""
        self.take(row)
        try:
            yield
        except (*AWAY, *WRONG):
            self.let_go()
            raise
        self.let_go()

    def each(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, each held until the next one is asked for."""
        for row in rows:
            self.take(row)
            yield row
            self.let_go()


class TrackedRowType:
    """A form that notes each row while it is handled."""

    def __init__(self, form: RowType, current: CurrentRow) -> None:
        self._form, self._current = form, current

    def about(self) -> dict[str, Any]:
        return self._form.about()

    def work(self, row: Row) -> RowWork:
        with self._current.holding(row):
            work = self._form.work(row)

        def line(outcomes: Any) -> OutputLine:
            with self._current.holding(row):
                return work.line(outcomes)

        return work._replace(line=line)

    def beginning(self, row: Row) -> str:
        with self._current.holding(row):
            return self._form.beginning(row)

    def refusal(self, row: Row, error: Exception) -> OutputLine:
        with self._current.holding(row):
            return self._form.refusal(row, error)

    def faults(self, rows: Iterable[Row]) -> Iterator[Fault]:
        yield from self._form.faults(self._current.each(rows))
        self._current.let_go()

    def told(self, name: str, status: str, at: int) -> None:
        self._form.told(name, status, at)


def without(source: Source, aside: Collection[int]) -> Source:
    """The rows of a source, those that are set aside with a fault."""
    if not aside:
        return source
    rows = (row._replace(fault=SET_ASIDE) if row.number in aside else row for row in source)
    return Source(source.name, rows, source.total, source.format)

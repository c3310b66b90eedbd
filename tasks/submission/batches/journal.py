"""The journal of a batch, beside its output. It alone says which rows have ended, and how.

    {"batch": ID, "round": 1, "about": {...}}            facts; a later line adds to them or replaces some
    ROW <tab> DIGEST <tab> + or - <tab> the row's line   in the order in which rows end; -: it has failed

Lines are appended, and never changed; a store (`segments`) has them. `join` makes the output of the lines: in the
order of the rows, or as they ended. The output appears whole, or not at all. What is left of the journal
then is one line of facts, with the number and the digest of all rows. So a later run sees whether its rows are
those of the output."""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

from petiole.tasks.errors import BatchError
from petiole.tasks.submission.batches.files import storage
from petiole.tasks.submission.batches.rows import output_files
from petiole.tasks.submission.batches.rows.output_lines import OutputLine
from petiole.tasks.submission.batches.segments import LineStore

_FLAGS, _GOOD, _ENDED = 2, 2, 1
"""Beside the place of a line."""


class JournalEntry(NamedTuple):
    """How a row has ended. `line`: JSON, without a line feed."""

    row: int
    digest: int
    good: bool
    line: bytes


class OutputFiles(NamedTuple):
    """Where a batch's lines go, in the formats that the names say. `failures`: where those of rows go that have
    failed; None: to the others. With it, a file without lines does not appear."""

    location: str
    failures: str | None = None

    def check(self) -> None:
        """Raises `InvalidRequest` if a file cannot be written in its format, and `BatchError` if its folder is not
        there: before the first row."""
        for location, _ in self.files:
            output_files.check(location)

    @property
    def files(self) -> list[tuple[str, tuple[bool, ...]]]:
        """Each location, with the goodness of its lines."""
        if self.failures is None:
            return [(self.location, (True, False))]
        return [(self.location, (True,)), (self.failures, (False,))]


class Journal:
    """`ended`: by row, its digest; 0: it has not ended. `failed`: how many of them have failed. All methods raise
    `BatchError` if a file cannot be read or written, because the disk is full, say."""

    def __init__(self, store: LineStore, about: Mapping[str, Any], new_id: str) -> None:
        """Go on with the journal of this store, or begin it. `about`: what the batch does with its rows; a journal
        that says otherwise is another batch's."""
        self.store = store
        self.ended = array("Q")
        self.failed = 0
        self.facts: dict[str, Any] = {}
        try:
            self._read()
            if not self.facts:
                self.note(batch=new_id, round=1, about=dict(about))
            elif self.facts.get("about") != about:
                raise BatchError(f"{store.name} is of another batch: {_differences(self.facts['about'], about)}")
        except BaseException:
            store.close()
            raise

    def _read(self) -> None:
        failed: set[int] = set()
        for _, raw in self.store.lines():
            if raw.startswith(b"{"):
                self.facts |= (new := json.loads(raw))
                if "again" in new:
                    self._forget(failed)
                continue
            number, digest, good, _ = raw.split(b"\t", 3)
            row = int(number)
            self._set(row, int(digest, 16))
            (failed.discard if good == b"+" else failed.add)(row)
        self.failed = len(failed)

    @property
    def batch(self) -> str:
        return str(self.facts["batch"])

    @property
    def round(self) -> int:
        """Rises when tasks of this batch were cancelled: their ids are not used again."""
        return int(self.facts["round"])

    @property
    def complete(self) -> Mapping[str, Any] | None:
        """The number and the digest of all rows, once the output is there."""
        found: Mapping[str, Any] | None = self.facts.get("complete")
        return found

    @property
    def count(self) -> int:
        """The rows that have ended."""
        return len(self.ended) - self.ended.count(0)

    def digest_of(self, row: int) -> int:
        return self.ended[row] if row < len(self.ended) else 0

    def _set(self, row: int, digest: int) -> None:
        if row >= len(self.ended):
            self.ended.frombytes(bytes(8 * (row + 1 - len(self.ended))))
        self.ended[row] = digest

    @property
    def sent_before(self) -> int:
        """Rows before this one may have been sent by an earlier run."""
        return max(int(self.facts.get("sent", 0)), self.store.sent())

    # ------------------------------------------------------------ writing

    def note(self, **facts: Any) -> None:
        """Add or replace facts. They are on disk when this returns."""
        self.store.write(json.dumps(facts).encode() + b"\n")
        self.store.sync()
        self.facts |= facts

    def sent(self, rows: int) -> None:
        """Note that rows before this one may have been sent."""
        if not self.store.send(rows):
            self.store.write(json.dumps({"sent": rows}).encode() + b"\n")
        self.facts["sent"] = rows

    def append(self, entries: Iterable[JournalEntry]) -> None:
        """Write how rows have ended: all, or nothing."""
        entries = list(entries)
        self.store.write(
            b"".join(b"%d\t%016x\t%b\t%b\n" % (e.row, e.digest, b"+" if e.good else b"-", e.line) for e in entries)
        )
        for entry in entries:
            self._set(entry.row, entry.digest)
            self.failed += not entry.good

    def sync(self) -> None:
        """Wait until all that is written is on disk."""
        self.store.sync()

    def close(self) -> None:
        self.store.close()

    def discard(self) -> None:
        """Leave nothing of a journal that is a file."""
        storage.remove(self.store.name)

    def forget_failures(self) -> None:
        """Rows that have failed have not ended: they are sent again, as new tasks."""
        if not self.failed:
            return
        bad: set[int] = set()
        for entry in self._entries():
            (bad.discard if entry.good else bad.add)(entry.row)
        self.note(round=self.round + 1, again=len(bad))
        self._forget(bad)
        self.failed = 0

    def _forget(self, rows: set[int]) -> None:
        for row in rows:
            self.ended[row] = 0
        rows.clear()

    # ------------------------------------------------------------ the output

    def join(self, output: OutputFiles, in_order: bool, rest: Callable[[], Iterable[OutputLine]] = tuple) -> None:
        """Make the output. It can be tried again. `rest`: lines of rows that have not ended. It appears only if
        the store is still this process's."""
        marks = self._marks()

        def lines(which: tuple[bool, ...]) -> Iterator[bytes]:
            for mark in marks if in_order else sorted(marks):
                if mark and bool(mark & _GOOD) in which:
                    yield self.store.line_at(mark >> _FLAGS)[:-1].split(b"\t", 3)[3]
            yield from (one.json for one in rest() if one.good in which)

        with contextlib.ExitStack() as stack:
            for location, which in output.files:
                if output.failures is None or next(lines(which), None) is not None:
                    file = stack.enter_context(storage.written(location))
                    output_files.write(location, file, partial(lines, which))
            self.store.sync()

    def conclude(self) -> None:
        """The output is there, with all rows. Facts are left of the journal."""
        facts = {**self.facts, "complete": {"rows": len(self.ended), "failed": self.failed, "digest": self.digest}}
        self.store.replace(json.dumps(facts).encode() + b"\n")
        self.facts = facts

    @property
    def digest(self) -> str:
        """The digest of all rows."""
        return total_digest(self.ended)

    def _entries(self) -> Iterator[JournalEntry]:
        for _, raw in self.store.lines():
            if not raw.startswith(b"{"):
                number, digest, good, line = raw[:-1].split(b"\t", 3)
                yield JournalEntry(int(number), int(digest, 16), good == b"+", line)

    def _marks(self) -> array[int]:
        """By row, the place of its last line, and below it its flags; 0: it has not ended."""
        marks = array("Q", bytes(8 * len(self.ended)))
        for place, raw in self.store.lines():
            if not raw.startswith(b"{"):
                number, _, good, _ = raw.split(b"\t", 3)
                marks[int(number)] = place << _FLAGS | (_GOOD if good == b"+" else 0) | _ENDED
        for row, digest in enumerate(self.ended):
            if not digest:
                marks[row] = 0
        return marks


def total_digest(digests: array[int]) -> str:
    return blake2b(digests.tobytes(), digest_size=16).hexdigest()


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    changed = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    return f"{', '.join(changed)} was another. Choose another output, or remove the journal"

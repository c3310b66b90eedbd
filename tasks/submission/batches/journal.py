"""The file beside a batch's output. It alone says which rows have ended, and how.

    {"batch": ID, "round": 1, "about": {...}}            facts; a later line adds to them or replaces some
    ROW <tab> DIGEST <tab> + or - <tab> the row's line   in the order in which rows end; -: it has failed

Lines are appended, and never changed. A process that dies while it writes leaves a torn last line, which the next
one cuts. `join` makes the output of the lines: in the order of the rows, or as they ended. The output appears
whole, or not at all. What is left of the journal then is one line of facts, with the number and the digest of all
rows. So a later run sees whether its rows are those of the output.

One process at a time has a journal."""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple

from petiole.tasks.errors import BatchError

try:
    import fcntl
except ImportError:  # Windows: nobody stops a second process there
    fcntl = None  # type: ignore[assignment]

ENDING = ".journal"


class Entry(NamedTuple):
    """How a row has ended. `line`: JSON, without a line feed."""

    row: int
    digest: int
    good: bool
    line: bytes


class Journal:
    """`ended`: by row, its digest; 0: it has not ended. `failed`: how many of them have failed. All methods raise
    `BatchError` if a file cannot be read or written, because the disk is full, say."""

    def __init__(self, output: Path, about: Mapping[str, Any], new_id: str) -> None:
        """Open the journal of this output, or begin one. `about`: what the batch does with its rows; a journal
        that says otherwise is another batch's."""
        self.output, self.path = output, output.with_name(output.name + ENDING)
        self.ended = array("Q")
        self.failed = 0
        self.facts: dict[str, Any] = {}
        if output.exists() and not self.path.exists():
            raise BatchError(
                f"{output} exists, and {self.path.name} does not: choose another output, or remove this one"
            )
        with _named(self.path):
            self._file: IO[bytes] = self.path.open("a+b")
        try:
            self._lock()
            self._read()
            if not self.facts:
                self.note(batch=new_id, round=1, about=dict(about))
            elif self.facts.get("about") != about:
                raise BatchError(f"{self.path} is of another batch: {_differences(self.facts['about'], about)}")
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BatchError(f"{self.path}: another process is at work on this batch") from None

    def _read(self) -> None:
        """Read all lines, and cut a torn last one."""
        end = 0
        failed: set[int] = set()
        self._file.seek(0)
        for raw in self._file:
            if not raw.endswith(b"\n"):
                break
            end += len(raw)
            if raw.startswith(b"{"):
                self.facts |= (new := json.loads(raw))
                if "again" in new:
                    self._forget(failed)
                continue
            number, digest, good, _ = raw.split(b"\t", 3)
            row = int(number)
            self._set(row, int(digest, 16))
            (failed.discard if good == b"+" else failed.add)(row)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)
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

    # ------------------------------------------------------------ writing

    def note(self, **facts: Any) -> None:
        """Add or replace facts. They are on disk when this returns."""
        self._write(json.dumps(facts).encode() + b"\n")
        self.sync()
        self.facts |= facts

    def sent(self, rows: int) -> None:
        """Note that rows before this one may have been sent."""
        self._write(json.dumps({"sent": rows}).encode() + b"\n")
        self.facts["sent"] = rows

    def append(self, entries: Iterable[Entry]) -> None:
        """Write how rows have ended: all, or nothing."""
        entries = list(entries)
        self._write(
            b"".join(b"%d\t%016x\t%b\t%b\n" % (e.row, e.digest, b"+" if e.good else b"-", e.line) for e in entries)
        )
        for entry in entries:
            self._set(entry.row, entry.digest)
            self.failed += not entry.good

    def _write(self, data: bytes) -> None:
        with _named(self.path):
            end = self._file.seek(0, os.SEEK_END)
            try:
                self._file.write(data)
                self._file.flush()
            except OSError:
                with contextlib.suppress(OSError):
                    self._file.close()  # it tries to write what is left
                os.truncate(self.path, end)
                raise

    def sync(self) -> None:
        """Wait until all that is written is on disk."""
        with _named(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

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

    def join(self, in_order: bool) -> None:
        """Make the output. It can be tried again."""
        made = self.output.with_name(self.output.name + ".joining")
        with _named(self.output):
            try:
                with made.open("wb") as file:
                    for line in self._in_order() if in_order else self._as_ended():
                        file.write(line + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                made.replace(self.output)
            except OSError:
                made.unlink(missing_ok=True)
                raise
        facts = {**self.facts, "complete": {"rows": len(self.ended), "failed": self.failed, "digest": self.digest}}
        with _named(self.path):
            left = self.path.with_name(self.path.name + ".joining")
            left.write_text(json.dumps(facts) + "\n")
            self._file.close()
            left.replace(self.path)
        self.facts = facts

    @property
    def digest(self) -> str:
        """Of all rows."""
        return total_digest(self.ended)

    def _entries(self) -> Iterator[Entry]:
        self._file.seek(0)
        for raw in self._file:
            if not raw.startswith(b"{"):
                number, digest, good, line = raw[:-1].split(b"\t", 3)
                yield Entry(int(number), int(digest, 16), good == b"+", line)

    def _places(self) -> array[int]:
        """By row, where its last line begins."""
        places, at = array("Q", bytes(8 * len(self.ended))), 0
        self._file.seek(0)
        for raw in self._file:
            if not raw.startswith(b"{"):
                places[int(raw[: raw.index(b"\t")])] = at
            at += len(raw)
        return places

    def _in_order(self) -> Iterator[bytes]:
        for place in self._places():
            self._file.seek(place)
            yield self._file.readline()[:-1].split(b"\t", 3)[3]

    def _as_ended(self) -> Iterator[bytes]:
        places, at = self._places(), 0
        self._file.seek(0)
        for raw in self._file:
            if not raw.startswith(b"{"):
                number, _, _, line = raw[:-1].split(b"\t", 3)
                if places[int(number)] == at:
                    yield line
            at += len(raw)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """A context in which an error of the system becomes a `BatchError` about this file."""
    try:
        yield
    except OSError as error:
        raise BatchError(
            f"{path}: {error.strerror or error}. What is written stays; the same batch goes on"
        ) from error


def total_digest(digests: array[int]) -> str:
    return blake2b(digests.tobytes(), digest_size=16).hexdigest()


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    changed = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
    said = [f"{name} was {json.dumps(theirs.get(name))} and is {json.dumps(ours.get(name))}" for name in changed]
    return f"{'; '.join(said)}. Choose another output, or remove the journal"

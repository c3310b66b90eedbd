"""Where the lines of a journal are: in one file, or in pages.

    FileStore  a file beside the output, for a batch whose process stays on one machine. A lock keeps others out
    PageStore  a folder, or a bucket. Each `sync` makes a page, which is never changed. Any machine goes on with a
               new *generation*: its pages stand after those of all earlier ones. So a process that has lost its
               lease, and does not know it yet, can write no page over another one's, nor after it. Pages outlive
               Redis, which counts generations: one that begins there anew stands after the pages all the same

A line has a place, a number that finds it again."""

from __future__ import annotations

import contextlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from petiole.tasks.errors import BatchError
from petiole.tasks.submission.batches.files import storage

try:
    import fcntl
except ImportError:  # Windows: nobody stops a second process there
    fcntl = None  # type: ignore[assignment]

ENDING, PAGES = ".journal", ".pages"
_MARKER = "marker"
_MOST_PAGES = 8
_OFFSET_BITS = 32
_BLOCK = 2**20


class LineStore(Protocol):
    name: str
    """For messages."""
    sync_s: float
    """How long lines may wait for `sync`."""

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Whole lines, with their places, from the first one."""

    def line_at(self, place: int) -> bytes: ...

    def write(self, data: bytes) -> None:
        """Append lines: all, or nothing."""

    def sync(self) -> None:
        """Wait until all that is written is on disk."""

    def sent(self) -> int:
        """Rows before this one may have been sent, if no line says more."""

    def send(self, rows: int) -> bool:
        """Note that rows before this one may have been sent. False: a line must say it."""

    def replace(self, data: bytes) -> None:
        """Puts these lines in the place of all others."""

    def close(self) -> None: ...


class FileStore:
    sync_s = 1.0

    def __init__(self, output: str) -> None:
        self.path = Path(output + ENDING)
        self.name = str(self.path)
        if storage.is_url(output):
            raise BatchError(f"{output} takes --detach: a journal is a file of this machine. Nothing was written")
        if not self.path.parent.is_dir():
            raise BatchError(f"{self.path.parent}: no such folder. Nothing was written")
        if Path(output).exists() and not self.path.exists():
            raise BatchError(
                f"{output} exists, and {self.path.name} does not: choose another output, or remove this one"
            )
        if Path(output + PAGES).exists():
            raise BatchError(f"{output} is of a batch with --detach: use --detach, or choose another output")
        self._synced = False
        with storage.writing(self.name):
            self._file: IO[bytes] = self.path.open("a+b")
        try:
            self._lock()
            self._cut()
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

    def _cut(self) -> None:
        """Cut a torn last line, which a process that died while it wrote has left."""
        end = self._file.seek(0, os.SEEK_END)
        while end:
            begin = max(0, end - _BLOCK)
            self._file.seek(begin)
            if (at := self._file.read(end - begin).rfind(b"\n")) >= 0:
                end = begin + at + 1
                break
            end = begin
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)

    def lines(self) -> Iterator[tuple[int, bytes]]:
        with storage.named(self.name), self.path.open("rb") as file:
            place = 0
            for raw in file:
                yield place, raw
                place += len(raw)

    def line_at(self, place: int) -> bytes:
        self._file.seek(place)
        return self._file.readline()

    def write(self, data: bytes) -> None:
        self._synced = False
        with storage.writing(self.name):
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
        if self._synced:
            return
        with storage.writing(self.name):
            os.fsync(self._file.fileno())
        self._synced = True

    def sent(self) -> int:
        return 0

    def send(self, rows: int) -> bool:
        return False

    def replace(self, data: bytes) -> None:
        with storage.written(self.name) as file:
            file.write(data)
            self._file.close()

    def close(self) -> None:
        self._file.close()


class Cursor(Protocol):
    """What a generation of a `PageStore` keeps elsewhere, because pages are few: how many rows have been sent."""

    generation: int
    sent: int

    def send(self, rows: int) -> None:
        """Note the number. Raises an error if another generation has begun."""

    def check(self) -> None:
        """Raises an error if another generation may have begun."""


class PageStore:
    sync_s = 5.0

    def __init__(self, output: str, cursor: Cursor) -> None:
        self.name = output + PAGES
        self._cursor = cursor
        self._unwritten = bytearray()
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._pages = _pages(self.name)
        if not self._pages and storage.size(output) is not None:
            raise BatchError(
                f"{output} exists, and {self.name} does not: choose another output, or remove this one"
            )
        before = max((int(name.partition("-")[0]) for name in self._pages), default=0)
        self._generation = max(cursor.generation, before + 1)
        self._own, self._token = 0, os.urandom(4).hex()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        for page in range(len(self._pages) + 1):
            offset = 0
            for raw in io.BytesIO(self._page(page)):
                yield page << _OFFSET_BITS | offset, raw
                offset += len(raw)

    def line_at(self, place: int) -> bytes:
        offset = place & (1 << _OFFSET_BITS) - 1
        page = self._page(place >> _OFFSET_BITS)
        return page[offset : page.index(b"\n", offset) + 1]

    def _page(self, number: int) -> bytes:
        """The last one is not written yet."""
        if number == len(self._pages):
            return bytes(self._unwritten)
        if number not in self._kept:
            self._kept[number] = storage.read(storage.joined(self.name, self._pages[number]))
            if len(self._kept) > _MOST_PAGES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        return self._kept[number]

    def write(self, data: bytes) -> None:
        self._unwritten += data

    def sync(self) -> None:
        if self._unwritten:
            self._write_page()
        self._cursor.check()

    def _write_page(self) -> None:
        name = f"{self._generation:08}-{self._own:08}-{self._token}"
        storage.write(storage.joined(self.name, name), bytes(self._unwritten))
        self._own += 1
        self._pages.append(name)
        self._unwritten.clear()

    def sent(self) -> int:
        return self._cursor.sent

    def send(self, rows: int) -> bool:
        self._cursor.send(rows)
        return True

    def replace(self, data: bytes) -> None:
        before = self._pages
        self._pages, self._unwritten = [], bytearray(data)
        self._kept.clear()
        self.sync()
        for name in before:
            storage.remove(storage.joined(self.name, name))

    def close(self) -> None:
        self._unwritten.clear()


def _pages(folder: str) -> list[str]:
    return [name for name in storage.names(folder) if name[:1].isdigit()]


def mark(output: str, token: str) -> None:
    """Leave a file by which others find out whether they see this folder."""
    storage.write(storage.joined(output + PAGES, _MARKER), token.encode())


def unmark(output: str) -> None:
    """Leave nothing, where no page is."""
    if not _pages(output + PAGES):
        storage.remove_folder(output + PAGES)


def sees(output: str, token: str) -> str:
    """Why this process does not see the folder that was marked; empty: it does."""
    location = storage.joined(output + PAGES, _MARKER)
    try:
        with storage.reached(location), storage.opened(location) as file:
            found = file.read(len(token) + 1).decode(errors="replace")
    except BatchError as error:
        return str(error)
    return "" if found == token else f"{output + PAGES}: is another folder here"

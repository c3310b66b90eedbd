"""Rows, read one by one: of a file at a location (`storage`), of a table (`frames`), or of an iterable.

A row of JSONL stays bytes until it is sent, so that the rows that have ended already cost no parsing. Each row has
a digest, by which a later run sees that it reads the same rows."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from hashlib import blake2b
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, cast

from petiole.contract.errors import shorten
from petiole.contract.requests.bounds import MOST_VALUES, too_many_in
from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.submission.batches.files import storage
from petiole.tasks.submission.batches.rows import formats, frames
from petiole.tasks.submission.batches.rows.formats import DELIMITERS
from petiole.tasks.submission.batches.rows.pages import Pages

MAX_ROW_BYTES = 64 * 2**20
A_HEADER_BYTES = 2**9
MOST_OF_METADATA = {"thrift_string_size_limit": 2**24, "thrift_container_size_limit": 2**17}
"""Limits of a Parquet file: bytes of a text, and entries of a list, such as columns of all row groups."""
UTF_8 = "utf-8"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""The first bytes of its files."""
Broken = tuple[type[Exception], ...]
_BROKEN: Broken = (gzip.BadGzipFile, EOFError, zlib.error, csv.Error, UnicodeError)


class Row(NamedTuple):
    """`number`: from 0. `content`: a line of JSON, or what it says. `fault`: why the row cannot be read."""

    number: int
    content: bytes | Mapping[str, Any]
    fault: str = ""

    @property
    def digest(self) -> int:
        """The digest of the content: 64 bits, never 0."""
        content = self.content
        if not isinstance(content, bytes):
            content = json.dumps(content, sort_keys=True, default=str).encode(errors="surrogatepass")
        return int.from_bytes(blake2b(content, digest_size=8).digest()) or 1

    def value(self) -> Mapping[str, Any]:
        """What the row says. Raises `InvalidRequest`, which quotes nothing of it."""
        shown = f"{len(self.content)} {'bytes' if isinstance(self.content, bytes) else 'columns'}"
        if self.fault:
            raise InvalidRequest("row", self.fault, shown)
        if not isinstance(self.content, bytes):
            return self.content
        if values := too_many_in(self.content):
            limit = f"must have at most {MOST_VALUES} lists, objects, commas and colons"
            raise InvalidRequest("row", limit, values)
        try:
            value = json.loads(self.content)
        except UnicodeDecodeError as error:
            raise InvalidRequest("row", "must be UTF-8", f"{shown}, not at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("row", "must be JSON", f"{shown} ({error})") from None
        if not isinstance(value, dict):
            raise InvalidRequest("row", "must be a JSON object", shown)
        return value

    @property
    def size(self) -> int:
        """About how many bytes of memory the content takes."""
        return len(self.content) if isinstance(self.content, bytes) else sys.getsizeof(str(self.content))


class Source:
    """`total`: how many rows there are, if that is known before they are read. `name`: for messages; that of a
    file is its location, and `format` its format. `columns`: those of all rows; None: each row has its own."""

    def __init__(
        self,
        name: str,
        rows: Iterator[Row],
        total: int | None = None,
        format: str = "",
        columns: Sequence[str] | None = None,
    ) -> None:
        self.name, self.total, self.format, self.columns, self._rows = name, total, format, columns, rows

    def __iter__(self) -> Iterator[Row]:
        return self._rows

    def peek(self) -> Row | None:
        """The first row, which stays there."""
        first = next(self._rows, None)
        if first is not None:
            self._rows = chain([first], self._rows)
        return first


def source_of(rows: object, format: str | None = None, encoding: str = UTF_8) -> Source:
    """The rows of a file, given its path (`-`: standard input), of a table, or of an iterable of objects.
    `encoding`: of a file of text. Raises `InvalidRequest`."""
    if isinstance(rows, str | Path):
        return _of_file(str(rows), format, formats.encoding_of(encoding))
    if isinstance(rows, Mapping):
        limit = "must be a file's path, or an iterable of rows. This is a mapping: take one of its values"
        raise InvalidRequest("rows", limit, f"the keys {shorten(list(rows))}")
    if (table := frames.table_of(rows)) is not None:
        numbered = (Row(number, row) for number, row in enumerate(table.rows))
        return Source("rows", numbered, table.total, columns=table.columns)
    if isinstance(rows, bytes) or not isinstance(rows, Iterable) or frames.has_no_length(rows):
        raise InvalidRequest("rows", "must be a file's path, or an iterable of rows", shorten(rows))
    tables = isinstance(rows, Sequence) and len(rows) > 0 and frames.is_table(rows[0])
    total = len(rows) if isinstance(rows, Sized) and not tables else None
    if (names := frames.names_of(rows)) is not None:
        first, rows = _peeked(rows)
        if isinstance(first, str) and first in names:
            limit = "must be an iterable of rows. Iterating this one gives its keys, or its columns"
            raise InvalidRequest("rows", limit, shorten(names))
    return Source("rows", _of_iterable(rows), total)


def _peeked(rows: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """The first one, and all of them."""
    iterator = iter(rows)
    first = list(islice(iterator, 1))
    return (first or [None])[0], chain(first, iterator)


def _of_iterable(rows: Iterable[Any]) -> Iterator[Row]:
    for number, given in enumerate(chain.from_iterable(map(_rows_in, rows))):
        if isinstance(given, InvalidRequest):
            yield Row(number, str(given).encode(), f"{given.field} {given.limit}")
            continue
        try:
            row = frames.plain(given)
            if not isinstance(row, Mapping | str) and frames.has(given, "keys", "__getitem__"):
                row = frames.plain(dict(given))  # what databases give
        except RecursionError:
            yield Row(number, b"", "must be nested less deeply")
            continue
        if isinstance(row, Mapping):
            yield Row(number, {str(name): value for name, value in row.items()})
        elif isinstance(row, str):
            yield Row(number, {"prompt": row})
        else:
            kind = "nothing (None or NaN)" if row is None or frames.is_missing(row) else type(given).__name__
            yield Row(number, repr(given).encode(), f"must be an object with names, or a text, not {kind}")


def _rows_in(given: Any) -> Iterable[Any]:
    """The rows of one of many tables, such as pandas reads with `chunksize`; the error of a table that cannot be
    read. Anything else is a row."""
    try:
        table = None if isinstance(given, dict | str) else frames.table_of(given)
    except InvalidRequest as error:
        return (error,)
    return (given,) if table is None else table.rows


def _of_file(location: str, format: str | None, encoding: str) -> Source:
    kind, zipped = formats.of_input(location, format)
    if kind == "parquet":
        return _of_parquet(location)
    of_disk = location != "-" and not storage.is_url(location) and Path(location).is_file()
    countable = of_disk and not zipped
    if kind in DELIMITERS:
        with _reading(location):
            rows, columns = _of_csv(location, _opened(location, zipped), kind, encoding)
        total = None
        if countable:
            again, _ = _of_csv(location, _opened(location, zipped), kind, encoding)
            total = sum(1 for _ in _read(location, again))
        return Source(location, _read(location, rows), total, kind, columns)
    file = _opened(location, zipped)
    lines = file if encoding == UTF_8 else _TranscodedFile(file, encoding)
    total = _count(location) if countable else None
    return Source(location, _read(location, _of_jsonl(location, lines)), total, kind)


def _read(location: str, rows: Iterator[Row], broken: Broken = _BROKEN) -> Iterator[Row]:
    with _reading(location, broken):
        yield from rows


@contextlib.contextmanager
def _reading(location: str, broken: Broken = _BROKEN) -> Iterator[None]:
    """Raises `StorageError` if the file cannot be read now, and another `BatchError` if it never can: for errors
    that are `broken`."""
    with storage.reached(location):
        try:
            yield
        except broken as error:
            raise BatchError(f"{location}: {error}") from error


def _opened(location: str, zipped: bool) -> IO[bytes]:
    file = storage.opened(location)
    return cast(IO[bytes], gzip.open(file)) if zipped else file


def _count(location: str) -> int:
    """The lines that are not empty, nearly: what a bar shows."""
    with storage.opened(location) as file:
        count, last = 0, b"\n"
        while block := file.read(2**20):
            count, last = count + block.count(b"\n"), block[-1:]
        return count + (last != b"\n")


class Lines(Protocol):
    def readline(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


class _TranscodedFile:
    """Lines of text of any encoding, in UTF-8. Bytes that the encoding has not stay, and are no UTF-8."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self._text = io.TextIOWrapper(file, encoding, errors="surrogateescape", newline="\n")
        self.close = self._text.close

    def readline(self, size: int, /) -> bytes:
        return self._text.readline(size).encode(errors="surrogateescape")


def _of_jsonl(location: str, file: Lines) -> Iterator[Row]:
    number = 0
    with contextlib.closing(file):
        while line := file.readline(MAX_ROW_BYTES + 1):
            if number == 0 and line[:2] in _UTF_16:
                raise InvalidRequest("encoding", f"must be that of {location}", "utf-8, but it begins as UTF-16")
            if len(line) > MAX_ROW_BYTES:
                beginning = line[:1000]
                while line and not line.endswith(b"\n"):
                    line = file.readline(MAX_ROW_BYTES)
                yield Row(number, beginning, f"must have at most {MAX_ROW_BYTES} bytes")
            elif content := line.strip():
                yield Row(number, content.removeprefix(b"\xef\xbb\xbf") if number == 0 else content)
            else:
                continue
            number += 1


def _of_csv(location: str, file: IO[bytes], kind: str, encoding: str) -> tuple[Iterator[Row], Sequence[str]]:
    """The rows, and the names of the columns."""
    csv.field_size_limit(MAX_ROW_BYTES)
    codec = "utf-8-sig" if encoding == UTF_8 else encoding
    text = io.TextIOWrapper(file, codec, errors="surrogateescape", newline="")
    lines = _Lines(text)
    reader = csv.DictReader(lines, delimiter=DELIMITERS[kind], restkey="", restval=None)
    names = reader.fieldnames or []
    if not _is_whole("".join(names)):
        raise InvalidRequest("encoding", f"must be that of {location}", f"{encoding}, but its first line is not")
    if len({*names}) < len(names):
        twice = len(names) - len({*names})
        raise InvalidRequest(
            "columns", f"must have names of their own in {location}", f"{twice} that are repeated"
        )
    return _of_reader(lines, reader, names, encoding), names


def _of_reader(lines: _Lines, reader: csv.DictReader[str], names: Sequence[str], encoding: str) -> Iterator[Row]:
    with lines.text:
        for number, row in enumerate(reader):
            lines.taken = 0
            fault = ""
            if "" in row and "" not in names:
                fault = f"must have at most {len(names)} columns"
            elif any(value is None for value in row.values()):
                fault = f"must have {len(names)} columns"
            elif not all(map(_is_whole, row.values())):
                fault = f"must be {encoding.upper()}"
            yield Row(number, row, fault)


class _Lines:
    """The lines of a text, of which at most `MAX_ROW_BYTES` characters are read for one row. `taken`: those of the
    row so far."""

    def __init__(self, text: IO[str]) -> None:
        self.text, self.taken = text, 0

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self.text.readline(MAX_ROW_BYTES + 1)
        self.taken += len(line)
        if self.taken > MAX_ROW_BYTES:
            raise csv.Error(f"a row must have at most {MAX_ROW_BYTES} characters")
        if not line:
            raise StopIteration
        return line


def _is_whole(text: str) -> bool:
    """Whether no byte of the text was kept as it is, because it is not of the encoding."""
    return not any("\udc80" <= letter <= "\udcff" for letter in text)


def _of_parquet(location: str) -> Source:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise InvalidRequest("format", f"parquet needs 'petiole[parquet]' ({error})", location) from None
    # the system's errors are `StorageError` by then; Python has fewer texts, dates and numbers than Arrow
    broken = (ArrowException, OSError, ValueError, OverflowError)
    with _reading(location, broken):
        found = Pages(location, io.BufferedReader(_ReachedFile(location), A_HEADER_BYTES))
        file = parquet.ParquetFile(_ReachedFile(location), **MOST_OF_METADATA)
        if [len(group) for group in found.groups] != [len(file.schema)] * file.num_row_groups:
            raise BatchError(f"{location}: a row group has other columns than the file")

    def batches() -> Iterator[Any]:
        for group in range(file.num_row_groups):
            together = found.rows_together(group, file.schema, frames.A_BATCH)
            yield from file.iter_batches(together, row_groups=[group])

    numbered = (Row(number, row) for number, row in enumerate(frames.of_arrow(batches)))
    rows, columns = _read(location, numbered, broken), list(file.schema_arrow.names)
    return Source(location, rows, int(file.metadata.num_rows), "parquet", columns)


class _ReachedFile(io.RawIOBase):
    """A file whose own errors are not mistaken for those of what is in it: pyarrow raises `OSError` for both."""

    def __init__(self, location: str) -> None:
        self._location, self._file = location, storage.opened(location)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with storage.reached(self._location):
            return self._file.readinto(buffer)  # type: ignore[attr-defined, no-any-return]

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)  # fails for a place that no file has

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()

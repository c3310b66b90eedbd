"""Rows, read one by one: of a JSONL, CSV or Parquet file at a location (`storage`), or of an iterable.

A row of JSONL stays bytes until it is sent, so that the rows that have ended already cost no parsing. Each row has
a digest, by which a later run sees that it reads the same rows."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sized
from hashlib import blake2b
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple, cast

from petiole.tasks.errors import BatchError, InvalidRequest, shorten
from petiole.tasks.submission.batches import storage

MAX_ROW_BYTES = 64 * 2**20
FORMATS = ("jsonl", "csv", "parquet")
_ENDINGS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".parquet": "parquet"}
_PAGE = 1000
_BROKEN = (gzip.BadGzipFile, EOFError, zlib.error, csv.Error)


class Row(NamedTuple):
    """`number`: from 0. `content`: a line of JSON, or what it says. `fault`: why the row cannot be read."""

    number: int
    content: bytes | Mapping[str, Any]
    fault: str = ""

    @property
    def digest(self) -> int:
        """Of the content, 64 bits, never 0."""
        content = self.content
        if not isinstance(content, bytes):
            content = json.dumps(content, sort_keys=True, default=str).encode(errors="surrogatepass")
        return int.from_bytes(blake2b(content, digest_size=8).digest()) or 1

    def value(self) -> Mapping[str, Any]:
        """What the row says. Raises `InvalidRequest`."""
        if self.fault:
            raise InvalidRequest("row", self.fault, shorten(self.content))
        if not isinstance(self.content, bytes):
            return self.content
        try:
            value = json.loads(self.content)
        except UnicodeDecodeError as error:
            raise InvalidRequest("row", "must be UTF-8", shorten(self.content[error.start :])) from None
        except (ValueError, RecursionError) as error:
            raise InvalidRequest("row", f"must be JSON ({error})", shorten(self.content)) from None
        if not isinstance(value, dict):
            raise InvalidRequest("row", "must be a JSON object", shorten(value))
        return value

    @property
    def size(self) -> int:
        """About how many bytes of memory the content takes."""
        return len(self.content) if isinstance(self.content, bytes) else sys.getsizeof(str(self.content))


class Source:
    """`total`: how many rows there are, if that is known before they are read. `name`: for messages; that of a
    file is its location, and `format` its format."""

    def __init__(self, name: str, rows: Iterator[Row], total: int | None = None, format: str = "") -> None:
        self.name, self.total, self.format, self._rows = name, total, format, rows

    def __iter__(self) -> Iterator[Row]:
        return self._rows

    def peek(self) -> Row | None:
        """The first row, which stays there."""
        first = next(self._rows, None)
        if first is not None:
            self._rows = chain([first], self._rows)
        return first


def source_of(rows: object, format: str | None = None) -> Source:
    """The rows of a file, given its path (`-`: standard input), or of an iterable of objects. Raises
    `InvalidRequest`."""
    if isinstance(rows, str | Path):
        return _of_file(str(rows), format)
    if isinstance(rows, bytes | Mapping) or not isinstance(rows, Iterable):
        raise InvalidRequest("rows", "must be a file's path, or an iterable of rows", shorten(rows))
    return Source("rows", _of_iterable(rows), len(rows) if isinstance(rows, Sized) else None)


def _of_iterable(rows: Iterable[Any]) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if isinstance(row, Mapping):
            yield Row(number, row)
        elif isinstance(row, str):
            yield Row(number, {"prompt": row})
        else:
            yield Row(number, repr(row).encode(), f"must be an object with names, not {type(row).__name__}")


def _of_file(location: str, format: str | None) -> Source:
    name = location.rpartition("/")[2].lower()
    zipped = name.endswith(".gz")
    ending = PurePath(name.removesuffix(".gz")).suffix
    chosen = format or _ENDINGS.get(ending) or ("jsonl" if location == "-" else None)
    if chosen not in FORMATS:
        raise InvalidRequest("format", f"must be one of {', '.join(FORMATS)} for {location}", format)
    if chosen == "parquet":
        source = _of_parquet(location)
        return Source(location, _read(location, iter(source)), source.total, chosen)
    file = _opened(location, zipped)
    countable = not zipped and not storage.is_url(location) and Path(location).is_file()
    if chosen == "csv":
        total = (
            sum(1 for _ in _read(location, _of_csv(location, _opened(location, zipped)))) if countable else None
        )
        return Source(location, _read(location, _of_csv(location, file)), total, chosen)
    return Source(
        location, _read(location, _of_jsonl(file)), _lines(Path(location)) if countable else None, chosen
    )


def _read(location: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Raises `StorageError` if the file cannot be read now, and another `BatchError` if it never can."""
    try:
        with storage.reached(location):
            yield from rows
    except BatchError as error:
        if isinstance(error.__cause__, _BROKEN):
            raise BatchError(str(error)) from error
        raise
    except _BROKEN as error:
        raise BatchError(f"{location}: {error}") from error


def _opened(location: str, zipped: bool) -> IO[bytes]:
    file = storage.opened(location)
    return cast(IO[bytes], gzip.open(file)) if zipped else file


def _lines(path: Path) -> int:
    """The lines that are not empty, nearly: what a bar shows."""
    with path.open("rb") as file:
        count, last = 0, b"\n"
        while block := file.read(2**20):
            count, last = count + block.count(b"\n"), block[-1:]
        return count + (last != b"\n")


def _of_jsonl(file: IO[bytes]) -> Iterator[Row]:
    number = 0
    with file:
        while line := file.readline(MAX_ROW_BYTES + 1):
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


def _of_csv(name: str, file: IO[bytes]) -> Iterator[Row]:
    csv.field_size_limit(MAX_ROW_BYTES)
    with file, io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        reader = csv.DictReader(text, restkey="", restval=None)
        names = reader.fieldnames or []
        if len({*names}) < len(names):
            raise InvalidRequest("columns", f"must have names of their own in {name}", shorten(names))
        for number, row in enumerate(reader):
            fault = ""
            if "" in row and "" not in names:
                fault = f"must have at most {len(names)} columns"
            elif any(value is None for value in row.values()):
                fault = f"must have {len(names)} columns"
            elif any("\udc80" <= letter <= "\udcff" for value in row.values() for letter in value):
                fault = "must be UTF-8"
            yield Row(number, row, fault)


def _of_parquet(location: str) -> Source:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise InvalidRequest("format", f"parquet needs 'petiole[parquet]' ({error})", location) from None
    file = parquet.ParquetFile(storage.opened(location))

    def rows() -> Iterator[Row]:
        number = 0
        for page in file.iter_batches(batch_size=_PAGE):
            for row in page.to_pylist():
                yield Row(number, row)
                number += 1

    return Source(location, rows(), int(file.metadata.num_rows), "parquet")

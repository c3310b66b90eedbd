"""What a Parquet file would take in memory, by its metadata and the headers of its pages, before any is decoded.

The metadata at the end of a file says how large its row groups are, but the reader believes each page's own
header: a few bytes may claim two gigabytes, and a value in a dictionary stands in any number of rows. So metadata
and headers are read here, as the reader will read them. They are in Thrift's compact protocol, of which this is as
much as they need. (pyarrow shows no headers, and ends the process at some metadata that is broken.)

Source of the layout: `FileMetaData` and `PageHeader` of parquet-format's `parquet.thrift`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from petiole.tasks.errors import BatchError

MAX_METADATA_BYTES = 2**24
MAX_GROUP_BYTES = 2**30
"""Maximum size of a row group, in the file and inflated."""
MAX_PAGE_BYTES = 2**28
"""Maximum size of a page, inflated."""
MAX_VALUES = 2**27
"""Maximum number of values of a column of lists in a row group."""
MAX_READ_BYTES = 2**28
"""Maximum size of the rows that are read together, but for a row that is larger by itself."""

_HEADER_READS = (2**9, 2**16)
"""Bytes that are read of a page's header: of most, and of all. pyarrow writes at most some 8 KiB."""
_DICTIONARY = 2
_REPEATING = {2, 7, 8}
"""Encodings in which a few bits may stand for a value of any length: of dictionaries, and of differences."""
_OF_ANY_LENGTH = ("BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")


class PageHeader(NamedTuple):
    """`size`, `stored`: bytes of the page, inflated and in the file."""

    kind: int
    size: int
    stored: int
    values: int = 0
    encoding: int = 0


class Pages:
    """The pages of one file. Raises `BatchError` if the metadata are broken, or say that a row group is too
    large."""

    def __init__(self, location: str, file: IO[bytes]) -> None:
        self._location, self._file = location, file
        with self._named("metadata"):
            self.groups: list[list[tuple[int, int]]] = [*_groups(_metadata(file))]
            """By row group and column: where the pages begin, and where they end."""

    def rows_together(self, number: int, schema: Any, most: int) -> int:
        """How many rows of a row group may be read together: at most `most`. `schema`: pyarrow's `ParquetSchema`.
        Raises `BatchError` if a header is broken, or the group or a page is too large."""
        inflated, widest = 0, 0
        with self._named(f"row group {number}") as group:
            for index, (begin, end) in enumerate(self.groups[number]):
                leaf, largest, values, repeats = schema.column(index), 0, 0, False
                for page in _pages(self._file, begin, end, f"{group}, column {index}"):
                    inflated, largest = inflated + page.size, max(largest, page.size)
                    values += page.values if page.kind != _DICTIONARY else 0
                    repeats |= page.kind == _DICTIONARY or page.encoding in _REPEATING
                _limited(group, inflated, MAX_GROUP_BYTES, "bytes, inflated")
                if leaf.max_repetition_level:
                    _limited(f"{group}, column {index}", values, MAX_VALUES, "values of lists")
                widest += largest if repeats and leaf.physical_type in _OF_ANY_LENGTH else 0
        return max(1, min(most, MAX_READ_BYTES // widest)) if widest else most

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[str]:
        try:
            yield what
        except _Unfit as error:
            raise BatchError(f"{self._location}: {error}") from None
        except (IndexError, KeyError, TypeError, RecursionError) as error:
            raise BatchError(f"{self._location}: the {what} is broken ({type(error).__name__})") from None


class _Unfit(Exception):  # noqa: N818
    """Says which part of a file must be otherwise."""


def _limited(what: str, value: int, most: int, unit: str) -> None:
    if not 0 <= value <= most:
        smaller = "Write it with smaller row groups (row_group_size)"
        raise _Unfit(f"{what} must have at most {most} {unit}, got {value}. {smaller}")


def _metadata(file: IO[bytes]) -> dict[int, Any]:
    """Raises `IndexError`, `KeyError`, `TypeError` or `RecursionError` where they are broken."""
    whole = file.seek(0, 2)
    file.seek(max(0, whole - 8))
    length = int.from_bytes(file.read(4), "little")
    if file.read(4) != _MAGIC:
        raise _Unfit("it must be a Parquet file, which ends with PAR1")
    _limited("metadata", length, min(MAX_METADATA_BYTES, max(0, whole - 8)), "bytes")
    file.seek(whole - 8 - length)
    return _struct(io.BytesIO(file.read(length)), _NESTED)


def _groups(metadata: dict[int, Any]) -> Iterator[list[tuple[int, int]]]:
    for number, group in enumerate(metadata[_ROW_GROUPS]):
        _limited(f"row group {number}", group[_GROUP_SIZE], MAX_GROUP_BYTES, "bytes, inflated")
        chunks = [_chunk(column[_COLUMN]) for column in group[_COLUMNS]]
        _limited(f"row group {number}", sum(end - begin for begin, end in chunks), MAX_GROUP_BYTES, "bytes")
        yield chunks


def _chunk(column: dict[int, Any]) -> tuple[int, int]:
    begin, dictionary = column[_DATA_OFFSET] + 0, column.get(_DICTIONARY_OFFSET) or 0
    begin = dictionary if 0 < dictionary < begin else begin
    _limited("a column", column[_STORED_SIZE], MAX_GROUP_BYTES, "bytes")
    return begin, begin + column[_STORED_SIZE]


def _pages(file: IO[bytes], at: int, end: int, where: str) -> Iterator[PageHeader]:
    """The pages that the reader reads of a column."""
    while at < end:
        header, length = _header_at(file, at, end, where)
        page = f"{where}, page at byte {at}"
        _limited(page, header.stored, end - at - length, "bytes in the file")
        _limited(page, header.size, MAX_PAGE_BYTES, "bytes, inflated")
        if header.kind == _DICTIONARY:
            _limited(page, header.values, header.size + 1, "values in its bytes")
        yield header
        at += length + header.stored


def _header_at(file: IO[bytes], at: int, end: int, where: str) -> tuple[PageHeader, int]:
    for most in _HEADER_READS:
        file.seek(at)
        try:
            return _header(file.read(min(most, end - at)))
        except IndexError:
            continue
        except (KeyError, TypeError, RecursionError):
            break
    raise _Unfit(f"{where}: the page at byte {at} has a broken header, or one of more than {most} bytes")


def _header(data: bytes) -> tuple[PageHeader, int]:
    """The header at the beginning of `data`, and its length. Raises `IndexError` if it goes on, and `KeyError`,
    `TypeError` or `RecursionError` if it is broken."""
    stream = io.BytesIO(data)
    fields = _struct(stream, _NESTED)
    more = ((fields[one][_VALUES], fields[one][kind]) for one, kind in _HEADERS.items() if one in fields)
    header = PageHeader(fields[_KIND], fields[_SIZE], fields[_STORED], *next(more, ()))
    if not all(type(one) is int for one in header):
        raise TypeError
    return header, stream.tell()


# ------------------------------------------------------------ parquet.thrift's fields

_ROW_GROUPS = 4
_COLUMNS, _GROUP_SIZE = 1, 2
_COLUMN = 3
_STORED_SIZE, _DATA_OFFSET, _DICTIONARY_OFFSET = 7, 9, 11
_KIND, _SIZE, _STORED, _VALUES = 1, 2, 3, 1
_HEADERS = {5: 2, 7: 2, 8: 4}
"""By the field of a kind of page's own header: its field of the encoding."""

# ------------------------------------------------------------ Thrift's compact protocol

_BOOLEANS, _BYTE, _INTEGERS, _DOUBLE, _BINARY, _LISTS, _MAP, _STRUCT = (1, 2), 3, (4, 5, 6), 7, 8, (9, 10), 11, 12
_MAGIC = b"PAR1"
"""The last bytes of a file."""
_NESTED = 20
"""Maximum depth of structs and lists. Those of parquet.thrift have seven."""


def _struct(stream: io.BytesIO, levels: int) -> dict[int, Any]:
    fields, number = dict[int, Any](), 0
    while kind := (head := _byte(stream)) & 15:
        number = number + (head >> 4) if head >> 4 else _integer(stream)
        fields[number] = _value(stream, kind, levels)
    return fields


def _value(stream: io.BytesIO, kind: int, levels: int) -> Any:
    """None: a value of a kind that is only skipped."""
    if not levels:
        raise RecursionError
    if kind in _BOOLEANS:
        return None
    if kind == _BYTE:
        return _byte(stream)
    if kind in _INTEGERS:
        return _integer(stream)
    if kind == _DOUBLE:
        return _skip(stream, 8)
    if kind == _BINARY:
        return _skip(stream, _number(stream))
    if kind in _LISTS:
        head = _byte(stream)
        count = head >> 4 if head >> 4 < 15 else _number(stream)
        return [_entry(stream, head & 15, levels) for _ in range(count)]
    if kind == _MAP:
        count = _number(stream)
        kinds = _byte(stream) if count else 0
        for _ in range(count):
            _entry(stream, kinds >> 4, levels)
            _entry(stream, kinds & 15, levels)
        return None
    if kind == _STRUCT:
        return _struct(stream, levels - 1)
    raise KeyError(kind)


def _entry(stream: io.BytesIO, kind: int, levels: int) -> Any:
    """An entry of a list or a map, where a boolean has a byte."""
    return _value(stream, _BYTE if kind in _BOOLEANS else kind, levels - 1)


def _byte(stream: io.BytesIO) -> int:
    return stream.read(1)[0]


def _skip(stream: io.BytesIO, count: int) -> None:
    if len(stream.read(count)) < count:
        raise IndexError


def _number(stream: io.BytesIO) -> int:
    """A varint of at most 64 bits."""
    value = 0
    for shift in range(0, 70, 7):
        byte = _byte(stream)
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise IndexError


def _integer(stream: io.BytesIO) -> int:
    """A varint in zigzag."""
    value = _number(stream)
    return value >> 1 ^ -(value & 1)

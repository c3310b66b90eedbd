"""Lines of results as a file of the format that its name says.

    JSONL      as they are
    CSV, TSV   a column for each name that any line has; what is neither text nor a number is JSON
    Parquet    likewise, with the types that all lines have room in. A column whose values have no common type is
               text: what is no text is JSON in it

The lines are read twice: the first time says the columns. Of all lines no more than `PART_BYTES` are in memory."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import IO, Any, cast

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.batches.rows import formats

PART_BYTES = 16 * 2**20
_BESIDE = 200
"""Bytes that a line counts for beside its own."""
Lines = Callable[[], Iterable[bytes]]
"""The lines, from the first one, each time that it is called: JSON objects, without line feeds."""


def check(location: str) -> None:
    """Raises `InvalidRequest` if this process cannot write what the name says."""
    if formats.of_output(location).kind == "parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise InvalidRequest("output", f"parquet needs 'petiole[parquet]' ({error})", location) from None


def write(location: str, file: IO[bytes], lines: Lines) -> None:
    """`location`: whose name says the format."""
    kind, zipped = formats.of_output(location)
    with _packed(file) if zipped else nullcontext(file) as out:
        if kind == "parquet":
            _write_parquet(out, lines)
        elif kind in formats.DELIMITERS:
            _write_csv(out, lines, formats.DELIMITERS[kind])
        else:
            for line in lines():
                out.write(line + b"\n")


def _packed(file: IO[bytes]) -> AbstractContextManager[IO[bytes]]:
    return closing(cast(IO[bytes], gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="")))


# ------------------------------------------------------------ CSV


def _write_csv(file: IO[bytes], lines: Lines, delimiter: str) -> None:
    names: dict[str, None] = {}
    for line in lines():
        names |= dict.fromkeys(json.loads(line))
    text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
    try:
        writer = csv.writer(text, delimiter=delimiter)
        writer.writerow(names or ["row"])
        for line in lines():
            value = json.loads(line)
            writer.writerow([_cell(value.get(name)) for name in names])
    finally:
        text.detach()


def _cell(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) and not isinstance(value, bool) else _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------ Parquet


def _write_parquet(file: IO[bytes], lines: Lines) -> None:
    import pyarrow
    from pyarrow import parquet

    found: dict[str, Any] = {"row": pyarrow.int64()}
    for part in _parts(lines()):
        for name in dict.fromkeys(name for value in part for name in value):
            found[name] = _common(found.get(name, pyarrow.null()), [value.get(name) for value in part])
    types = {name: None if kind is None else _writable(kind) for name, kind in found.items()}
    schema = pyarrow.schema([(name, kind or pyarrow.string()) for name, kind in types.items()])
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        for part in _parts(lines()):
            columns = [
                pyarrow.array(_values([value.get(name) for value in part], as_text=kind is None), kind)
                for name, kind in types.items()
            ]
            writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))


def _values(values: list[Any], as_text: bool) -> list[Any]:
    if not as_text:
        return values
    return [value if isinstance(value, str | None) else _json(value) for value in values]


def _parts(lines: Iterable[bytes]) -> Iterator[list[Mapping[str, Any]]]:
    part: list[Mapping[str, Any]] = []
    size = 0
    for line in lines:
        part.append(json.loads(line))
        size += len(line) + _BESIDE
        if size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _common(before: Any, values: list[Any]) -> Any:
    """The type for the values before, and for these. None: they have none."""
    import pyarrow

    if before is None:
        return None
    try:
        both = [pyarrow.schema([("", kind)]) for kind in (before, pyarrow.array(values).type)]
        return pyarrow.unify_schemas(both, promote_options="permissive").field(0).type
    except (pyarrow.ArrowException, OverflowError):
        return None


def _writable(kind: Any) -> Any:
    """The type as Parquet has it: what has only nulls is text. None: it has an object without names, for which
    Parquet has no type."""
    import pyarrow
    from pyarrow import types

    if types.is_null(kind):
        return pyarrow.string()
    if types.is_list(kind):
        inner = _writable(kind.value_type)
        return None if inner is None else pyarrow.list_(inner)
    if types.is_struct(kind):
        fields = [(field.name, _writable(field.type)) for field in kind]
        return pyarrow.struct(fields) if fields and all(inner is not None for _, inner in fields) else None
    return kind

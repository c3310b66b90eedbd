"""Tables as rows: frames of pandas and polars, tables and data sets of pyarrow, data sets of Hugging Face, and
whatever else gives a stream of Arrow, such as a relation of DuckDB.

Iterating many of these gives their columns. They are known by the methods that their packages document, so no
package is imported that the caller has not. A table too large for memory is read batch by batch.

In columns a missing value is a hole (None, NaN, NaT, NA), which is `MISSING` in the row: no option and no text."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, NamedTuple

from petiole.contract.errors import shorten
from petiole.tasks.errors import InvalidRequest

MISSING = math.nan
A_BATCH = 1000
"""Rows that are read together."""
A_BATCH_BYTES = 2**26
"""About the most bytes of Arrow's that are made Python's together."""
_PLAIN = (str, int, bool, float, type(None))


class Table(NamedTuple):
    """`columns`: their names; None: unknown before the rows are read. `total`: how many rows, if that is known."""

    columns: Sequence[str] | None
    rows: Iterator[Mapping[str, Any]]
    total: int | None = None


def table_of(rows: Any) -> Table | None:
    """None: iterating gives the rows. A stream that can be read once is read. Raises `InvalidRequest`."""
    read = _reading(rows)
    return None if read is None else read(rows)


def is_table(value: Any) -> bool:
    """Nothing of it is read."""
    return _reading(value) is not None


def _reading(rows: Any) -> Callable[[Any], Table] | None:
    if is_series(rows):
        return None
    return next((read for names, read in _READINGS if has(rows, *names)), None)


def _pandas(frame: Any) -> Table:
    names = _names(frame.columns)
    tuples = frame.itertuples(index=False, name=None)
    return Table(names, (_row(zip(names, row, strict=True)) for row in tuples), len(frame))


def _polars(frame: Any) -> Table:
    return Table(_names(frame.columns), _of_polars(frame), len(frame))


def _lazy(frame: Any) -> Table:
    names = _names(frame.collect_schema().names())
    return Table(names, _of_batches(lambda: _collected(frame), _of_polars))


def _datasets(rows: Any) -> Table:
    return Table(rows.column_names, _of_rows(rows.with_format(None)), _length(rows))


def _batched(rows: Any) -> Table:
    schema = rows.schema if hasattr(rows, "schema") else rows.projected_schema
    given = {"batch_size": A_BATCH} if hasattr(rows, "scanner") else {}
    return Table(_names(schema.names), of_arrow(lambda: rows.to_batches(**given)), _length(rows))


def _batch(batch: Any) -> Table:
    return Table(_names(batch.schema.names), of_arrow(lambda: [batch]), _length(batch))


def _batches(reader: Any) -> Table:
    return Table(_names(reader.schema.names), of_arrow(lambda: reader))


def _stream(rows: Any) -> Table:
    return _batches(_reader(rows))


_READINGS: Sequence[tuple[tuple[str, ...], Callable[[Any], Table]]] = (
    (("itertuples", "columns"), _pandas),  # and what is like it
    (("iter_rows", "columns"), _polars),
    (("collect_schema", "collect"), _lazy),
    (("with_format", "column_names"), _datasets),  # values as Python has them
    (("to_batches",), _batched),  # a table of pyarrow, a data set, a scanner
    (("to_pylist", "schema"), _batch),  # one of pyarrow
    (("read_next_batch", "schema"), _batches),
    (("__arrow_c_stream__",), _stream),
)
"""How each kind of table is read, by the names that it has. The first kind whose names are there counts."""


def has(value: object, *names: str) -> bool:
    return not isinstance(value, type) and all(hasattr(type(value), name) for name in names)


def has_no_length(rows: object) -> bool:
    """An array of no dimensions: one value."""
    return getattr(rows, "shape", None) == ()


def is_series(rows: object) -> bool:
    """A column by itself, whose values are the rows."""
    return has(rows, "to_frame") or (has(rows, "to_pylist") and not has(rows, "schema"))


def of_arrow(batches: Callable[[], Iterable[Any]]) -> Iterator[Mapping[str, Any]]:
    return _of_batches(batches, lambda batch: _of_rows(chain.from_iterable(map(_listed, _sliced(batch)))))


def _sliced(batch: Any) -> Iterator[Any]:
    """A batch of a table may be all of it, and its numbers take ten times their bytes in Python."""
    rows = max(1, min(A_BATCH, batch.num_rows * A_BATCH_BYTES // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _listed(batch: Any) -> list[Mapping[str, Any]]:
    listed: list[Mapping[str, Any]] = batch.to_pylist()
    return listed


def _of_batches(
    batches: Callable[[], Iterable[Any]], rows: Callable[[Any], Iterator[Mapping[str, Any]]]
) -> Iterator[Mapping[str, Any]]:
    for batch in batches():
        yield from rows(batch)


def _collected(frame: Any) -> Iterable[Any]:
    if hasattr(frame, "collect_batches"):
        batches: Iterable[Any] = frame.collect_batches(maintain_order=True, chunk_size=A_BATCH)
        return batches
    return [frame.collect()]


def _of_polars(frame: Any) -> Iterator[Mapping[str, Any]]:
    return _of_rows(frame.iter_rows(named=True))


def _of_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (_row(row.items()) for row in rows)


def _row(cells: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
    row = {name: plain(value) for name, value in cells}
    return {name: MISSING if value is None else value for name, value in row.items()}


def _reader(rows: Any) -> Any:
    try:
        from pyarrow import RecordBatchReader
    except ImportError as error:
        limit = f"must be an iterable of rows: {type(rows).__name__} needs 'petiole[parquet]' ({error})"
        raise InvalidRequest("rows", limit, type(rows).__name__) from None
    return RecordBatchReader.from_stream(rows)


def _length(rows: Any) -> int | None:
    return len(rows) if has(rows, "__len__") else None


def _names(columns: Iterable[Any]) -> list[str]:
    names = [str(name) for name in columns]
    if len({*names}) < len(names):
        raise InvalidRequest("columns", "must have names of their own", shorten(names))
    return names


def names_of(rows: Any) -> list[str] | None:
    """The names that an object gives which looks like a mapping. None: it does not."""
    if is_series(rows) or not has(rows, "__getitem__"):
        return None
    for name in ("keys", "columns", "column_names"):
        found = getattr(rows, name, None)
        try:
            return [str(one) for one in (found() if callable(found) else found)]  # type: ignore[union-attr]
        except TypeError:
            continue
    return None


# ------------------------------------------------------------ values


def plain(value: Any) -> Any:
    """The value as JSON has it: numbers and arrays of numpy become Python's, and so do Arrow's values. What is
    neither stays. Raises `RecursionError`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if has(value, "as_py"):
        return plain(value.as_py())
    if has(value, "tolist", "dtype"):
        return plain(value.tolist())
    return MISSING if _is_hole(value) else value


def _is_hole(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    if pandas is not None and (value is pandas.NA or value is pandas.NaT):
        return True
    return isinstance(value, Decimal) and value.is_nan()


def is_missing(value: Any) -> bool:
    """Whether the value is NaN, as every hole of a column is."""
    return isinstance(value, float) and value != value

"""Tables are rows, whatever iterating them gives, and a hole is no text."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.batches.rows import frames
from petiole.tasks.submission.batches.rows.row_types import RequestRows
from petiole.tasks.submission.batches.rows.sources import Row, Source, source_of

COLUMNS = {"n": [1, 2, 3], "text": ["a", None, "c"]}


def said(source: Source) -> list[dict[str, Any]]:
    """The rows, with None for holes."""
    return [
        {name: None if frames.is_missing(value) else value for name, value in row.value().items()}
        for row in source
    ]


def of_pandas() -> Iterator[tuple[str, Any]]:
    pandas = pytest.importorskip("pandas")
    yield "frame", pandas.DataFrame(COLUMNS)
    yield "frame of a slice", pandas.DataFrame({**COLUMNS, "other": 0})[["n", "text"]].set_index([[5, 5, 7]])
    yield "frame of missing values", pandas.DataFrame({**COLUMNS, "text": ["a", pandas.NaT, "c"]}, dtype=object)
    yield "nullable columns", pandas.DataFrame(COLUMNS).convert_dtypes()


def of_polars() -> Iterator[tuple[str, Any]]:
    polars = pytest.importorskip("polars")
    yield "frame", polars.DataFrame(COLUMNS)
    yield "lazy frame", polars.DataFrame({**COLUMNS, "other": 0}).lazy().select("n", "text")


def of_pyarrow() -> Iterator[tuple[str, Any]]:
    pyarrow = pytest.importorskip("pyarrow")
    dataset = pytest.importorskip("pyarrow.dataset")
    table = pyarrow.table(COLUMNS)
    yield "table", table
    yield "batch", table.to_batches()[0]
    yield "reader", table.to_reader()
    yield "data set", dataset.dataset(pyarrow.concat_tables([table.slice(0, 1), table.slice(1)]))
    yield "scanner", dataset.dataset(table).scanner()
    yield "something with Arrow's stream", Stream(table)


def of_datasets() -> Iterator[tuple[str, Any]]:
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_dict(COLUMNS)
    yield "data set", found
    yield "of another format", found.with_format("pandas")
    yield "stream", found.to_iterable_dataset()


class Stream:
    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(schema)


class OnceStream(Stream):
    """Such as the cursor of a database gives."""

    def __arrow_c_stream__(self, schema: Any = None) -> Any:
        taken = super().__arrow_c_stream__(schema)
        del self._table
        return taken


@pytest.mark.parametrize("tables", [of_pandas, of_polars, of_pyarrow, of_datasets])
def test_tables_are_rows(tables: Callable[[], Iterator[tuple[str, Any]]]) -> None:
    for name, table in tables():
        source = source_of(table)
        assert source.total in (3, None), name
        assert source.columns == ["n", "text"], name
        assert said(source) == [{"n": 1, "text": "a"}, {"n": 2, "text": None}, {"n": 3, "text": "c"}], name


def parts_of_tables() -> Iterator[tuple[str, Any]]:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    pyarrow = pytest.importorskip("pyarrow")
    text = io.StringIO("n,text\n1,a\n2,\n3,c\n")
    yield "what pandas reads in chunks", pandas.read_csv(text, chunksize=2)
    yield "a list of frames", [pandas.DataFrame(COLUMNS)[:1], pandas.DataFrame(COLUMNS)[1:]]
    yield "slices", polars.DataFrame(COLUMNS).iter_slices(2)
    yield "batches", pyarrow.table(COLUMNS).to_batches(max_chunksize=2)
    table = pyarrow.table(COLUMNS)
    yield "streams that can be read once", [OnceStream(table.slice(0, 1)), OnceStream(table.slice(1))]
    yield "a frame among rows", ({"n": 1, "text": "a"}, pandas.DataFrame(COLUMNS)[1:])


def test_many_tables_are_the_rows_of_each() -> None:
    for name, tables in parts_of_tables():
        source = source_of(tables)
        assert [row.number for row in source] == [0, 1, 2], name
    for name, tables in parts_of_tables():
        source = source_of(tables)
        assert said(source) == [{"n": 1, "text": "a"}, {"n": 2, "text": None}, {"n": 3, "text": "c"}], name
        assert name == "a frame among rows" or source.total is None


def test_an_array_without_dimensions_is_no_rows() -> None:
    numpy = pytest.importorskip("numpy")
    with pytest.raises(InvalidRequest, match="rows: must be a file's path, or an iterable of rows, got array"):
        source_of(numpy.array("a"))


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_column_by_itself_has_texts(package: str) -> None:
    column = pytest.importorskip(package).Series(["a", "b", None])
    first, second, hole = source_of(column)
    assert (first.value(), second.value()) == ({"prompt": "a"}, {"prompt": "b"})
    with pytest.raises(InvalidRequest, match="not nothing"):
        hole.value()


def test_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    given = {
        "id": numpy.int64(7),
        "temperature": numpy.float32(0.5),
        "prompt": numpy.array([1, 2]),
        "x": (1, [True]),
    }
    [row] = source_of([given])
    assert row.content == {"id": 7, "temperature": 0.5, "prompt": [1, 2], "x": [1, [True]]}
    assert [type(value) for value in row.content.values()] == [int, float, list, list]


class Keyed:
    """Like a mapping, though it is none."""

    def keys(self) -> list[str]:
        return ["prompt", "seed"]

    def __getitem__(self, name: str) -> str:
        return f"the {name}"

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())


def test_what_looks_like_a_mapping_is_no_iterable_of_rows_but_may_be_a_row() -> None:
    with pytest.raises(InvalidRequest, match=r"Iterating this one gives its keys, or its columns, got.*prompt"):
        source_of(Keyed())
    with pytest.raises(InvalidRequest, match=r"This is a mapping: .*got the keys \['train'\]"):
        source_of({"train": [{"prompt": "a"}]})
    [row] = source_of([Keyed()])
    assert row.value() == {"prompt": "the prompt", "seed": "the seed"}


def test_columns_of_one_name_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(InvalidRequest, match="columns: must have names of their own"):
        source_of(pandas.DataFrame([["a", "b"]], columns=["x", "x"]))


@pytest.mark.parametrize("place", [0, 1])
def test_one_of_many_tables_that_cannot_be_read_is_one_bad_row(place: int) -> None:
    pandas = pytest.importorskip("pandas")
    tables = [pandas.DataFrame({"prompt": ["a", "b"]})]
    tables.insert(place, pandas.DataFrame([["a", "b"], ["c", "d"]], columns=["x", "x"]))
    rows = list(source_of(tables))
    assert [row.number for row in rows] == [0, 1, 2]
    bad = rows.pop(2 * place)
    assert [row.value() for row in rows] == [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(InvalidRequest, match="row: columns must have names of their own, got"):
        bad.value()


@pytest.mark.parametrize("hole", [None, float("nan"), Decimal("nan")])
def test_a_hole_is_its_rows_error_where_the_row_uses_it(hole: Any) -> None:
    [row] = source_of([{"id": "a", "text": hole, "other": "b"}])
    for form in (RequestRows(prompt="{text}"), RequestRows("query", columns={"image": "text"})):
        with pytest.raises(InvalidRequest, match="text: must have a value"):
            form.work(row)
    assert RequestRows(prompt="{other}").work(row).calls[0].options == {"prompt": "b"}


def test_a_hole_in_a_column_is_no_option_and_no_id() -> None:
    pandas = pytest.importorskip("pandas")
    rows = source_of(pandas.DataFrame({"id": ["a", None], "prompt": ["a", "b"], "seed": [1, None]}))
    first, second = rows
    assert RequestRows().work(first).calls[0].options == {"prompt": "a", "seed": 1}
    with pytest.raises(InvalidRequest, match="seed: must have a value"):
        RequestRows().work(second)
    assert RequestRows().refusal(second, InvalidRequest("seed", "x", "y")).value["id"] is None


def test_bytes_are_no_text() -> None:
    with pytest.raises(InvalidRequest, match="text: must be text or a number"):
        RequestRows(prompt="{text}").work(Row(0, {"text": b"a"}))


def test_reading_rows_imports_no_package_of_tables() -> None:
    code = (
        "import sys; from petiole.tasks.submission.batches.rows.sources import source_of; "
        "list(source_of([{'prompt': 'a'}])); print([one for one in ('pandas', 'polars', 'pyarrow', 'datasets', "
        "'numpy') if one in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

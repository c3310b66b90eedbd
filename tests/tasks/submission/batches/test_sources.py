"""Rows are read one by one, and a row that cannot be read is a row with a fault."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.spec import AbstractBufferedFile  # type: ignore[import-untyped]

from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.submission.batches.files import storage
from petiole.tasks.submission.batches.files.storage import StorageError
from petiole.tasks.submission.batches.rows import sources
from petiole.tasks.submission.batches.rows.output_lines import TaskOutcome
from petiole.tasks.submission.batches.rows.row_types import RequestRows
from petiole.tasks.submission.batches.rows.sources import Row, source_of
from petiole.tasks.submission.batches.rows.template import RowTemplate


def values(rows: object, **options: Any) -> list[Any]:
    found = []
    for row in source_of(rows, **options):
        try:
            found.append(row.value())
        except InvalidRequest as error:
            found.append(str(error))
    return found


def test_jsonl_with_empty_lines_a_mark_and_no_last_line_feed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"a": 2}\r\n[1]\n\xff{}\n{"a": 3}')
    first, second, no_object, no_text, last = values(path)
    assert (first, second, last) == ({"a": 1}, {"a": 2}, {"a": 3})
    assert "must be a JSON object" in no_object
    assert "must be" in no_text
    assert [row.number for row in source_of(str(path))] == [0, 1, 2, 3, 4]
    zipped = tmp_path / "in.jsonl.gz"
    zipped.write_bytes(gzip.compress(path.read_bytes()))
    assert values(zipped) == values(path)


def test_a_line_of_endless_length_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_ROW_BYTES", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"a": "' + b"x" * 1000 + b'"}\n{"a": 2}\n')
    bad, good = values(path)
    assert "at most 100 bytes" in bad
    assert good == {"a": 2}


def test_csv_rows_have_all_columns_or_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b'id,text\n1,"a\nb"\n2\n3,x,y\n4,\xff\n5,\xc3\xa9\n')
    source = source_of(path)
    assert source.total == 5
    good, short, long, no_text, last = values(path)
    assert (good, last) == ({"id": "1", "text": "a\nb"}, {"id": "5", "text": "é"})
    assert "must have 2 columns" in short
    assert "at most 2 columns" in long
    assert "UTF-8" in no_text


def test_iterables_and_what_is_none() -> None:
    assert values([{"a": 1}, "hello"]) == [{"a": 1}, {"prompt": "hello"}]
    assert "not int" in values([3])[0]
    with pytest.raises(InvalidRequest, match="rows"):
        source_of(3)
    with pytest.raises(InvalidRequest, match=r"format: must be one of jsonl, csv, tsv, parquet for in\.txt"):
        source_of("in.txt")


def test_a_digest_is_of_the_content() -> None:
    assert Row(0, b"a").digest == Row(1, b"a").digest != Row(0, b"b").digest
    assert Row(0, {"a": 1, "b": 2}).digest == Row(0, {"b": 2, "a": 1}).digest


@pytest.mark.parametrize("text", ["{}", "{a!r}", "{a:>3}", "{", "}"])
def test_a_prompt_with_other_braces_than_columns_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="prompt"):
        RowTemplate(text).fill({"a": ""})


def test_a_prompt_takes_columns() -> None:
    template = RowTemplate("{{{a}}} of {b}")
    assert template.fill({"a": "x{b}", "b": 2}) == "{x{b}} of 2"
    with pytest.raises(InvalidRequest, match="b: must be a column"):
        template.fill({"a": "x"})
    with pytest.raises(InvalidRequest, match="b: must have a value, got None"):
        template.fill({"a": "x", "b": None})


def test_a_line_is_json_whatever_an_id_is() -> None:
    line = (
        RequestRows()
        .work(Row(0, {"id": date(2026, 11, 26), "prompt": "a"}))
        .line([TaskOutcome({"text": "\ud800é", "timing": {}})])
    )
    assert line.json == '{"row": 0, "id": "2026-11-26", "text": "?é"}'.encode()


def test_a_row_is_a_request_of_any_task_or_data_for_a_prompt() -> None:
    form = RequestRows(options={"max_tokens": 3, "seed": 1})
    (call,) = form.work(Row(0, {"prompt": "a", "seed": 2, "id": 7})).calls
    assert call == ("tasks.generate", {"max_tokens": 3, "prompt": "a", "seed": 2})
    (call,) = RequestRows().work(Row(0, {"task": "embed", "input": "a"})).calls
    assert call == ("tasks.embed", {"input": "a"})
    form = RequestRows("chat", prompt="Hi {x}", system="Be kind", columns={"seed": "n"})
    (call,) = form.work(Row(0, {"x": "you", "n": 3, "prompt": "not an option"})).calls
    said = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hi you"}]
    assert call == ("tasks.chat", {"seed": 3, "messages": said})
    with pytest.raises(InvalidRequest, match="queue: is of the batch"):
        RequestRows().work(Row(0, {"prompt": "a", "queue": "b"}))
    with pytest.raises(InvalidRequest, match="prompt: has no place in caption"):
        RequestRows("caption", prompt="{x}")


def test_a_broken_file_is_told_from_one_that_cannot_be_read_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl.gz"
    whole = gzip.compress(b'{"prompt": "a"}\n' * 1000)
    for content in (whole[:-20], b"no gzip"):
        path.write_bytes(content)
        with pytest.raises(BatchError) as broken:
            list(source_of(path))
        assert not isinstance(broken.value, StorageError)

    class Away(io.BytesIO):
        error: Exception

        def readline(self, size: int | None = -1, /) -> bytes:
            raise self.error

    for location, Away.error in (
        (str(tmp_path / "in.jsonl"), OSError(5, "Input/output error")),
        ("memory://rows/in.jsonl", LookupError("of the driver")),
    ):
        storage.write(location, b"{}\n")
        with monkeypatch.context() as patched:
            patched.setattr(storage, "opened", lambda _: Away())
            with pytest.raises(StorageError, match=r"in\.jsonl: .*(Input|driver)"):
                list(source_of(location))


class Bucket(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """Its files are those of fsspec's drivers for buckets."""

    protocol = "bucket"
    content = b""

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": len(self.content), "type": "file"}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        return BucketFile(self, path, mode)


class BucketFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return Bucket.content[start:end]


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv", "in.jsonl.gz", "in.parquet"])
def test_files_in_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name.endswith("parquet"):
        pa = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table({"prompt": ["a", "b"]}), tmp_path / name)
    elif name.endswith("gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"prompt": "a"}\n{"prompt": "b"}\n'))
    else:
        (tmp_path / name).write_text("prompt\na\nb\n" if "csv" in name else '{"prompt": "a"}\n{"prompt": "b"}')
    monkeypatch.setattr(Bucket, "content", (tmp_path / name).read_bytes())
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    found = [dict(row.value()) for row in source_of(f"bucket://rows/{name}")]
    assert found == [{"prompt": "a"}, {"prompt": "b"}]


INFLATED = """
import gzip, resource, sys
from petiole.tasks.submission.batches.rows.sources import source_of

name, kind = sys.argv[1:]
with gzip.open(name, "wb", compresslevel=1) as file:
    file.write(b'{"prompt": "' if kind == "jsonl" else b"prompt\\n")
    for _ in range(1024):
        file.write(bytes(2**20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    found = [row.fault for row in source_of(name)]
except Exception as error:
    found = [str(error)]
print(found, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_gzip_bomb_costs_bounded_memory(tmp_path: Path, kind: str) -> None:
    """A gigabyte of one row in five megabytes."""
    name = tmp_path / f"in.{kind}.gz"
    ran = subprocess.run([sys.executable, "-c", INFLATED, name, kind], capture_output=True, text=True, check=True)
    found, grown_mib = ran.stdout.rsplit(" ", 1)
    assert "at most 67108864" in found
    assert int(grown_mib) < 600


def test_standard_input_is_read_although_a_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "-").write_text("no row")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n')))
    assert [row.value() for row in source_of("-")] == [{"prompt": "a"}]


def test_a_file_that_is_no_parquet_is_called_so(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(BatchError, match=r"in\.jsonl: it must be a Parquet file, which ends with PAR1$"):
        source_of(str(tmp_path / "in.jsonl"), "parquet")

"""An output has the format that its name says."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.submission.batches.journal import Journal, JournalEntry, OutputFiles
from petiole.tasks.submission.batches.rows import output_files
from petiole.tasks.submission.batches.rows.output_lines import OutputLine
from petiole.tasks.submission.batches.segments import FileStore

LINES: list[dict[str, Any]] = [
    {"row": 0, "id": 1, "text": 'a,"b"\n\t', "usage": {"p": 1}, "numbers": [1, 2.5], "none": None, "big": 2**70},
    {"row": 1, "id": "x", "error": {"type": "InvalidRequest", "message": "é"}, "empty": {}},
    {"row": 2, "id": None, "text": "", "usage": {"p": 2, "c": 3}, "numbers": [], "good": True},
]


def joined(folder: Path, name: str, lines: list[dict[str, Any]] = LINES) -> bytes:
    output = OutputFiles(str(folder / name))
    output.check()
    journal = Journal(FileStore(output.location), {}, "id")
    ended = reversed(lines)
    journal.append(JournalEntry(line["row"], 1, "error" not in line, json.dumps(line).encode()) for line in ended)
    journal.join(output, in_order=True)
    journal.close()
    return (folder / name).read_bytes()


@pytest.mark.parametrize(("name", "delimiter"), [("out.csv", ","), ("out.TSV", "\t"), ("out.tsv.gz", "\t")])
def test_csv_has_a_column_for_each_name(tmp_path: Path, name: str, delimiter: str) -> None:
    made = joined(tmp_path, name)
    text = (gzip.decompress(made) if name.endswith(".gz") else made).decode()
    first, second, third = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    assert first["text"] == LINES[0]["text"]
    assert (first["row"], first["id"], second["id"], third["id"]) == ("0", "1", "x", "")
    assert [json.loads(third[cell]) for cell in ("usage", "numbers", "good")] == [{"p": 2, "c": 3}, [], True]
    assert json.loads(second["error"]) == LINES[1]["error"]
    assert second["text"] == first["none"] == ""


def test_jsonl_packed(tmp_path: Path) -> None:
    lines = gzip.decompress(joined(tmp_path, "out.jsonl.gz")).splitlines()
    assert [json.loads(line) for line in lines] == LINES


@pytest.mark.parametrize("part", [1, 10**6])
def test_parquet_has_types_that_all_lines_have_room_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(output_files, "PART_BYTES", part)
    table = parquet.read_table(io.BytesIO(joined(tmp_path, "out.parquet")))
    types = {field.name: str(field.type).replace("element", "item") for field in table.schema}
    assert (types["row"], types["text"], types["none"]) == ("int64", "string", "string")
    assert types["usage"] == "struct<p: int64, c: int64>"
    assert types["numbers"] == "list<item: double>"
    assert types["error"] == "struct<type: string, message: string>"
    first, second, third = table.to_pylist()
    assert (first["id"], second["id"], third["id"]) == ("1", "x", None)
    assert (first["big"], second["empty"], third["good"]) == (str(2**70), "{}", True)
    assert (first["numbers"], third["usage"]) == ([1.0, 2.5], {"p": 2, "c": 3})
    assert (second["error"], second["text"], third["text"]) == (LINES[1]["error"], None, "")


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_an_output_without_rows_is_a_file_of_its_format(tmp_path: Path, name: str) -> None:
    if name == "out.csv":
        assert joined(tmp_path, name, []) == b"row\r\n"
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        assert parquet.read_table(io.BytesIO(joined(tmp_path, name, []))).num_rows == 0


@pytest.mark.parametrize("name", ["out.xlsx", "out.txt", "out.parquet.gz", "out.jsonl.zst", "out.json"])
def test_a_name_of_another_format_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"output: must end in \.csv, "):
        OutputFiles(name).check()


def test_standard_output_is_no_output() -> None:
    with pytest.raises(InvalidRequest, match="output: must be a file, since a journal beside it says"):
        OutputFiles("-").check()


@pytest.mark.parametrize("name", ["out", "out.jsonl", "folder.d/out.ndjson", "s3://rows/file-1.1790000000"])
def test_names_of_jsonl(name: str) -> None:
    OutputFiles(name).check()
    written = io.BytesIO()
    output_files.write(name, written, lambda: [b"{}"])
    assert written.getvalue() == b"{}\n"


def test_an_output_of_two_files_has_its_failures_in_one_and_what_did_not_run(tmp_path: Path) -> None:
    output = OutputFiles(str(tmp_path / "good.csv"), str(tmp_path / "bad.jsonl"))
    journal = Journal(FileStore(output.location), {}, "id")
    journal.append([JournalEntry(0, 1, True, b'{"row": 0}'), JournalEntry(1, 1, False, b'{"row": 1}')])
    journal.join(output, in_order=False, rest=lambda: [OutputLine(False, {"row": 2})])
    assert (tmp_path / "good.csv").read_text() == "row\n0\n"
    assert (tmp_path / "bad.jsonl").read_text() == '{"row": 1}\n{"row": 2}\n'


@pytest.mark.parametrize(
    ("output", "why"), [("no/out.jsonl", "no: no such folder"), ("s3://a/b", "takes --detach")]
)
def test_an_output_that_cannot_be_begun_says_that_nothing_was_written(
    tmp_path: Path, output: str, why: str
) -> None:
    with pytest.raises(BatchError, match=f"{why}.*Nothing was written"):
        FileStore(output if "://" in output else str(tmp_path / output))

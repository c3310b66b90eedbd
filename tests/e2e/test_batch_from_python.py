"""Batches of what Python has: tables, `async for`, numbers of numpy; a caller that stops; a notebook."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_batch import lines, run, text_of
from tests.support.client import client
from tests.support.site import Site, Worker, eventually

TABLES = {
    "pandas": "import pandas; table = pandas.DataFrame(columns)",
    "polars": "import polars; table = polars.DataFrame(columns)",
    "pyarrow": "import pyarrow; table = pyarrow.table(columns)",
    "datasets": "import datasets; table = datasets.Dataset.from_dict(columns)",
}


@pytest.mark.parametrize("package", TABLES)
def test_a_table_of_sixty_rows_and_five_columns_has_sixty_results(
    site: Site, worker: Worker, tmp_path: Path, package: str
) -> None:
    pytest.importorskip(package)
    columns = f"""
columns = {{"id": [f"r{{k}}" for k in range(60)], "seed": list(range(60)), "a": [0] * 60, "b": [None] * 60,
            "text": [f"row {{k}}" if k != 30 else None for k in range(60)]}}
{TABLES[package]}
"""
    code = f"""{columns}
more = dict(prompt="{{text}}", columns={{"seed": "seed"}}, max_tokens=4)
print(json.dumps([
    {{one.line["id"]: one.line.get("text", one.line.get("error")) for one in tasks.batch(table, **more)}},
    tasks.batch(table, {str(tmp_path / "out.csv")!r}, fields=["text"], **more).run().failed,
]))
"""
    found, failed = client(site, code)
    assert failed == 1
    assert found.pop("r30")["message"].startswith("text: must have a value, got ")
    assert found == {f"r{k}": text_of(k) for k in range(60) if k != 30}
    with (tmp_path / "out.csv").open(newline="") as file:
        written = {row["id"]: row["text"] for row in csv.DictReader(file)}
    assert written == {**found, "r30": ""}


STOPS = {
    "break": "for result in batch: break",
    "an exception": """
try:
    for result in batch: raise KeyError
except KeyError: pass
""",
    "a closed generator": "rows = iter(batch); next(rows); rows.close()",
    "a stop": "for result in batch: batch.stop()",
    "an interrupt": """
def interrupt(progress):
    if progress.ended: raise KeyboardInterrupt
try: batch.run(interrupt)
except KeyboardInterrupt: pass
""",
    "break of an async for": """
async def first():
    async for result in batch: break
asyncio.run(first())
""",
    "a cancelled coroutine": """
async def all(ended):
    async for result in batch: ended.set()
async def cancelled():
    ended = asyncio.Event()
    running = asyncio.create_task(all(ended))
    await ended.wait()
    running.cancel()
    await asyncio.wait([running])
asyncio.run(cancelled())
""",
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_caller_that_stops_leaves_no_row_running(site: Site, worker: Worker, stop: str) -> None:
    """Nobody would find the results."""
    code = f"""
rows = [{{"prompt": "short", "max_tokens": 1}}, *({{"prompt": "long", "max_tokens": "rest"}} for _ in range(20))]
batch = tasks.batch(rows)
{STOPS[stop]}
print(json.dumps([batch._sender.batch_id, batch.progress.ended]))
"""
    name, ended = client(site, code)
    assert ended < 21
    eventually(lambda: site.unfinished() == 0, "no row is on its way")
    metas = [json.loads(site.redis.get(key)) for key in site.redis.keys(f"celery-task-meta-b-{name}-*")]
    assert {meta["status"] for meta in metas} == {"REVOKED"}


def test_async_for_has_all_results_while_the_event_loop_goes_on(site: Site, worker: Worker) -> None:
    code = """
async def all():
    ticks, found = 0, {}
    async def tick():
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)
    ticking = asyncio.create_task(tick())
    rows = ({"prompt": f"row {k}", "seed": k} for k in range(40))
    async for result in tasks.batch(rows, max_tokens=4):
        found[result.row] = result.line["text"]
    ticking.cancel()
    return found, ticks
print(json.dumps(asyncio.run(all())))
"""
    found, ticks = client(site, code)
    assert found == {str(k): text_of(k) for k in range(40)}
    assert ticks > 40


def test_options_and_ids_may_be_numbers_of_numpy(site: Site, worker: Worker) -> None:
    code = """
import numpy
rows = [{"id": numpy.int64(k), "prompt": f"row {k}", "seed": numpy.int32(k)} for k in range(3)]
batch = tasks.batch(rows, max_tokens=numpy.int64(4), temperature=numpy.float32(1.0))
print(json.dumps({result.line["id"]: result.line["text"] for result in batch}))
"""
    assert client(site, code) == {str(k): text_of(k) for k in range(3)}


# ------------------------------------------------------------ a mistake of the whole batch


def mistakes() -> Iterator[tuple[str, bytes, list[str], str]]:
    rows = b"".join(b'{"text": "row %d"}\n' % k for k in range(40))
    alike = "the first 10 rows have failed alike: row 0: "
    yield (
        "in.jsonl",
        rows,
        ["--prompt", "{txt}"],
        f"{alike}txt: must be a column of the row, got the columns ['text']",
    )
    yield "in.jsonl", rows, ["--prompt", "{text}", "--set", "max_tokes=4"], "max_tokes: "
    yield "in.jsonl", rows, ["--set", "max_tokes=4"], "max_tokes: "
    yield (
        "in.jsonl",
        rows,
        ["--prompt", "{text}", "--set", "max_tokens=0"],
        f"{alike}max_tokens: must be at least 1",
    )
    yield "in.jsonl", rows, ["--prompt", "{text}", "--set", "max_tokens=10000000"], f"{alike}prompt: must have"
    yield "in.jsonl", rows, ["--prompt", "{text}", "--fields", "txt"], "fields: must be among "
    yield "in.jsonl", rows, [], f"{alike}text: "
    yield "in.jsonl", b"\xe9" + rows.replace(b"row", b"\xe9"), ["--prompt", "{text}"], f"{alike}row: must be UTF-8"
    yield "in.jsonl", rows.decode().encode("utf-16"), ["--prompt", "{text}"], "encoding: must be that of "
    yield (
        "in.jsonl",
        rows,
        ["--prompt", "{text}", "--encoding", "utf-17"],
        "encoding: must be one that Python knows",
    )
    columns = b"id,text\n" + b"".join(b"%d,row %d\n" % (k, k) for k in range(40))
    yield (
        "in.csv",
        columns,
        ["--prompt", "{txt}"],
        "txt: must be a column of the rows, got the columns ['id', 'text']",
    )
    yield "in.csv", columns, ["--column", "prompt=txt"], "txt: must be a column of the rows, got the columns"
    yield "in.csv", columns, [], "text: must be an option, or used by a prompt"
    yield "in.csv", columns.decode().encode("utf-16"), ["--prompt", "{text}"], "encoding: must be that of "
    yield "in.jsonl", columns, ["--prompt", "{text}"], f"{alike}row: must be JSON"
    yield "in.csv", columns, ["--prompt", "{text}", "--set", "seed=@no"], "--set seed: must name a file of text"
    yield "in.csv", columns, ["--set", "prompt={text}"], "--set prompt: is no option of a task"


@pytest.mark.parametrize("mistake", [*mistakes()], ids=lambda mistake: mistake[3][:60])
def test_a_mistake_of_the_whole_batch_ends_it_at_once_and_leaves_nothing(
    site: Site, worker: Worker, tmp_path: Path, mistake: tuple[str, bytes, list[str], str]
) -> None:
    name, content, more, why = mistake
    (tmp_path / name).write_bytes(content)
    code, said = run(site, tmp_path / name, "-o", tmp_path / "out.jsonl", *more)
    assert (code, len(said.splitlines())) == (1, 1), said
    assert said.startswith(f"petiole: {why}")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    eventually(lambda: site.unfinished() == 0, "no row is on its way")


def test_ten_bad_rows_end_a_batch_of_good_ones_only_if_asked_to(
    site: Site, worker: Worker, tmp_path: Path
) -> None:
    """Nine do not; and ten do not with --keep-going."""
    good = "".join(json.dumps({"prompt": f"row {k}", "seed": k}) + "\n" for k in range(5))
    for bad, more in ((9, []), (10, ["--keep-going"])):
        (tmp_path / "in.jsonl").write_text('{"prompt": 3}\n' * bad + good)
        output = tmp_path / f"out-{bad}.jsonl"
        code, said = run(site, tmp_path / "in.jsonl", "-o", output, "--set", "max_tokens=4", *more)
        assert code == 1
        assert "The first that failed: row 0: prompt: " in said
        assert [line.get("text") for line in lines(output)] == [None] * bad + [text_of(k) for k in range(5)]


@pytest.mark.parametrize("output", ["out.xlsx", "no/out.jsonl"])
def test_an_output_that_cannot_be_written_is_refused_before_the_first_row(
    site: Site, worker: Worker, tmp_path: Path, output: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    code, said = run(site, tmp_path / "in.jsonl", "-o", tmp_path / output)
    assert (code, len(said.splitlines())) == (1, 1), said
    assert "Nothing was written" in said or "must end in" in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


# ------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("name", "encoding"), [("in.tsv", "cp1252"), ("in.csv", "utf-16"), ("in.jsonl", "utf-16")]
)
def test_files_of_other_encodings_and_options_of_files(
    site: Site, worker: Worker, tmp_path: Path, name: str, encoding: str
) -> None:
    if name.endswith("jsonl"):
        content = "".join(
            json.dumps({"id": f"é{k}", "text": "row 1"}, ensure_ascii=False) + "\n" for k in range(3)
        )
    else:
        delimiter = "\t" if name.endswith("tsv") else ","
        content = "".join(
            delimiter.join(cells) + "\n" for cells in (["id", "text"], *((f"é{k}", "row 1") for k in range(3)))
        )
    (tmp_path / name).write_bytes(content.encode(encoding))
    (tmp_path / "seed.json").write_text("1\n")
    options = ["--set", f"seed=@{tmp_path / 'seed.json'}", "--set", "max_tokens=4", "--prompt", "{text}"]
    code, said = run(
        site, tmp_path / name, "-o", tmp_path / "out.tsv", "--encoding", encoding, "--fields", "text", *options
    )
    assert code == 0, said
    with (tmp_path / "out.tsv").open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    assert [row["id"] for row in rows] == ["é0", "é1", "é2"]
    assert rows[1]["text"] == text_of(1)


def test_a_parquet_output(site: Site, worker: Worker, tmp_path: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "in.jsonl").write_text(
        "".join(f'{{"prompt": "row {k}", "seed": {k}}}\n' for k in range(40)) + "{}\n"
    )
    code, said = run(site, tmp_path / "in.jsonl", "-o", tmp_path / "out.parquet", "--set", "max_tokens=4")
    assert code == 1, said
    table = parquet.read_table(tmp_path / "out.parquet")
    assert table.column("text").to_pylist() == [text_of(k) for k in range(40)] + [None]
    assert table.column("usage").to_pylist()[0]["completion_tokens"] == 4
    assert table.column("error").to_pylist()[-1]["type"] == "InvalidRequest"


def test_a_notebook_shows_a_bar(site: Site, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name, value in site.environment.items():
        monkeypatch.setenv(name, str(value))
    cell = "import petiole\n[one.good for one in petiole.batch([{'prompt': 'a'}] * 30, max_tokens=2)].count(True)"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(book, kernel_name="python3").execute()
    shown = json.dumps(book.cells[0].outputs)
    assert "30/30" in shown
    assert "'30'" in shown or '"30"' in shown

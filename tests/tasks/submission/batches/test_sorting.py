"""Rows in another order, in bounded memory: the order follows from the rows alone."""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.submission.batches.api import batch
from petiole.tasks.submission.batches.durable.runner import form_of
from petiole.tasks.submission.batches.durable.submitting import spec_of
from petiole.tasks.submission.batches.rows import row_types, sorting
from petiole.tasks.submission.batches.rows.row_types import RequestRows
from petiole.tasks.submission.batches.rows.sorting import Sort
from petiole.tasks.submission.batches.rows.sources import Row

LETTERS = "ab é日\ud800"


def row(number: int, **options: object) -> Row:
    return Row(number, json.dumps(options).encode())


def rows_of(seed: int, count: int) -> list[Row]:
    random_ = random.Random(seed)
    texts = ("".join(random_.choices(LETTERS, k=random_.randrange(1, 12))) for _ in range(count))
    return [row(number, prompt=text) for number, text in enumerate(texts)]


def sorted_by(rows: list[Row], sort: Sort) -> Iterator[Row]:
    return sorting.in_order(rows, sort, RequestRows().beginning, lambda: False)


@pytest.mark.parametrize("run_bytes", [1, 600, 2000, 2**20])
@pytest.mark.parametrize("sort", sorting.SORTS)
def test_whatever_fits_into_memory_the_order_is_the_same(
    monkeypatch: pytest.MonkeyPatch, sort: Sort, run_bytes: int
) -> None:
    monkeypatch.setattr(sorting, "RUN_BYTES", run_bytes)
    rows = rows_of(run_bytes, 150)
    found = list(sorted_by(rows, sort))
    assert sorted(one.number for one in found) == list(range(150))
    assert all(rows[one.number] == one for one in found)
    keys = [(RequestRows().beginning(one), one.number) for one in found]
    assert keys == sorted(keys, key=lambda key: key if sort == "prefix" else (-len(key[0]), key[1]))


def test_a_row_is_written_once_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 runs of one row, of which three are merged at a time: at most six levels."""
    written = 0
    write = sorting._written

    def counted(stack: contextlib.ExitStack, run: Iterable[Any]) -> IO[bytes]:
        nonlocal written
        some = list(run)
        written += len(some)
        return write(stack, some)

    monkeypatch.setattr(sorting, "_written", counted)
    monkeypatch.setattr(sorting, "RUN_BYTES", 1)
    monkeypatch.setattr(sorting, "MOST_RUNS", 3)
    found = [RequestRows().beginning(one) for one in sorted_by(rows_of(5, 300), "prefix")]
    assert found == sorted(found)
    assert 300 < written <= 300 * 6


def test_rows_that_share_a_cache_are_together() -> None:
    system = {"role": "system", "content": "be brief"}
    asked = [[system, {"role": "user", "content": text}] for text in "ab"]
    rows = [
        row(0, task="chat", messages=asked[0]),
        row(1, prompt="be brief: a"),
        row(2, task="chat", messages=asked[0], adapter="x"),
        row(3, task="chat", messages=asked[1]),
        row(4, prompt="be brief: b", salt="s"),
        row(5, prompt="be brief: c"),
        Row(6, b"no JSON"),
    ]
    order = [one.number for one in sorted_by(rows, "prefix")]
    assert order[0] == 6
    for together in ([0, 3], [1, 5]):
        at = order.index(together[0])
        assert order[at : at + 2] == together


def test_lines_of_openai_begin_as_their_bodies_do() -> None:
    pytest.importorskip("msgspec")
    form = row_types.openai_lines()
    same = {"role": "system", "content": "be brief"}
    bodies = [{"model": "m", "messages": [same, {"role": "user", "content": text}]} for text in "ab"]
    one, other = (form.beginning(row(0, custom_id="a", url="", body=body)) for body in bodies)
    assert one != other
    assert one[:-20] == other[:-20]
    assert [form.beginning(wrong) for wrong in (Row(0, b"{"), row(0, body=3))] == ["", ""]


def test_a_stopped_batch_does_not_wait_for_its_order() -> None:
    with pytest.raises(sorting.Stopped):
        list(sorting.in_order(rows_of(0, 3), "length", RequestRows().beginning, lambda: True))


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sorting, "RUN_BYTES", 1)
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(BatchError, match="No space left on device"):
        list(sorted_by(rows_of(0, 3), "prefix"))


def test_an_order_is_of_the_batch(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(InvalidRequest, match="sort: must be one of prefix, length, got prefixes"):
        batch(tmp_path / "in.jsonl", sort="prefixes")  # type: ignore[arg-type]
    made = [batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sort=sort) for sort in ("prefix", None)]
    assert [one._about.get("sort") for one in made] == ["prefix", None]


def test_a_host_of_the_version_before_does_not_know_the_form_of_a_sorted_batch(tmp_path: Path) -> None:
    """It would run the batch in another order, and the next runner would find another batch's journal."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    made = [batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", sort=sort) for sort in ("length", None)]
    spec, plain = map(spec_of, made)
    assert (spec.sort, plain.sort) == ("length", None)
    assert form_of(spec).about() == form_of(plain).about()
    assert RequestRows(**plain.form)
    with pytest.raises(TypeError, match="sort"):
        RequestRows(**spec.form)

"""Whatever Redis's absence interrupts, each row has its line in the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import ResponseError

from petiole.tasks.app.application import app
from petiole.tasks.errors import BatchError, InvalidRequest, Unavailable
from petiole.tasks.submission.batches import batch as loop, progress
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.client import BatchClient, Fleet
from petiole.tasks.submission.batches.in_flight import FairShare, RowInFlight, Sharing
from petiole.tasks.submission.batches.journal import OutputFiles
from petiole.tasks.submission.batches.progress import FirstRows, Progress
from petiole.tasks.submission.batches.rows.output_lines import OutputLine, TaskOutcome
from petiole.tasks.submission.batches.rows.row_types import RequestRows, RowTask, RowWork
from petiole.tasks.submission.batches.rows.sources import Row, Source

ROWS = 40


class Prompt(BatchClient):
    """Workers that have ended a task as soon as it is sent, and of two tasks the second one later."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ended: dict[str, TaskOutcome] = {}
        self.sent: list[str] = []

    def fleet(self) -> Fleet:
        return Fleet(8)

    def send(self, rows: Iterable[RowInFlight]) -> Iterator[tuple[RowInFlight, Exception | None]]:
        for sent in rows:
            self.sent += sent.ids
            yield sent, None

    def outcomes(self, task_ids: Sequence[str]) -> dict[str, TaskOutcome]:
        found = {task_id: self.ended[task_id] for task_id in task_ids if task_id in self.ended}
        self.ended |= {task_id: TaskOutcome({"usage": {"prompt_tokens": 1}}) for task_id in self.sent[::2]}
        if found or not self.sent[::2]:
            self.ended |= {task_id: TaskOutcome({"usage": {"prompt_tokens": 1}}) for task_id in self.sent}
        return found

    def forget(self, task_ids: Sequence[str]) -> None: ...


class Failing(RequestRows):
    """`away`: by the calls of this form, counted, those that find Redis away. A row of every five is refused."""

    def __init__(self, away: dict[str, set[int]]) -> None:
        super().__init__()
        self._away, self._count = away, {"work": 0, "line": 0}

    def _asks(self, what: str) -> None:
        self._count[what] += 1
        if self._count[what] in self._away.get(what, ()):
            raise Unavailable("redis://nowhere", "away")

    def work(self, row: Row) -> RowWork:
        if row.number % 5 == 3:
            raise InvalidRequest("prompt", "must be good", "bad")
        self._asks("work")
        return RowWork([RowTask("tasks.generate", {"prompt": "a"})] * 2, partial(self.made, row))

    def made(self, row: Row, outcomes: Sequence[TaskOutcome]) -> OutputLine:
        self._asks("line")
        assert len(outcomes) == 2
        return OutputLine(True, {"row": row.number})


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Batch]:
    monkeypatch.setattr(loop, "BatchClient", Prompt)
    for pause in ("AWAY_PAUSE_S", "SHORTEST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(loop, pause, 0.0)

    def made(form: Failing, rows: Iterator[Row] | None = None, **given: Any) -> Batch:
        rows = rows or (Row(k, {"k": k}) for k in range(ROWS))
        return Batch(app, Source("rows", rows), form, OutputFiles(str(tmp_path / "out.jsonl")), **given)

    return made


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(
    "away",
    [
        {"work": {1}},
        {"work": {4}},
        {"work": {32}},
        {"work": {2, 3, 4, 5, 20}},
        {"line": {1}},
        {"line": {5}},
        {"line": {1, 2, 3, 30, 31}},
        {"work": {7, 8}, "line": {2, 9}},
    ],
    ids=str,
)
def test_a_form_that_finds_redis_away_loses_no_row(
    make: Callable[..., Batch], tmp_path: Path, away: dict[str, set[int]], in_order: bool
) -> None:
    batch = make(Failing(away), in_order=in_order)
    progress = batch.run()
    assert batch.complete
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    numbers = [line["row"] for line in lines]
    assert (numbers if in_order else sorted(numbers)) == list(range(ROWS))
    assert [line["row"] for line in lines if "error" in line] == [k for k in numbers if k % 5 == 3]
    assert (progress.ended, progress.failed, progress.prompt_tokens) == (ROWS, ROWS // 5, ROWS * 4 // 5 * 2)
    assert isinstance(batch.exchange, Prompt)
    assert len(batch.exchange.sent) == len(set(batch.exchange.sent)) == ROWS * 4 // 5 * 2


def test_a_redis_that_refuses_writes_is_waited_for(
    make: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a master that is about to be demoted, or one that is full."""
    monkeypatch.setattr(loop, "LOOK_S", 0.0)
    left = ["NOREPLICAS Not enough good replicas to write.", "OOM command not allowed"]

    class Refused(Sharing):
        def look(self, queue: str, progress: Progress) -> FairShare:
            if left:
                raise ResponseError(left.pop())
            return super().look(queue, progress)

    batch = make(Failing({}), sharing=Refused())
    assert batch.run().ended == ROWS
    assert batch.complete
    assert not left


def test_rows_that_cannot_be_read_are_not_the_end_of_the_rows(make: Callable[..., Batch], tmp_path: Path) -> None:
    """An error of the caller's iterable is not Redis's absence: a generator that has raised has no more rows."""

    def rows() -> Iterator[Row]:
        yield Row(0, {"k": 0})
        raise ConnectionError("the database is away")

    batch = make(Failing({}), rows=rows())
    with pytest.raises(BatchError, match="rows: no row can be read after 1: the database is away"):
        batch.run()
    assert not batch.complete
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_without_all_rows_is_not_made(
    make: Callable[..., Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(Failing({}))
    end = batch._ended.end
    monkeypatch.setattr(batch._ended, "end", lambda rows: end([one for one in rows if one[0].number != 7]))
    with pytest.raises(BatchError, match=f"rows has {ROWS} rows, and .*journal has {ROWS - 1} results"):
        batch.run()
    assert not (tmp_path / "out.jsonl").exists()


def of(prompts: Iterable[object]) -> Iterator[Row]:
    return (Row(number, {"prompt": prompt}) for number, prompt in enumerate(prompts))


@pytest.mark.parametrize(
    ("prompts", "ends"),
    [
        ([None] * 40, True),
        ([None] * 10, True),
        ([None] * 9, False),
        ([None] * 9 + ["a"] * 31, False),
        (["a"] + [None] * 39, False),
        ([None] * 5 + [3] * 35, True),
    ],
)
def test_the_first_ten_rows_that_fail_alike_end_it_and_leave_nothing(
    make: Callable[..., Batch], tmp_path: Path, prompts: list[object], ends: bool
) -> None:
    """Whatever value each of them has."""

    class Checked(RequestRows):
        def work(self, row: Row) -> RowWork:
            if not isinstance(prompt := row.value()["prompt"], str):
                raise InvalidRequest("prompt", "must be text", repr(prompt))
            return super().work(row)

    batch = make(Checked(), of(prompts), first=FirstRows())
    if not ends:
        assert batch.run().failed == prompts.count(None)
        return
    alike = "the first 10 rows have failed alike: row 0: prompt: must be text, got None. Nothing was written"
    with pytest.raises(BatchError, match=alike):
        batch.run()
    assert not list(tmp_path.iterdir())
    assert make(Checked(), of(prompts)).run().failed == sum(not isinstance(prompt, str) for prompt in prompts)


def test_an_option_of_no_task_and_a_column_of_no_row_are_refused_before_the_first_row() -> None:
    for form, columns, field in (
        (RequestRows(options={"max_tokes": 4}), None, "max_tokes"),
        (RequestRows("chat", {"question": "a"}, prompt="{a}"), None, "question"),
        (RequestRows(prompt="{a} {b}"), ["a"], "b"),
        (RequestRows(columns={"prompt": "b"}), ["a"], "b"),
        (RequestRows(columns={"prompts": "a"}), ["a"], "prompts"),
        (RequestRows(), ["prompt", "b"], "b"),
        (RequestRows(fields=["texts"]), None, "fields"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            form.check(columns)
        assert refused.value.field == field
    RequestRows(options={"question": "a"}, fields=["row", "text"]).check(["task", "x"])
    RequestRows("shop.summarize", options={"any": 1}, fields=["summary"]).check(["other"])
    RequestRows(prompt="{a}").check(["a", "b"])


def test_a_batch_that_ends_draws_how_far_it_is() -> None:
    drawn: list[int] = []
    with progress._now_and_then(lambda shown: drawn.append(shown.ended)) as show:
        for ended in range(100):
            show(Progress(ended=ended))
    assert drawn[0] == 0
    assert drawn[-1] == 99


def test_without_a_watch_the_log_says_once_why_nothing_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with progress.watched("in.jsonl", None) as tell:
        for note in ("", "no worker", "no worker for 2 s", "", "waiting"):
            tell(Progress(note=note))
    assert caplog.messages == ["in.jsonl: no worker", "in.jsonl: waiting"]

"""A form says which tasks a row becomes, and which line their results make (`rows.output_lines`).

`RequestRows` is Petiole's own: a row is the options of one task of any name, or columns for a prompt. OpenAI's
batch lines are a form of the gateway's, which stands above this room: a string names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple, Protocol

from petiole.contract.errors import shorten
from petiole.contract.requests.submission import SUBMISSION
from petiole.contract.requests.validation import validate
from petiole.contract.results.task_result import GenerationResult
from petiole.contract.tasks import TASKS
from petiole.tasks import errors
from petiole.tasks.errors import BatchError, InvalidRequest, PetioleError
from petiole.tasks.submission.batches.rows.frames import is_missing
from petiole.tasks.submission.batches.rows.output_lines import HEAD, OutputLine, TaskOutcome, failed_line, line_of
from petiole.tasks.submission.batches.rows.sources import Row
from petiole.tasks.submission.batches.rows.template import RowTemplate, column

OPENAI = "petiole.gateway.batches.lines"
_NO_OPTIONS = ("id", "task")
"""What rows have beside options."""


class NotRun(BatchError):  # noqa: N818
    """A row has not ended when its batch did. `code`: OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RowTask(NamedTuple):
    """A task to submit, by its name in messages. `options`: its own, and those of its submission."""

    task: str
    options: Mapping[str, Any]


class RowWork(NamedTuple):
    """What a row becomes: tasks, and a line when they have ended. `line` asks no server: their outcomes alone
    decide how the row has ended."""

    calls: Sequence[RowTask]
    line: Callable[[Sequence[TaskOutcome]], OutputLine]


class Fault(NamedTuple):
    """What is wrong with an input. `row`: counted from 0; None: with all of it. `param`: the field."""

    code: str
    message: str
    row: int | None = None
    param: str | None = None


class RowType(Protocol):
    def about(self) -> dict[str, Any]:
        """What this form does with its rows, as JSON: two batches that differ in it are two."""

    def work(self, row: Row) -> RowWork:
        """May read Redis. Raises `InvalidRequest` and `Unavailable`."""

    def beginning(self, row: Row) -> str:
        """The row's prompt, as text of any form: rows whose prompts begin alike, and that may share a cache, begin
        alike in it. Empty: the row becomes no task."""

    def refusal(self, row: Row, error: Exception) -> OutputLine:
        """The line of a row that has become no task."""

    def faults(self, rows: Iterable[Row]) -> Iterator[Fault]:
        """What is wrong with these rows as a whole, such as two of one name."""

    def told(self, name: str, status: str, at: int) -> None:
        """A durable batch of this form has ended, at this time in seconds."""


@dataclass
class RequestRows:
    """Rows are requests. `task`: of rows that name none. `options`: of all rows; a row's own win. `prompt`: with
    columns in braces; the row is data then, and has no options of its own but those that `columns` names, by
    option. `fields`: the parts of a result that lines have; None: see `rows.output_lines`."""

    task: str = "generate"
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._template = None if self.prompt is None else RowTemplate(self.prompt)
        if self._template is not None:
            self._subject(self.task, "")

    def check(self, columns: Sequence[str] | None) -> None:
        """Raises `InvalidRequest` for what would be every row's error. `columns`: of all rows; None: unknown."""
        are_data = self._template is not None or bool(self.columns)
        if columns is not None and are_data:
            had = f"the columns {shorten([*columns])}"
            for name in [*(self._template.columns if self._template else ()), *self.columns.values()]:
                if name not in columns:
                    raise InvalidRequest(name, "must be a column of the rows", had)
        if (task := TASKS.get(named(self.task))) is None:
            return  # a task whose options and results nobody declares
        tasks = [task] if are_data else [*TASKS.values()]  # a row may name its task
        known = {*chain.from_iterable(one.request.model_fields for one in tasks)}
        for name in {**self.options, **self.columns}.keys() - known:
            validate(task.request, {name: self.options.get(name)})
        if columns is not None and not are_data and "task" not in columns:
            for name in columns:
                if name not in {*known, *_NO_OPTIONS, *SUBMISSION}:
                    limit = "must be an option, or used by a prompt such as 'Summarize: {text}'"
                    raise InvalidRequest(name, limit, "a column of the rows")
        for name in self.fields or ():
            if name not in (fields := {*HEAD, *GenerationResult.model_fields}):
                raise InvalidRequest("fields", f"must be among {', '.join(sorted(fields))}", name)

    def about(self) -> dict[str, Any]:
        said = {
            "task": self.task,
            "options": dict(self.options),
            "prompt": self.prompt,
            "columns": dict(self.columns),
            "system": self.system,
            "fields": self.fields and list(self.fields),
        }
        about: dict[str, Any] = json.loads(json.dumps(said, default=str))
        return about

    def work(self, row: Row) -> RowWork:
        return RowWork([self._call(row)], partial(line_of, row, fields=self.fields))

    def _call(self, row: Row) -> RowTask:
        value = row.value()
        if self._template is not None or self.columns:
            given = {option: column(value, name) for option, name in self.columns.items()}
            subject = {} if self._template is None else self._subject(self.task, self._template.fill(value))
            return RowTask(named(self.task), {**self.options, **given, **subject})
        task = value.get("task", self.task)
        if not isinstance(task, str):
            raise InvalidRequest("task", "must be a task's name", shorten(task))
        own = {name: value[name] for name in value if name not in _NO_OPTIONS}
        for name in own:
            if is_missing(own[name]):
                raise InvalidRequest(name, "must have a value", "nan")
        if submission := sorted(own.keys() & SUBMISSION):
            raise InvalidRequest(submission[0], "is of the batch, not of a row", shorten(own[submission[0]]))
        return RowTask(named(task), {**self.options, **own})

    def beginning(self, row: Row) -> str:
        try:
            call = self._call(row)
        except InvalidRequest:
            return ""
        return beginning_of(call.options, (call.task, call.options.get("adapter")))

    def _subject(self, task: str, text: str) -> dict[str, Any]:
        known = TASKS.get(named(task))
        match known.filled if known else None:
            case "messages":
                before = [] if self.system is None else [{"role": "system", "content": self.system}]
                return {"messages": [*before, {"role": "user", "content": text}]}
            case "texts":
                return {"texts": [text]}
            case None:
                raise InvalidRequest("prompt", f"has no place in {task}: give its options as columns", text)
            case option:
                return {option: text}

    def refusal(self, row: Row, error: Exception) -> OutputLine:
        return failed_line(row, errors.describe(error))

    def faults(self, rows: Iterable[Row]) -> Iterator[Fault]:
        yield from ()

    def told(self, name: str, status: str, at: int) -> None: ...


_SUBJECTS = (
    "prompt", "instructions", "input", "messages", "question", "object", "query", "texts", "documents", "pairs",
)  # fmt: skip


def beginning_of(options: Mapping[str, Any], before: Sequence[Any]) -> str:
    """See `RowType.beginning`. `before`: what else tells caches apart."""
    image = blake2b(str(options.get("image", "")).encode(errors="surrogatepass"), digest_size=8).hexdigest()
    told = [*before, options.get("salt"), image]
    parts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in told]
    parts += [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name in _SUBJECTS
        if (value := options.get(name)) is not None
    ]
    return "\0".join(parts)


def named(task: str) -> str:
    """A task's name in messages."""
    return task if "." in task else f"tasks.{task}"


def openai_lines(**options: Any) -> RowType:
    """The form of OpenAI's batch lines. Raises `PetioleError` without the gateway's packages."""
    try:
        form: RowType = import_module(OPENAI).BatchLines(**options)
    except ImportError as error:
        raise PetioleError(f"OpenAI's batch lines need 'petiole[gateway]': {error}") from None
    return form


def is_openai_line(row: Row) -> bool:
    try:
        value = row.value()
    except InvalidRequest:
        return False
    return {"custom_id", "url", "body"} <= value.keys()

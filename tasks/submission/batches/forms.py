"""A form says which tasks a row becomes, and what line their results make.

`Requests` is Petiole's own: a row is the options of one task of any name, or columns for a prompt. OpenAI's batch
lines are a form of the gateway's, which stands above this room: a string names it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from petiole.tasks import errors
from petiole.tasks.errors import BatchError, InvalidRequest, PetioleError
from petiole.tasks.requests.celery_options import SUBMISSION
from petiole.tasks.requests.kinds import CONTINUED
from petiole.tasks.requests.names import CHAT, EMBED
from petiole.tasks.submission.batches.rows.sources import Row
from petiole.tasks.submission.batches.rows.template import Template

OPENAI = "petiole.gateway.batches.lines"
NOT_SHOWN = ("attempt", "timing", "token_ids")
"""Fields of results that lines have only where they are asked for: two runs do not agree in them, or they double
the size."""


class NotRun(BatchError):  # noqa: N818
    """A row has not ended when its batch did. `code`: OpenAI's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Call(NamedTuple):
    """A task to submit, by its name in messages. `options`: its own, and those of its submission."""

    task: str
    options: Mapping[str, Any]


class Outcome(NamedTuple):
    """How a task has ended: with a result, or with an error as `errors.describe` gives it."""

    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def usage(self) -> Mapping[str, int]:
        return (self.result or {}).get("usage") or {}


class Line(NamedTuple):
    """How a row has ended. `value`: one JSON object."""

    good: bool
    value: dict[str, Any]

    @property
    def json(self) -> bytes:
        """Without a line feed. What JSON does not know, such as a date in an `id`, is text."""
        return json.dumps(self.value, ensure_ascii=False, default=str).encode(errors="replace")


class Work(NamedTuple):
    """What a row becomes: tasks, and a line when they have ended. `line` asks no server: their outcomes alone
    decide how the row has ended."""

    calls: Sequence[Call]
    line: Callable[[Sequence[Outcome]], Line]


class Fault(NamedTuple):
    """What is wrong with an input. `row`: counted from 0; None: with all of it. `param`: the field."""

    code: str
    message: str
    row: int | None = None
    param: str | None = None


class Form(Protocol):
    def about(self) -> dict[str, Any]:
        """What this form does with its rows, as JSON: two batches that differ in it are two."""

    def work(self, row: Row) -> Work:
        """May read Redis. Raises `InvalidRequest` and `Unavailable`."""

    def beginning(self, row: Row) -> str:
        """The row's prompt, as text of any form: rows whose prompts begin alike, and that may share a cache, begin
        alike in it. Empty: the row becomes no task."""

    def refusal(self, row: Row, error: Exception) -> Line:
        """The line of a row that has become no task."""

    def faults(self, rows: Iterable[Row]) -> Iterator[Fault]:
        """What is wrong with these rows as a whole, such as two of one name."""

    def told(self, name: str, status: str, at: int) -> None:
        """A durable batch of this form has ended, at this time in seconds."""


@dataclass
class Requests:
    """Rows are requests. `task`: of rows that name none. `options`: of all rows; a row's own win. `prompt`: with
    columns in braces; the row is data then, and has no options of its own but those that `columns` names, by
    option. `fields`: the parts of a result that lines have; None: all but `NOT_SHOWN`."""

    task: str = "generate"
    options: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    fields: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._template = None if self.prompt is None else Template(self.prompt)
        if self._template is not None:
            self._subject(self.task, "")

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

    def work(self, row: Row) -> Work:
        return Work([self._call(row)], partial(self._line, row))

    def _call(self, row: Row) -> Call:
        value = row.value()
        if self._template is not None or self.columns:
            given = {option: _column(value, name) for option, name in self.columns.items()}
            subject = {} if self._template is None else self._subject(self.task, self._template.fill(value))
            return Call(named(self.task), {**self.options, **given, **subject})
        task = value.get("task", self.task)
        if not isinstance(task, str):
            raise InvalidRequest("task", "must be a task's name", errors.shorten(task))
        own = {name: value[name] for name in value if name not in ("id", "task")}
        if submission := sorted(own.keys() & SUBMISSION):
            raise InvalidRequest(
                submission[0], "is of the batch, not of a row", errors.shorten(own[submission[0]])
            )
        return Call(named(task), {**self.options, **own})

    def beginning(self, row: Row) -> str:
        try:
            call = self._call(row)
        except InvalidRequest:
            return ""
        return beginning_of(call.options, (call.task, call.options.get("adapter")))

    def _subject(self, task: str, text: str) -> dict[str, Any]:
        if named(task) == CHAT:
            before = [] if self.system is None else [{"role": "system", "content": self.system}]
            return {"messages": [*before, {"role": "user", "content": text}]}
        if named(task) == EMBED:
            return {"texts": [text]}
        if named(task) not in CONTINUED:
            raise InvalidRequest("prompt", f"has no place in {task}: give its options as columns", text)
        return {CONTINUED[named(task)]: text}

    def _line(self, row: Row, outcomes: Sequence[Outcome]) -> Line:
        (outcome,) = outcomes
        if outcome.error is not None:
            return Line(False, {**self._head(row), "error": _shown(outcome.error)})
        result = outcome.result or {}
        chosen = self.fields or [name for name in result if name not in NOT_SHOWN]
        return Line(True, {**self._head(row), **{name: result.get(name) for name in chosen}})

    def refusal(self, row: Row, error: Exception) -> Line:
        return Line(False, {**self._head(row), "error": _shown(errors.describe(error))})

    def faults(self, rows: Iterable[Row]) -> Iterator[Fault]:
        yield from ()

    def told(self, name: str, status: str, at: int) -> None: ...

    @staticmethod
    def _head(row: Row) -> dict[str, Any]:
        head: dict[str, Any] = {"row": row.number}
        try:
            value = row.value()
        except InvalidRequest:
            return head
        return {**head, "id": value["id"]} if "id" in value else head


_SUBJECTS = (
    "prompt", "instructions", "input", "messages", "question", "object", "query", "texts", "documents", "pairs",
)  # fmt: skip


def beginning_of(options: Mapping[str, Any], before: Sequence[Any]) -> str:
    """See `Form.beginning`. `before`: what else tells caches apart."""
    image = blake2b(str(options.get("image", "")).encode(errors="surrogatepass"), digest_size=8).hexdigest()
    told = [*before, options.get("salt"), image]
    parts = [value if isinstance(value, str) else json.dumps(value, default=str) for value in told]
    parts += [
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for name in _SUBJECTS
        if (value := options.get(name)) is not None
    ]
    return "\0".join(parts)


def _column(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise InvalidRequest(
            name, f"must be a column of the row, which has {errors.shorten(list(row))}", "nothing"
        )
    return row[name]


def _shown(error: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": error.get("type"), "message": error.get("message")}


def named(task: str) -> str:
    """A task's name in messages."""
    return task if "." in task else f"tasks.{task}"


def openai_lines(**options: Any) -> Form:
    """The form of OpenAI's batch lines. Raises `PetioleError` without the gateway's packages."""
    try:
        form: Form = import_module(OPENAI).BatchLines(**options)
    except ImportError as error:
        raise PetioleError(f"OpenAI's batch lines need 'petiole[gateway]': {error}") from None
    return form


def is_openai_line(row: Row) -> bool:
    try:
        value = row.value()
    except InvalidRequest:
        return False
    return {"custom_id", "url", "body"} <= value.keys()

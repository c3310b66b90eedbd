"""Keeps users' text out of the log: prompts, answers, and what a bad request says in their place.

An exception's message may quote any of them, and so may a traceback. So at INFO and above, a record of Petiole,
Celery or kombu shows an exception without its message, but for exceptions that never have text of users: those of
Redis, of the operating system, and the like. Of an invalid request it shows the option. The task's result has the
whole message. The log line of a generation has the generation's figures instead of its text.

The records are changed as they are made, so that all handlers agree: those of Celery, and those of an application
that configures its own log. Loggers of the application are not touched, but that what they log of others stays in
its line (`petiole.plain`)."""

from __future__ import annotations

import ast
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import redis
from amqp.exceptions import AMQPError
from kombu.exceptions import OperationalError

from petiole import plain
from petiole.contract.requests.count import CountRequest
from petiole.contract.tasks import TASKS
from petiole.gpu_worker import exceptions as engine_errors
from petiole.tasks import errors
from petiole.tasks.errors import GenerationFailed
from petiole.tasks.submission.task import take_result

LIBRARIES = ("petiole", "celery", "kombu")
ENGINE = ("petiole.gpu_worker.threads.loop", "petiole.gpu_worker.runtime")
"""Loggers of the part of the engine that handles tokens, not text. Their exceptions are shown in full."""

_OPTIONS = {
    *(option for task in TASKS.values() for option in task.request.model_fields),
    *CountRequest.model_fields,
    *("args", "constraint", "headers", "image", "kwargs", "message", "serializer"),
}
_WITHOUT_TEXT = (
    *(OSError, MemoryError, AssertionError, ImportError, redis.RedisError, AMQPError, OperationalError),
    *(engine_errors.ModelError, errors.ResultTooLarge, errors.WorkersLost, errors.NoWorker),
)
_OWN_WITHOUT_TEXT = (*_WITHOUT_TEXT, ArithmeticError, IndexError, RuntimeError)
"""Also without text of users where Petiole's own code raises them. A task of the application's may write text into
a RuntimeError."""

MOST_CAUSES = 10


class Words(str):
    """Text that `%r` does not quote."""

    __repr__ = str.__str__


def install() -> None:
    """Change the records of this process from now on."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(figures_for_text)
    make = logging.getLogRecordFactory()
    if not getattr(make, "discreet", False):
        logging.setLogRecordFactory(_discreet(plain.factory(make)))


LOGGERS = ("celery.worker.strategy", "celery.app.trace")
"""The loggers that log when a task was received, and how it ended."""


def _discreet(make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def made(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        if record.levelno >= logging.INFO and record.name.partition(".")[0] in LIBRARIES:
            without_text(record)
        return record

    made.discreet = made.plain = True  # type: ignore[attr-defined]
    return made


def without_text(record: logging.LogRecord) -> None:
    """Replace the exceptions of a record, and leave out the arguments of tasks."""
    if record.name.startswith(ENGINE):
        return
    known = _OWN_WITHOUT_TEXT if record.name.startswith("petiole.") else _WITHOUT_TEXT
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        record.exc_text, record.exc_info = in_full(error, known), None
    if isinstance(record.args, dict):
        facts = record.args
        if "exc" in facts:
            facts = {**facts, "exc": _quoted(str(facts["exc"])) if error is None else in_a_line(error, known)}
        if "traceback" in facts:
            facts = {**facts, "traceback": record.exc_text or ""}
        record.args = facts
    elif record.args:
        record.args = tuple(_argument(value, known) for value in record.args)


def _argument(value: object, known: tuple[type[BaseException], ...]) -> object:
    if isinstance(value, BaseException):
        return Words(in_a_line(value, known))
    if isinstance(value, dict) and "kwargs" in value:  # a request, as `celery inspect` shows it
        return {name: one for name, one in value.items() if name not in {"args", "kwargs"}}
    return value


def in_a_line(error: BaseException, known: tuple[type[BaseException], ...] = _WITHOUT_TEXT) -> str:
    """The exception's class, with its message if that has no text of users."""
    name = type(error).__name__
    if isinstance(error, errors.InvalidRequest | engine_errors.InvalidRequest):
        return f"{name}: {_option(error.field)}"
    petioles = isinstance(error, errors.PetioleError) and not isinstance(error, _WITHOUT_TEXT)
    if not isinstance(error, known) or petioles:
        return name
    message = str(error).partition(", with args beginning with")[0]  # Redis quotes a command that it does not know
    return plain.line(f"{name}: {message}") if message else name


def in_full(error: BaseException, known: tuple[type[BaseException], ...]) -> str:
    """The traceback of an exception and of what caused it."""
    lines: list[str] = []
    for one in reversed([*_chain(error)]):
        lines += ["Traceback (most recent call last):\n", *_frames(one.__traceback__), in_a_line(one, known), "\n"]
    return "".join(lines).rstrip("\n")


def _chain(error: BaseException) -> Iterator[BaseException]:
    at: BaseException | None = error
    for _ in range(MOST_CAUSES):
        if at is None:
            return
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _frames(tb: TracebackType | None) -> list[str]:
    return traceback.StackSummary.extract(traceback.walk_tb(tb), lookup_lines=True).format()


def _quoted(shown: str) -> str:
    """What Celery quotes of an exception, without its message."""
    retried = re.match(r"Retry in [^:]*", shown)
    if retried is not None:
        return retried[0]
    name = (re.match(r"\w+", shown) or [""])[0]
    if name != errors.InvalidRequest.__name__:
        return name
    try:
        call = ast.parse(shown, mode="eval").body
        return f"{name}: {_option(ast.literal_eval(call.args[0]))}"  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, AttributeError, IndexError, RecursionError, MemoryError):
        return name


def _option(field: object) -> str:
    """The option in a field such as `prompt[0]`. The rest of a field may be a user's."""
    found = re.match(r"(\w+)(\[\d{1,9}\])?", field) if isinstance(field, str) else None
    return found[0] if found and found[1] in _OPTIONS else "an option that no task has"


def figures_for_text(record: logging.LogRecord) -> bool:
    """Log filter: a generation's figures in place of its text. Without it, Celery's trace logs the generated text,
    and as run time only that of the task's body.

    For structured logs, Celery puts the facts of a log line into `record.data`. Here a generation's `data` has its
    figures.
    No task's `data` has its arguments: they are prompts, and in chains and chords the texts of other tasks."""
    facts = record.args
    if not isinstance(facts, dict) or "id" not in facts:
        return True
    data = {name: value for name, value in facts.items() if name not in {"args", "kwargs"}}
    if "return_value" in facts:
        try:
            result = take_result(str(facts["id"]))  # found by its id: `shadow` may change the name
        except GenerationFailed:
            eager = facts.get("name") in TASKS  # inside another task
            data["return_value"] = "a generation" if eager else _without_text(str(facts["return_value"]))
            record.args = {**facts, "return_value": data["return_value"]}
        else:
            del data["return_value"]
            figures = {name: result[name] for name in ("finish_reason", "attempt")}
            data |= {
                "runtime": result["timing"]["total_ms"] / 1000,
                **result["usage"],
                **result["timing"],
                **figures,
            }
            record.args = {**facts, "runtime": f"{data['runtime']:.3f}", "return_value": _in_words(result)}
    record.data = data
    return True


def _without_text(shown: str) -> str:
    """The result of another task, unless it is a user's text, or may have some."""
    return shown if re.fullmatch(r"None|True|False|-?\d{1,20}(\.\d{1,20})?", shown) else "a result"


def _in_words(result: dict[str, Any]) -> str:
    usage, timing = result["usage"], result["timing"]
    return (
        f"{usage['completion_tokens']} tokens ({result['finish_reason']}), "
        + ("no first token, " if timing["ttft_ms"] is None else f"TTFT {timing['ttft_ms']:.0f} ms, ")
        + f"waited {timing['queue_ms']:.0f} ms, "
        f"prompt {usage['prompt_tokens']} tokens, {usage['cached_prompt_tokens']} cached"
        + (f", attempt {result['attempt']}" if result["attempt"] > 1 else "")
    )

"""Changes to the program `celery -A tasks worker`: its exit and its log.

The first Ctrl-C is a warm shutdown like SIGTERM and exits with status 0. A shutdown does not wait for a model that
is being loaded, and waits at most `drain_seconds` for foreign tasks. A URL without a password is printed without a
masked password. The log line of a generation has the generation's figures instead of its text."""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
from typing import Any, NoReturn

from celery.app import log
from celery.apps import worker as stock
from celery.platforms import EX_OK
from kombu.connection import Connection as StockConnection

from petiole import plain
from petiole.contract.settings.urls import SENTINEL, redacted, scheme
from petiole.contract.tasks import TASKS
from petiole.tasks.errors import GenerationFailed
from petiole.tasks.submission.task import take_result


class Worker(stock.Worker):  # type: ignore[misc]
    def install_platform_tweaks(self, worker: Any) -> None:
        super().install_platform_tweaks(worker)
        stock.install_worker_int_handler(worker, exitcode=EX_OK)

    def start(self) -> None:
        super().start()
        if getattr(self.pool, "abandoned", False):
            leave(self.exitcode or EX_OK)


def leave(status: int) -> NoReturn:
    """Exit the process, although some threads cannot be stopped.

    A normal exit would wait for a download's threads. If it met a thread inside native code,
    the process would abort.
    """
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(status)


class Connection(StockConnection):
    """A connection that does not treat sentinels as failover brokers: all of them name the same master."""

    @property
    def sentinels(self) -> list[str]:
        return [url for url in self.alt if scheme(url) == SENTINEL]

    def completes_cycle(self, retries: int) -> bool:
        connection: Any = super()
        return bool(self.sentinels or connection.completes_cycle(retries))

    def maybe_switch_next(self) -> None:
        connection: Any = super()
        if not self.sentinels:
            connection.maybe_switch_next()

    def as_uri(self, include_password: Any = False, mask: Any = "**", *more: Any, **options: Any) -> str:
        if self.sentinels and not include_password:
            return redacted(";".join(self.sentinels))
        return str(super().as_uri(include_password, mask if self.password else "", *more, **options))


def task_in_a_line() -> None:
    """A task's id and name begin a line of the loggers of tasks; their formatter takes them from the task."""
    stock = log.TaskFormatter.formatMessage

    def formatted(formatter: Any, record: logging.LogRecord) -> str:
        record.__dict__.update({name: plain.line(str(record.__dict__[name])) for name in ("task_id", "task_name")})
        return str(stock(formatter, record))

    log.TaskFormatter.formatMessage = formatted


LOGGERS = ("celery.worker.strategy", "celery.app.trace")
"""The loggers that log when a task was received, and how it ended."""


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

"""Changes to the program `celery -A tasks worker`: its exit and its log.

The first Ctrl-C is a warm shutdown like SIGTERM and exits with status 0. A shutdown does not wait for a model that
is being loaded, and waits at most `drain_seconds` for foreign tasks. A URL without a password is printed without a
masked password."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any, NoReturn

from celery.app import log
from celery.apps import worker as stock
from celery.platforms import EX_OK
from kombu.connection import Connection as StockConnection

from petiole import plain
from petiole.contract.settings.urls import SENTINEL, redacted, scheme


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

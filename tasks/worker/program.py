"""`celery -A tasks worker` as a program: what it says about itself, and how it ends.

Celery's own, but for this: the first Ctrl-C is the same warm shutdown as SIGTERM and ends with status 0, a worker
that is told to end while it loads its model does not wait for that, a URL without a password shows none, and a
generation's line in the log has its figures instead of its text.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any, NoReturn

from celery.apps import worker as stock
from celery.platforms import EX_OK
from kombu.connection import Connection as StockConnection

from tasks.definitions import SCHEMAS
from tasks.sentinels import SCHEME as SENTINEL
from tasks.settings import redacted, scheme
from tasks.worker.results import take_result


class Worker(stock.Worker):  # type: ignore[misc]
    def install_platform_tweaks(self, worker: Any) -> None:
        super().install_platform_tweaks(worker)
        stock.install_worker_int_handler(worker, exitcode=EX_OK)

    def start(self) -> None:
        super().start()
        if getattr(self.pool, "load_abandoned", False):
            leave(self.exitcode or EX_OK)


def leave(status: int) -> NoReturn:
    """End this process beside threads that nothing can stop.

    The interpreter would wait for those of a download, and a thread that it ends inside foreign code aborts.
    """
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(status)


class Connection(StockConnection):
    """Sentinels are no brokers to be tried one after the other: whichever is asked, it names the same one."""

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


def figures_for_text(record: logging.LogRecord) -> bool:
    """A filter for the log of Celery's trace, which times the hand-over alone and would show everybody's text."""
    facts = record.args
    if isinstance(facts, dict) and "return_value" in facts and facts.get("name") in SCHEMAS:
        result = take_result(str(facts["id"]))
        usage, timing = result["usage"], result["timing"]
        record.args = {
            **facts,
            "runtime": f"{timing['total_ms'] / 1000:.3f}",
            "return_value": f"{usage['completion_tokens']} tokens ({result['finish_reason']}), "
            f"TTFT {timing['ttft_ms'] or 0:.0f} ms, waited {timing['queue_ms']:.0f} ms, "
            f"prompt {usage['prompt_tokens']} tokens, {usage['cached_prompt_tokens']} cached",
        }
    return True

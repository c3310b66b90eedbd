"""Waiting for a group that has tasks of two apps.

Celery has the result backend of one of the apps wait for all results of a group. That backend is not told of the
other app's results: `get()` returned None in their place, or waited for ever. (Celery's documentation says that it
does not support results of several backends.) Here each result of such a group is waited for by its own backend.
The backends need not even be the same.

`install` replaces a method of Celery's `ResultSet`. All other groups are waited for as before."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

from celery import Celery
from celery.result import ResultSet

from petiole.tasks.app.result_consumer import nodes

AT_LEAST_S = 0.001
"""Before Celery 5.7 a time limit of 0 is none."""


def install(ours: type[Celery]) -> None:
    """Have groups with results of several apps, one of them of the type `ours`, waited for in this way. The app of
    the group counts, too: Celery gives a group the app of the canvas that it is in."""
    stock = ResultSet.iter_native

    def is_mixed(results: ResultSet) -> bool:
        apps = [one.app for one in [results, *nodes(results)]]
        return any(isinstance(app, ours) for app in apps) and any(app is not apps[0] for app in apps)

    @functools.wraps(stock)
    def iter_native(self: ResultSet, timeout: float | None = None, *more: Any, **options: Any) -> Any:
        return (_each if is_mixed(self) else stock)(self, timeout, *more, **options)

    ResultSet.iter_native = iter_native


def _each(results: ResultSet, timeout: float | None, *more: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    """What `iter_native` gives: the id of each result, and what is stored, or the members of a group."""
    give_up_at = None if timeout is None else time.monotonic() + timeout
    options |= dict(zip(("interval", "no_ack", "on_message", "on_interval"), more, strict=False))
    for one in results:
        left_s = None if give_up_at is None else max(AT_LEAST_S, give_up_at - time.monotonic())
        one.get(timeout=left_s, propagate=False, disable_sync_subtasks=False, **options)
        yield one.id, one.children if isinstance(one, ResultSet) else one._get_task_meta()

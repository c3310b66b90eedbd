"""Celery's Redis result backend, for callers that outlive a Redis that is away.

The stock one subscribes to a task's result while the task is being submitted, although it looks for the result
again when somebody asks for it; gives up for good when it cannot; and forgets what it was subscribed to before.
Here submitting takes one round trip less, and cannot fail for it. Who waits for a result hears `Unavailable` when
Redis stays away, and may ask again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from celery import states
from celery.backends import redis as stock

from tasks.connections import leave_replicas
from tasks.errors import Unavailable
from tasks.settings import redacted


class ResultConsumer(stock.ResultConsumer):  # type: ignore[misc]
    def start(self, initial_task_id: str, **_: Any) -> None:
        self._subscribe_anew()
        self._consume_from(initial_task_id)

    def drain_events(self, timeout: float | None = None) -> None:
        if self._pubsub is None and self.subscribed_to:
            self._subscribe_anew()
        super().drain_events(timeout)

    def on_wait_for_pending(self, result: Any, **options: Any) -> None:
        with self.reconnect_on_error():  # which looks for results, too
            super().on_wait_for_pending(result, **options)

    def _subscribe_anew(self) -> None:
        """To everything that was subscribed to before the connection was lost."""
        with self._locked():
            if self._pubsub is None:
                with self.reconnect_on_error():
                    self._reconnect_pubsub()

    @contextlib.contextmanager
    def reconnect_on_error(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:  # nothing came for as long as the caller would wait
            raise
        except self._connection_errors:
            try:
                self._reconnect()
            except self._connection_errors as error:
                raise Unavailable(redacted(self.backend.url), str(error)) from error


class RedisBackend(stock.RedisBackend):  # type: ignore[misc]
    ResultConsumer = ResultConsumer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stored: set[str] = set()

    def _get_pool(self, **params: Any) -> Any:
        pool = super()._get_pool(**params)
        leave_replicas(pool)
        return pool

    @contextlib.contextmanager
    def having_stored(self, task_ids: Sequence[str]) -> Iterator[None]:
        """While this is open, the successes of these tasks are stored already: by `tasks.worker.completions`."""
        self._stored.update(task_ids)
        try:
            yield
        finally:
            self._stored.difference_update(task_ids)

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == states.SUCCESS and task_id in self._stored:
            return result
        return super().store_result(task_id, result, state, *args, **kwargs)

    def on_task_call(self, producer: object, task_id: str) -> None:
        """Subscribe when somebody asks for the result, and not for everything that is submitted."""

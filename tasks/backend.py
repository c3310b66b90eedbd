"""Celery's Redis result backend, made to recover from an outage of Redis.

The stock backend subscribes to a task's result when the task is submitted, although `get()` looks the result up
again; does not recover if that fails; does not restore its earlier subscriptions; and waits for ever on a server
that has become a replica. This one subscribes only when a result is waited for, so submitting takes one round trip
less and cannot fail because of the subscription. A waiting caller also polls for its results, gets `Unavailable`
if Redis stays unreachable, and may call `get()` again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from celery import states
from celery.backends import redis as stock

from tasks.errors import Unavailable
from tasks.masters import MasterPool
from tasks.sentinels import SYNC, SentinelUrl
from tasks.settings import redacted

POLL_S = 2.0
"""How often results that are waited for are also polled: pub/sub may lose messages."""


class ResultConsumer(stock.ResultConsumer):  # type: ignore[misc]
    _poll_at = 0.0
    _received = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._process = os.getpid()

    def _reset_after_fork(self) -> None:
        """In a forked child, drop the inherited subscription: both processes would read from it."""
        if self._process != os.getpid():
            self._process, self._pubsub = os.getpid(), None
            self._reset_sync()

    def consume_from(self, task_id: str) -> Any:
        self._reset_after_fork()
        return super().consume_from(task_id)

    def start(self, initial_task_id: str, **_: Any) -> None:
        self._subscribe_anew()
        self._consume_from(initial_task_id)

    def drain_events(self, timeout: float | None = None) -> None:
        self._reset_after_fork()
        if self._pubsub is None and self.subscribed_to:
            self._subscribe_anew()
        if time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + POLL_S
            self._poll_results()
        super().drain_events(timeout)

    def on_state_change(self, meta: Any, message: Any) -> None:
        """Ignores the message of a result that was looked up before it was read: Celery would keep the last 8,192
        of those, however large."""
        self._received = self._received or message is not None
        if message is None or self._get_key_for_task(meta["task_id"]) in self.subscribed_to:
            super().on_state_change(meta, message)

    def _poll_results(self) -> None:
        """If the subscription was silent although results are stored, reconnect it, which also delivers them."""
        received, self._received = self._received, False
        with self._locked():
            waiting = list(self.subscribed_to)
        if received or not waiting:
            return
        with self.reconnect_on_error():
            metas = map(self._decode_result, filter(None, self.backend.client.mget(waiting)))
            if any(meta["status"] in states.READY_STATES for meta in metas):
                self._reconnect_pubsub()

    def on_wait_for_pending(self, result: Any, **options: Any) -> None:
        """Look up what is stored. Celery would sleep for `interval` after that if a group has unfinished tasks."""
        with self.reconnect_on_error():  # reconnecting also looks up the results
            super().on_wait_for_pending(result, **{**options, "interval": 0})

    def _subscribe_anew(self) -> None:
        """Subscribe again to all channels that were subscribed to before the connection was lost."""
        with self._locked():
            if self._pubsub is None:
                with self.reconnect_on_error():
                    self._reconnect_pubsub()

    @contextlib.contextmanager
    def reconnect_on_error(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:  # the caller's own timeout
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

    @property
    def ConnectionPool(self) -> type[MasterPool]:  # noqa: N802 - Celery's name
        return MasterPool

    @contextlib.contextmanager
    def having_stored(self, task_ids: Sequence[str]) -> Iterator[None]:
        """In this context successes of these tasks are not stored: `tasks.worker.completions` has done so."""
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
        """Do not subscribe at submission: `get()` subscribes."""


class SentinelBackend(RedisBackend):
    """`RedisBackend` that asks the sentinels for the address of the master."""

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> dict[str, Any]:
        others = {name: value for name, value in defaults.items() if name not in {"host", "port"}}
        return {**others, **SentinelUrl.parse(url).parameters(self._transport_options, SYNC)}

    def as_uri(self, include_password: bool = False) -> str:
        return self.url if include_password else redacted(self.url)

"""Celery's Redis result backend, made to recover from an outage of Redis, and one for all threads of a process.

The stock backend subscribes to a task's result when the task is submitted, although `get()` looks the result up
again; does not recover if that fails; does not restore its earlier subscriptions; and waits for ever on a server
that has become a replica. This one subscribes only when a result is waited for, so submitting takes one round trip
less and cannot fail because of the subscription. A waiting caller also polls for its results, gets `Unavailable`
if Redis stays unreachable, and may call `get()` again.

All threads, or greenlets, share one backend (`result_backend_thread_safe`) and its subscription. One of those that
wait reads the socket, for all of them. With gevent or eventlet the stock backend reads it in its own greenlet,
which never ends, or for good with the first error. Without sharing, each request served by a greenlet would leave
such a greenlet and two connections.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from celery import states
from celery.backends import redis as stock
from celery.backends.asynchronous import Drainer

from tasks.errors import Unavailable
from tasks.masters import MasterPool
from tasks.sentinels import SYNC, SentinelUrl
from tasks.settings import redacted

POLL_S = 2.0
"""How often results that are waited for are also polled: pub/sub may lose messages."""

FAILED_FOR_ALL_S = 1.0
"""For so long after one thread has failed to reconnect the others do not try again, one after the other."""


class ResultConsumer(stock.ResultConsumer):  # type: ignore[misc]
    _poll_at = 0.0
    _failed_at = float("-inf")
    _received = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drainer = Drainer(self)
        self._process = os.getpid()
        self._listeners: list[Callable[[Any], object]] = []

    def _reset_after_fork(self) -> None:
        """In a forked child, drop the inherited subscription: both processes would read from it."""
        if self._process != os.getpid():
            self._pubsub = None
            self._reset_sync()
            self._process = os.getpid()

    def consume_from(self, task_id: str) -> Any:
        self._reset_after_fork()
        return super().consume_from(task_id)

    def cancel_for(self, task_id: str) -> None:
        """Called by each result that is dropped: even while the interpreter ends, or between a fork and gevent's
        replacement of the locks."""
        key = self._get_key_for_task(task_id)
        if self._process != os.getpid():
            self.subscribed_to.discard(key)
        elif key in self.subscribed_to:
            super().cancel_for(task_id)

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
        for listener in list(self._listeners):
            listener(meta)
        if message is None or self._get_key_for_task(meta["task_id"]) in self.subscribed_to:
            super().on_state_change(meta, message)

    def _poll_results(self) -> None:
        """Deliver stored results. If there are some and nothing was heard, the subscription is dead: reconnect."""
        received, self._received = self._received, False
        with self._locked():
            waiting = list(self.subscribed_to)
        if not waiting:
            return
        with self.reconnect_on_error():
            metas = list(map(self._decode_result, filter(None, self.backend.client.mget(waiting))))
            stored = [meta for meta in metas if meta["status"] in states.READY_STATES]
            if stored and not received:
                self._reconnect_pubsub()
            else:
                with self._locked():
                    for meta in stored:
                        self.on_state_change(meta, None)

    def _wait_for_pending(self, result: Any, on_message: Any = None, **options: Any) -> Iterator[None]:
        """Celery keeps one `on_message` for all who wait. Here each hears of its own results."""
        if on_message is None:
            yield from super()._wait_for_pending(result, **options)
            return
        own = set(_task_ids(result))

        def listener(meta: Any) -> None:
            if meta["task_id"] in own:
                on_message(meta)

        self._listeners.append(listener)
        try:
            yield from super()._wait_for_pending(result, **options)
        finally:
            self._listeners.remove(listener)

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
        except self._connection_errors as lost:
            if time.monotonic() - self._failed_at < FAILED_FOR_ALL_S:
                raise Unavailable(redacted(self.backend.url), str(lost)) from lost
            try:
                self._reconnect()
            except self._connection_errors as error:
                self._failed_at = time.monotonic()
                raise Unavailable(redacted(self.backend.url), str(error)) from error


def _task_ids(result: Any) -> Iterator[str]:
    """The ids of a result, or of those in a group's."""
    if hasattr(result, "results"):
        for one in result.results:
            yield from _task_ids(one)
    else:
        yield result.id


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

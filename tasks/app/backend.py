"""Celery's Redis result backend, changed: it recovers from an outage of Redis, and all threads share one backend.

The stock backend subscribes to a task's result when the task is submitted, although `get()` looks the result up
again. It does not recover if that subscription fails, does not restore its earlier subscriptions, and waits for
ever on a server that has become a replica. This backend subscribes only when a caller waits for a result. So
submitting takes one round trip less, and cannot fail because of the subscription. A waiting caller also polls for
its results, gets `Unavailable` if Redis stays unreachable, and may call `get()` again.

All threads, or greenlets, share one backend (`result_backend_thread_safe`) and its subscription. One of the
waiting threads reads the socket for all. With gevent or eventlet the stock backend reads the socket in a greenlet
of its own. That greenlet never ends, or ends for good with the first error. Without sharing, each request that a
greenlet serves would leave such a greenlet and two connections."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis
from celery import states
from celery.backends import redis as stock
from celery.exceptions import BackendError

from petiole.tasks.app.awaiting import ResultConsumer
from petiole.tasks.app.stored_errors import StoredErrors
from petiole.tasks.servers.masters import MasterPool, caused_by_call
from petiole.tasks.servers.sentinels import SYNC, pool_parameters
from petiole.tasks.urls import SentinelUrl, redacted

logger = logging.getLogger(__name__)

REFUSALS = (redis.RedisError, OSError, BackendError)
"""The errors of a result backend that is away or full. They do not mean that a result is wrong."""


def refuses(error: BaseException) -> bool:
    """Whether `error` means that the backend refuses a result now and may take the result later."""
    return isinstance(error, REFUSALS) and not caused_by_call(error)


class RedisBackend(StoredErrors, stock.RedisBackend):  # type: ignore[misc]
    ResultConsumer = ResultConsumer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stored: set[str] = set()
        self._here = threading.local()

    @property
    def ConnectionPool(self) -> type[MasterPool]:  # noqa: N802 - Celery's name
        return MasterPool

    @contextlib.contextmanager
    def having_stored(self, task_ids: Sequence[str]) -> Iterator[None]:
        """In this context, successes of these tasks are not stored, because the worker has stored them
        together."""
        self._stored.update(task_ids)
        try:
            yield
        finally:
            self._stored.difference_update(task_ids)

    @contextlib.contextmanager
    def trying_once(self) -> Iterator[None]:
        """In this context, on this thread, an error of Redis is raised at once. (Celery would retry, and sleep
        between its tries.) After the first refusal, every further store is refused, too. Otherwise, if Redis
        answers again just then, Celery would store a failure in place of the success.

        A key that should hold a result but holds something else counts as missing, and is overwritten. Outside
        this context, callers that wait for the result get the error."""
        before = getattr(self._here, "refusals", None)
        self._here.refusals = []
        try:
            yield
        finally:
            self._here.refusals = before

    @property
    def _refusals(self) -> list[Exception] | None:
        return getattr(self._here, "refusals", None)

    def exception_safe_to_retry(self, exc: Exception) -> bool:
        return self._refusals is None and bool(super().exception_safe_to_retry(exc))

    def ensure(self, fun: Callable[..., Any], args: Sequence[Any], **policy: Any) -> Any:
        return fun(*args) if self._refusals is not None else super().ensure(fun, args, **policy)

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        try:
            meta: dict[str, Any] = super()._get_task_meta_for(task_id)
            return {"result": None, **meta}
        except Exception as error:
            if self._refusals is None or refuses(error):
                raise
            logger.error("task %s: its stored result cannot be read and is overwritten: %r", task_id, error)
            return {"status": states.PENDING, "result": None}

    def store_result(self, task_id: str, result: Any, state: str, *args: Any, **kwargs: Any) -> Any:
        if state == states.SUCCESS and task_id in self._stored:
            return result
        refusals = self._refusals
        if refusals:
            raise refusals[0]
        try:
            return super().store_result(task_id, result, state, *args, **kwargs)
        except REFUSALS as error:
            if refusals is not None:
                refusals.append(error)
            raise

    def iter_native(self, result: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Celery misses a result of the group that another thread receives just as this one begins to wait for it.
        `GroupResult.get()` returned None in its place."""
        missing = {node.id: node for node in result.results}
        for task_id, meta in super().iter_native(result, **options):
            missing.pop(task_id, None)
            yield task_id, meta
        for task_id, node in missing.items():
            yield task_id, node._cache if hasattr(node, "_cache") else node.children

    def on_task_call(self, producer: object, task_id: str) -> None:
        """Do not subscribe at submission: `get()` subscribes."""


def trying_once(backend: object) -> contextlib.AbstractContextManager[None]:
    """`RedisBackend.trying_once`. Other backends retry as they are configured."""
    return backend.trying_once() if isinstance(backend, RedisBackend) else contextlib.nullcontext()


class SentinelBackend(RedisBackend):
    """`RedisBackend` that asks the sentinels for the address of the master."""

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> dict[str, Any]:
        others = {name: value for name, value in defaults.items() if name not in {"host", "port"}}
        return {**others, **pool_parameters(SentinelUrl.parse(url), self._transport_options, SYNC)}

    def as_uri(self, include_password: bool = False) -> str:
        return self.url if include_password else redacted(self.url)

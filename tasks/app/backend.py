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

from collections.abc import Iterator
from typing import Any

import redis
from celery.backends import redis as stock
from celery.exceptions import BackendError

from petiole.contract.settings.urls import SentinelUrl, redacted
from petiole.tasks.app.result_consumer import ResultConsumer
from petiole.tasks.app.stored_errors import StoredErrors
from petiole.tasks.servers.failover import MasterPool, caused_by_call
from petiole.tasks.servers.sentinels import SYNC, pool_parameters

REFUSALS = (redis.RedisError, OSError, BackendError)
"""The errors of a result backend that is away or full. They do not mean that a result is wrong."""


def refuses(error: BaseException) -> bool:
    """Whether `error` means that the backend refuses a result now and may take the result later."""
    return isinstance(error, REFUSALS) and not caused_by_call(error)


class RedisBackend(StoredErrors, stock.RedisBackend):  # type: ignore[misc]
    ResultConsumer = ResultConsumer

    @property
    def ConnectionPool(self) -> type[MasterPool]:  # noqa: N802 - Celery's name
        return MasterPool

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        meta: dict[str, Any] = super()._get_task_meta_for(task_id)
        return {"result": None, **meta}

    def iter_native(self, result: Any, **options: Any) -> Iterator[tuple[str, Any]]:
        """Celery misses a result of the group that another thread receives just as this one begins to wait for it.
        `GroupResult.get()` returned None in its place."""
        missing = {node.id: node for node in result.results}
        for task_id, meta in super().iter_native(result, **options):
            missing.pop(task_id, None)
            yield task_id, meta
        for task_id, node in missing.items():
            yield task_id, node._cache if hasattr(node, "_cache") else node.children

    def _set(self, key: str, value: Any, expires: int | None = None) -> None:
        """Celery's, by `SET`: redis-py warns of `SETEX`, and where warnings are errors it would store nothing."""
        with self.client.pipeline() as pipe:
            pipe.set(key, value, ex=(self.expires if expires is None else expires) or None)
            pipe.publish(key, value)
            pipe.execute()

    def on_task_call(self, producer: object, task_id: str) -> None:
        """Do not subscribe at submission: `get()` subscribes."""


class SentinelBackend(RedisBackend):
    """`RedisBackend` that asks the sentinels for the address of the master."""

    def _params_from_url(self, url: str, defaults: dict[str, Any]) -> dict[str, Any]:
        others = {name: value for name, value in defaults.items() if name not in {"host", "port"}}
        return {**others, **pool_parameters(SentinelUrl.parse(url), self._transport_options, SYNC)}

    def as_uri(self, include_password: bool = False) -> str:
        return self.url if include_password else redacted(self.url)

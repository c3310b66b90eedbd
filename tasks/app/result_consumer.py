"""How callers wait for results in Redis: one subscription for each process, with any version of Celery.

Only Celery 5.7 serializes the use of its subscription, and only Celery 5.7 lets two result objects of one task
wait. So the lock, the reset after a fork, the reading of the socket and the loop of waiting callers are Petiole's
own. Celery decides, in all versions, which result objects wait, and what happens to a result.

    get() ─► look the result up ─► drain_events, until the result is there
                                      │ one thread waits at the socket, the others wait for that thread
                                      │ every POLL_S: look up all awaited results
                                      └ connection lost: subscribe again; if that fails: `Unavailable`

All operations on the subscription hold its lock. A result that is dropped unsubscribes, and the garbage collector
may drop it in the middle of such an operation. So `cancel_for` only notes the result, and the holder of the lock
unsubscribes when it releases the lock. Whoever drops a result does not wait for a Redis that is away: the next
caller that waits for a result subscribes again."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from celery import states
from celery.backends.asynchronous import BaseResultConsumer
from celery.result import AsyncResult, EagerResult

from petiole.contract.settings.urls import redacted
from petiole.tasks.errors import Unavailable

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""How often awaited results are also polled, because pub/sub may lose messages."""

FAILED_FOR_ALL_S = 1.0
"""After one thread has failed to reconnect, the other threads do not try again for this long."""

WAIT_S = 1.0
"""The longest wait at the socket. A reconnect closes the socket, but does not wake the thread that waits there."""


class WaitObserver(Protocol):
    """An observer of a waiting caller. While nothing comes, it is called about once a second."""

    def silent(self) -> None: ...


@runtime_checkable
class Watched(Protocol):
    """An app with a `watcher`: makes a `WaitObserver` for the queues that a caller waits for."""

    def watch(self, queues: Iterable[str | None]) -> WaitObserver | None: ...


class Waiting:
    """The loop of waiting callers, until `ready` is kept. Celery uses this object as its `drainer`."""

    def __init__(self, consumer: ResultConsumer) -> None:
        self._consumer = consumer

    def start(self) -> None:
        """Does nothing. Celery's other drainers start a thread or a greenlet; here a waiting thread reads for
        all."""

    def stop(self) -> None:
        """The inverse of `start`."""

    def drain_events_until(
        self,
        ready: Any,
        timeout: float | None = None,
        interval: float = WAIT_S,
        on_interval: Callable[[], object] | None = None,
        wait: object = None,
    ) -> Iterator[None]:
        give_up_at = None if timeout is None else time.monotonic() + timeout
        while not ready.ready:
            if give_up_at is not None and time.monotonic() >= give_up_at:
                raise TimeoutError
            with contextlib.suppress(TimeoutError):
                self._consumer.drain_events(timeout=interval)
                yield
            if on_interval:
                on_interval()


class _Depth(threading.local):
    """How many `_locked` blocks this thread is in."""

    value = 0


class ResultConsumer(BaseResultConsumer):  # type: ignore[misc]
    """The subscription of a process, and the awaited results."""

    _pubsub: Any = None
    _poll_at = 0.0
    _failed_at = float("-inf")
    _received = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drainer = Waiting(self)
        self.subscribed_to: set[Any] = set()
        self._connection_errors = self.backend.connection_errors
        self._process = os.getpid()
        self._listeners: list[_Listener] = []
        self._reset_sync()

    # ------------------------------------------------------------ one operation at a time

    def _reset_sync(self) -> None:
        self._pubsub_lock = threading.RLock()
        self._pubsub_read = threading.Condition(self._pubsub_lock)
        self._socket_waiter = False
        self._depth = _Depth()
        self._to_unsubscribe: set[Any] = set()

    def _reset_after_fork(self) -> None:
        """In a forked child, drop the inherited subscription: both processes would read from it."""
        if self._process != os.getpid():
            self._pubsub = None
            self._reset_sync()
            self._process = os.getpid()

    def on_after_fork(self) -> None:
        self._reset_after_fork()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._pubsub_lock:
                self._depth.value += 1
                try:
                    yield
                finally:
                    self._depth.value -= 1
        except BaseException:
            try:
                self._unsubscribe_dropped()
            except Exception:  # an error about other results must not hide this operation's own
                logger.exception("cannot unsubscribe from the results that were dropped")
            raise
        self._unsubscribe_dropped()

    def _unsubscribe_dropped(self) -> None:
        """Unsubscribe from dropped results, without waiting for the lock: its holder does this before it releases
        the lock. A key that is added between these two moments is handled by the next turn of the loop."""
        while self._to_unsubscribe and not self._depth.value and self._pubsub_lock.acquire(blocking=False):
            self._depth.value += 1
            try:
                while self._to_unsubscribe:
                    key = self._to_unsubscribe.pop()
                    if key in self.subscribed_to:
                        self.subscribed_to.discard(key)
                        if self._pubsub is not None:
                            try:
                                self._pubsub.unsubscribe(key)
                            except self._connection_errors:
                                self._pubsub = None
            finally:
                self._depth.value -= 1
                self._pubsub_lock.release()

    # ------------------------------------------------------------ the subscription

    def _key(self, task_id: str) -> Any:
        return self.backend.get_key_for_task(task_id)

    def start(self, initial_task_id: str, **_: Any) -> None:
        self._subscribe_anew()
        self.consume_from(initial_task_id)

    def stop(self) -> None:
        with self._locked():
            if self._pubsub is not None:
                self._pubsub.close()

    def consume_from(self, task_id: str) -> None:
        self._reset_after_fork()
        key = self._key(task_id)
        with self._locked():
            self._to_unsubscribe.discard(key)
            if key in self.subscribed_to:
                return
            self.subscribed_to.add(key)
            if self._pubsub is None:
                self._subscribe_anew()
            else:
                with self.reconnect_on_error():
                    self._pubsub.subscribe(key)

    def cancel_for(self, task_id: str) -> None:
        """Called by each result that is dropped, even while the interpreter ends, or after a fork before gevent
        has replaced the locks."""
        if not self.subscribed_to:
            return
        key = self._key(task_id)
        if self._process != os.getpid():
            self.subscribed_to.discard(key)
        elif key in self.subscribed_to:
            self._to_unsubscribe.add(key)
            self._unsubscribe_dropped()

    def _subscribe_anew(self) -> None:
        """Subscribe again to all channels that were subscribed to before the connection was lost."""
        with self._locked():
            if self._pubsub is None:
                with self.reconnect_on_error():
                    self._reconnect_pubsub()

    def _reconnect_pubsub(self) -> None:
        """Make a new connection and subscription. First look up the tasks that may have ended while there was
        none. If no result is awaited after that, the next awaited result subscribes."""
        with self._locked():
            self._pubsub = None
            self.backend.client.connection_pool.reset()
            if waiting := list(self.subscribed_to):
                for meta in filter(None, self.backend.client.mget(waiting)):
                    self.on_state_change(self.backend.decode_result(meta), None)
            self.subscribed_to -= self._to_unsubscribe  # the new connection knows nothing of these
            self._to_unsubscribe.clear()
            if self.subscribed_to:
                pubsub = self.backend.client.pubsub(ignore_subscribe_messages=True)
                pubsub.subscribe(*self.subscribed_to)
                self._pubsub = pubsub

    def _reconnect(self) -> None:
        self.backend.ensure(self._reconnect_pubsub, ())

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

    # ------------------------------------------------------------ reading it

    def drain_events(self, timeout: float | None = None) -> None:
        """Wait for a message, and handle it. One thread waits at the socket, without the lock, so that other
        threads can subscribe. The others wait for that thread, because the message that it reads may be theirs."""
        self._reset_after_fork()
        if self._pubsub is None and self.subscribed_to:
            self._subscribe_anew()
        if time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + POLL_S
            self._poll_results()
        wait_s = WAIT_S if timeout is None else min(timeout, WAIT_S)
        with self._locked():
            pubsub = self._pubsub
            if pubsub is not None:
                if self._socket_waiter:
                    self._pubsub_read.wait(wait_s)
                    return
                if self._handle_one(pubsub, wait_s):
                    return
                self._socket_waiter = True
        if pubsub is None:
            time.sleep(wait_s)
            return
        readable = False
        try:
            readable = _readable(pubsub, wait_s)
        finally:
            with self._locked():
                self._socket_waiter = False
                try:
                    if readable and self._pubsub is pubsub:
                        self._handle_one(pubsub, wait_s)
                finally:
                    self._pubsub_read.notify_all()

    def _handle_one(self, pubsub: Any, wait_s: float) -> bool:
        """Handle a message if one has arrived. Bytes that are already read or decrypted do not show at the
        socket."""
        with self.reconnect_on_error():
            connection = pubsub.connection
            if not (pubsub.subscribed and connection is not None and connection.can_read(timeout=0)):
                return False
            message = pubsub.get_message(timeout=wait_s)  # waits for the rest of a message
            if message and message["type"] == "message":
                self.on_state_change(self.backend.decode_result(message["data"]), message)
        return True

    def _poll_results(self) -> None:
        """Deliver stored results. If there are some, but no message has come, the subscription is dead:
        reconnect."""
        for listener in list(self._listeners):
            for task_id in listener.unfinished:  # another result object of this task may have unsubscribed
                self.consume_from(task_id)
        with self._locked():
            waiting = list(self.subscribed_to)
        if not waiting:
            return
        with self.reconnect_on_error():
            metas = list(map(self.backend.decode_result, filter(None, self.backend.client.mget(waiting))))
            stored = [meta for meta in metas if meta["status"] in states.READY_STATES]
            with self._locked():
                while self._pubsub is not None and self._handle_one(self._pubsub, 0):
                    pass  # a message published before the look-up was not missed
            received, self._received = self._received, False
            if stored and not received:
                self._reconnect()
            else:
                with self._locked():
                    for meta in stored:
                        self.on_state_change(meta, None)

    # ------------------------------------------------------------ what becomes of a result

    def on_state_change(self, meta: Any, message: Any) -> None:
        """Ignores the message of a result that has already been looked up. Celery would keep the last 8,192 of
        these messages, however large."""
        self._received = self._received or message is not None
        task_id = meta.get("task_id")
        if task_id is None:  # PENDING: nothing is stored
            return
        if message is None or self._key(task_id) in self.subscribed_to:
            super().on_state_change(meta, message)
            if meta["status"] in states.READY_STATES:
                self.cancel_for(task_id)
            if message is None and meta["status"] in {states.SUCCESS, states.FAILURE}:
                self._forget_message(task_id)
        for listener in list(self._listeners):
            listener.hear(meta)

    def _forget_message(self, task_id: str) -> None:
        """Forget a result for which no object waits. Celery keeps it for the next object, which looks it up
        anyway."""
        kept = self.backend._pending_messages
        with contextlib.suppress(KeyError):
            kept.total -= len(kept.pop(task_id))

    def _wait_for_pending(self, result: Any, on_message: Any = None, **options: Any) -> Iterator[None]:
        """Wait for a result. Celery keeps one `on_message` for all waiting callers, and before 5.7 one waiting
        result object for each task. Here each caller hears of its own results."""
        listener = _Listener(result, on_message)
        self._listeners.append(listener)
        watch = self.app.watch(listener.queues) if isinstance(self.app, Watched) else None
        try:
            for _ in super()._wait_for_pending(result, **options):
                yield
                if watch is not None:
                    watch.silent()
        finally:
            self._listeners.remove(listener)

    def on_wait_for_pending(self, result: Any, **options: Any) -> None:
        """Look up stored results. If a group has unfinished tasks, Celery would then sleep for `interval`."""
        with self.reconnect_on_error():  # reconnecting also looks up the results
            for meta in result._iter_meta(**{**options, "interval": 0}):
                if meta is not None:
                    self.on_state_change(meta, None)


class _Listener:
    """One caller that waits for a task or for the tasks of a group."""

    def __init__(self, result: Any, on_message: Callable[[Any], object] | None) -> None:
        self._nodes = {str(node.id): node for node in nodes(result)}
        self._on_message = on_message

    @property
    def unfinished(self) -> list[str]:
        return [task_id for task_id, node in self._nodes.items() if node._cache is None]

    @property
    def queues(self) -> set[str]:
        """The queues of the awaited generations, as far as this process knows them."""
        known = (getattr(node, "submitted_to", None) for node in self._nodes.values())
        return {queue for queue in known if queue is not None}

    def hear(self, meta: Any) -> None:
        node = self._nodes.get(meta["task_id"])
        if node is not None:
            if self._on_message is not None:
                self._on_message(meta)
            if node._cache is None:
                node._maybe_set_cache(meta)


def nodes(result: Any) -> Iterator[AsyncResult]:
    """The results that can be awaited: a task's own, or those of a group's tasks."""
    if hasattr(result, "results"):
        for one in result.results:
            yield from nodes(one)
    elif not isinstance(result, EagerResult):
        yield result


def _readable(pubsub: Any, wait_s: float) -> bool:
    """Whether something arrives within `wait_s`. Runs without the lock, so it leaves redis-py's buffers alone."""
    if not pubsub.subscribed:
        return bool(pubsub.subscribed_event.wait(wait_s))
    socket = getattr(pubsub.connection, "_sock", None)
    if socket is None:  # disconnected: the next read reconnects
        return True
    try:
        if not hasattr(select, "poll"):
            with selectors.DefaultSelector() as selector:
                selector.register(socket, selectors.EVENT_READ)
                return bool(selector.select(wait_s))
        poller = select.poll()
        poller.register(socket, select.POLLIN)
        return bool(poller.poll(wait_s * 1000))
    except (OSError, ValueError):  # closed or replaced meanwhile
        return True

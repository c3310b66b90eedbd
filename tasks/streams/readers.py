"""Readers of a task's stream. Late, reconnecting and concurrent readers all get every delta once, in order.

`Stream` and `AsyncStream` perform the operations of the protocol in `following`, blocking and with asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import redis
from celery.backends.base import DisabledBackend
from celery.exceptions import TimeoutError as GaveUp
from celery.result import AsyncResult, EagerResult
from kombu.exceptions import OperationalError

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.app import interop
from petiole.tasks.app.application import App, app as celery_app
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.errors import StreamError
from petiole.tasks.fleet import control
from petiole.tasks.fleet.availability import QueueWatch
from petiole.tasks.servers import connections
from petiole.tasks.servers.replies import DamagedKey
from petiole.tasks.streams import subscriptions
from petiole.tasks.streams.async_subscriptions import Subscription
from petiole.tasks.streams.polling import IdleStream, stream_poller
from petiole.tasks.streams.presentation import StreamPresentation
from petiole.tasks.streams.protocol import LEAST_S, ConnectionLost, Parse, Step, StreamProtocol, read
from petiole.tasks.traces import spans
from petiole.tasks.wire.keys import INTEREST_TTL_S, stream_keys

if TYPE_CHECKING:
    from celery import Celery
    from redis.client import PubSub

    from petiole.contract.types import GenerationDict


interop.install(App)


Command = tuple[Any, ...]


class AsyncGeneration(AsyncResult):  # type: ignore[misc]
    """Celery's `AsyncResult` of a generation."""

    id: str
    submitted_to: str | None = None
    """The queue, if this process has submitted the task."""
    trace: Mapping[str, str] | None = None
    """The headers of its trace, if this process has submitted the task."""

    if TYPE_CHECKING:

        @overload
        def get(
            self, timeout: float | None = None, propagate: Literal[True] = True, **options: Any
        ) -> GenerationDict: ...
        @overload
        def get(
            self, timeout: float | None = None, propagate: bool = True, **options: Any
        ) -> GenerationDict | Exception: ...
        def get(self, *args: Any, **options: Any) -> Any: ...

    @overload
    async def aget(
        self, timeout: float | None = None, propagate: Literal[True] = True, **options: Any
    ) -> GenerationDict: ...
    @overload
    async def aget(
        self, timeout: float | None = None, propagate: bool = True, **options: Any
    ) -> GenerationDict | Exception: ...
    async def aget(self, timeout: float | None = None, propagate: bool = True, **options: Any) -> Any:
        """`get` for asyncio. It waits as a reader of the stream, which needs no thread. Then a thread looks the
        result up."""
        give_up_at = None if timeout is None else time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                if not await LOOKUPS.run(self.ready):
                    await self._ended()
        except TimeoutError:
            raise GaveUp("The operation timed out.") from None
        left_s = None if give_up_at is None else max(0.001, give_up_at - time.monotonic())
        return await LOOKUPS.run(self.get, left_s, propagate, **options)

    async def _ended(self) -> None:
        """Read the stream to its end. The result, not the stream, says how the task ended."""
        with contextlib.suppress(Exception):
            async with contextlib.aclosing(AsyncStream(self, app=self.app)) as deltas:
                async for _ in deltas:
                    pass


class EagerGeneration(EagerResult):  # type: ignore[misc]
    """The result of an eager task, in place of an `AsyncGeneration`."""

    async def aget(self, *args: Any, **options: Any) -> Any:
        return self.get(*args, **options)


class _StreamReader:
    """Base of `Stream` and `AsyncStream`: runs the protocol.

    `_step` is the next operation of the protocol, or None after a delta, when the generator must be resumed.
    """

    _shared = False

    def __init__(
        self,
        task: AsyncResult | str,
        timeout_s: float | None = None,
        cancel_on_disconnect: bool = False,
        app: Celery | None = None,
        heartbeat_s: float | None = None,
        *,
        prepared: bool = False,
        start: int = 0,
        unread_s: float | None = None,
        parsed: bool = False,
        fresh: bool = False,
        parse: Parse = StreamDelta.model_validate_json,
    ) -> None:
        """`unread_s`, with `cancel_on_disconnect`: a reader that stops cancels nothing. The task is cancelled when
        it has had no reader for this long, so that a client can come back, to another process perhaps. `fresh`:
        the reader is opened before the task is submitted."""
        self.task_id = task if isinstance(task, str) else str(task.id)
        self.app = app or celery_app
        self._keys = stream_keys(self.task_id)
        self._cancel_on_disconnect = cancel_on_disconnect
        self._unread_s = unread_s
        self._interest_ttl_s = INTEREST_TTL_S if unread_s is None else max(1, round(unread_s))
        self._interest_renewed_at = 0.0
        self._complete = self._closed = False
        self._process = os.getpid()
        if parsed and start:
            raise ValueError(f"start: must be 0 with parsed, got {start!r}")
        self._showing = StreamPresentation(self.task_id) if parsed else None
        self._prepared = prepared
        self._steps = (
            StreamProtocol(self.task_id, timeout_s, start=start).end_as(task.state, task.result)
            if isinstance(task, EagerResult)
            else read(
                self.task_id,
                timeout_s,
                heartbeat_s,
                prepared=prepared or parsed,
                start=start,
                fresh=fresh,
                shared=self._shared,
                parse=parse,
            )
        )
        self._watch = QueueWatch([getattr(task, "submitted_to", None)], timeout_s)
        self._step: Step | None = next(self._steps)
        self._span = spans.reading(self.task_id, getattr(task, "trace", None))

    @property
    def result(self) -> AsyncGeneration:
        """The task's Celery result."""
        result: AsyncGeneration = self.app.AsyncResult(self.task_id)
        return result

    def _advance(self, answer: object) -> Step:
        """Send the last operation's result and return the next step. Raises StopIteration at the end."""
        return self._steps.throw(answer) if isinstance(answer, ConnectionLost) else self._steps.send(answer)

    def _hand_out(self, delta: StreamDelta) -> StreamDelta | None:
        """The delta for the reader; None if the reader has not asked for it."""
        self._step = None
        self._complete = delta.finish_reason is not None
        if not delta.is_heartbeat:
            self._watch.heard()
            if self._span is not None:
                self._span.heard(delta)
        if self._showing is not None:
            delta = self._showing.show(delta)
        return delta if delta.prepared is None or self._prepared else None

    def _leave(self) -> None:
        """The reader reads no further. What it holds of servers is released apart."""
        self._closed = True
        self._steps.close()
        if self._span is not None:
            self._span.end()

    def _damaged(self) -> StreamError:
        return StreamError(f"task {self.task_id}: its stream in Redis is damaged: {self._keys.log} must be a list")

    def _reading(self, operation: Any, *given: Any) -> list[Command] | None:
        """The commands of an operation that reads the log or the state; None for the others. The documented rights
        of a producer allow these commands."""
        log, state = self._keys.log, self._keys.state
        match operation, given:
            case "read_log", (start,):
                return [("LRANGE", log, start, -1), ("LLEN", log)]
            case "read_all", (start,):
                rest: list[Command] = [("HGETALL", state), ("LRANGE", log, 0, 0)]
                return [("LRANGE", log, start, -1), ("LLEN", log), *rest]
            case "read_entries", (places,):
                return [*(("LRANGE", log, place, place) for place in places), ("LLEN", log)]
        return None

    def interest(self) -> list[Command]:
        """The commands that say that the task has a reader, if it is time for them."""
        if not self._interest_is_due():
            return []
        self._interest_renewed_at = time.monotonic()
        return [("SET", self._keys.interest, 1, "EX", self._interest_ttl_s)]

    def _interest_is_due(self) -> bool:
        if not self._cancel_on_disconnect:
            return False
        return time.monotonic() - self._interest_renewed_at >= self._interest_ttl_s / 3

    def _outcome_now(self) -> tuple[str | None, Any]:
        if isinstance(self.app.backend, DisabledBackend):
            return None, None
        meta = self.app.backend.get_task_meta(self.task_id)
        return meta["status"], meta["result"]

    @property
    def _abandoned(self) -> bool:
        return self._cancel_on_disconnect and self._unread_s is None and not self._complete


class Stream(_StreamReader, Iterator[StreamDelta]):
    """Iterator of a task's deltas. The last one has a `finish_reason`. If the task failed, its exception is raised
    after that.

    If the stream may not be read to its end, call `close()`, or use the stream as a context manager.
    """

    _pubsub: PubSub | None = None

    def open(self) -> None:
        """Subscribe now instead of at the first `next()`."""
        if self._step == ("subscribe",):
            self._step = self._advance(self._perform(self._step))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamDelta:
        if self._closed:
            raise StopIteration
        delta: StreamDelta | None = None
        try:
            while delta is None:
                step = self._steps.send(None) if self._step is None else self._step
                while isinstance(step, tuple):
                    step = self._advance(self._perform(step))
                delta = self._hand_out(step)
        except BaseException:  # including StopIteration
            self.close()
            raise
        return delta

    def _perform(self, step: Step) -> Any:
        name, *arguments = step
        try:
            self._make_own()
            if (commands := self._reading(name, *arguments)) is not None:
                interest = self.interest()
                return connections.perform(interest + commands)[len(interest) :]
            return getattr(self, f"_{name}")(*arguments)
        except connections.LOST as error:
            if self._pubsub is not None:
                self._pubsub.close()
                self._pubsub = None
            return ConnectionLost(error)
        except DamagedKey as error:
            raise self._damaged() from error

    def _make_own(self) -> None:
        """In a forked child, give up the subscription, which is the parent's, and go on with a new one."""
        if self._process != os.getpid():
            self._process = os.getpid()
            raise redis.ConnectionError("the process has forked")

    def _subscribe(self) -> None:
        self._pubsub = subscriptions.subscribe(self._keys.channel)

    def _hears(self) -> bool:
        assert self._pubsub is not None
        return subscriptions.hears(self._pubsub)

    def _distrust(self) -> None:
        """Close this subscription, which missed a message, and all idle ones."""
        assert self._pubsub is not None
        self._pubsub.close()
        self._pubsub = None
        subscriptions.forget()

    def _receive(self, left_s: Callable[[], float]) -> bytes | None:
        if interest := self.interest():
            connections.perform(interest)
        assert self._pubsub is not None
        message = subscriptions.data(self._pubsub.get_message(timeout=max(LEAST_S, left_s())))
        if message is None:
            self._watch.silent()
        return message

    def _outcome(self) -> tuple[str | None, Any]:
        return self._outcome_now()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _unsubscribe(self) -> None:
        if (pubsub := self._pubsub) is not None:
            self._pubsub = None
            subscriptions.unsubscribe(pubsub, self._keys.channel)

    def close(self) -> None:
        """Release the connection. With `cancel_on_disconnect`, cancel the task if it is unfinished.

        A forked child that has not read the stream leaves all this to its parent.
        """
        if not self._closed:
            self._leave()
            if self._process == os.getpid():
                self._unsubscribe()
                if self._abandoned:
                    with contextlib.suppress(OperationalError, *connections.LOST):
                        control.cancel(self.task_id, self.app)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


class AsyncStream(_StreamReader, AsyncIterator[StreamDelta]):
    """`Stream` for asyncio."""

    _subscription: Subscription | None = None
    _shared = True

    async def open(self) -> None:
        if self._step == ("subscribe",):
            self._step = self._advance(await self._perform(self._step))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamDelta:
        if self._closed:
            raise StopAsyncIteration
        delta: StreamDelta | None = None
        try:
            while delta is None:
                step = self._steps.send(None) if self._step is None else self._step
                while isinstance(step, tuple):
                    step = self._advance(await self._perform(step))
                delta = self._hand_out(step)
        except StopIteration:
            await self.aclose()
            raise StopAsyncIteration from None
        except BaseException:
            await self.aclose()
            raise
        return delta

    async def _perform(self, step: Step) -> Any:
        name, *arguments = step
        try:
            if (commands := self._reading(name, *arguments)) is not None:
                interest = self.interest()
                return (await connections.aperform(interest + commands))[len(interest) :]
            return await getattr(self, f"_{name}")(*arguments)
        except connections.LOST as error:
            await self._unsubscribe()
            return ConnectionLost(error)
        except DamagedKey as error:
            raise self._damaged() from error

    async def _subscribe(self) -> None:
        self._subscription = Subscription(self._keys.channel)
        await self._subscription.open()

    async def _hears(self) -> bool:
        assert self._subscription is not None
        return await self._subscription.hears()

    async def _distrust(self) -> None:
        assert self._subscription is not None
        await self._subscription.distrust()
        self._subscription = None

    async def _receive(self, left_s: Callable[[], float]) -> bytes | None:
        if interest := self.interest():
            await connections.aperform(interest)
        assert self._subscription is not None
        message = await self._subscription.get(left_s())
        if message is None:
            self._watch.silent()
        return message

    async def _outcome(self) -> tuple[str | None, Any]:
        return await LOOKUPS.run(self._outcome_now)

    async def _quiet(self, entries: int, unannounced: bool) -> bool:
        stream = IdleStream(self.task_id, self.app.backend, entries, unannounced, self.interest())
        look = stream_poller().quiet(stream)
        return await (look if self._subscription is None else self._subscription.unless_heard(look))

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _unsubscribe(self) -> None:
        if (subscription := self._subscription) is not None:
            self._subscription = None
            await subscription.close()

    async def aclose(self) -> None:
        if not self._closed:
            self._leave()
            await asyncio.shield(self._release())  # anyio cancels every `await` after a client has disconnected

    async def _release(self) -> None:
        await self._unsubscribe()
        if self._abandoned:
            with contextlib.suppress(*connections.LOST):
                await control.acancel(self.task_id)

"""Reads a task's stream: late, reconnecting and concurrent readers all get every delta, once and in order.

`_read` is the whole protocol, as a generator that does no input or output: it yields what it wants done
(`("receive", 1.0)`) and is sent the answer, or yields a delta for the reader. `Stream` and `AsyncStream` do the
work, with redis-py and redis.asyncio. `tasks.assembly` decides what is new.

    subscribe ─► read the log ─► receive ◄─────────────────────┐
        ▲                          │ a delta that fits ────────┤ hand it out
        │                          │ a gap ─► read the log ────┤
        │                          │ a second of silence ─► has the task ended? ─► read the log
        └── pause ◄── connection lost (anywhere)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Generator, Iterator
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import redis
from celery.backends.base import DisabledBackend
from celery.states import FAILURE, REVOKED, SUCCESS
from kombu.exceptions import OperationalError
from pydantic import ValidationError

from tasks import connections, errors, fleet
from tasks.app import app as celery_app
from tasks.assembly import StreamAssembler, without
from tasks.errors import StreamError, StreamExpired, StreamTimeout
from tasks.schemas import INTEREST_TTL_S, GenerationResult, StreamDelta, stream_keys

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult
    from redis.asyncio.client import PubSub as AsyncPubSub
    from redis.client import PubSub

SILENCE_S = 1.0  # read the log after so long without a delta: pub/sub promises nothing
LOST_FOR_S = 60.0  # without a connection for so long: give up
_LOG_GONE_FOR = 10  # silences without the log that was there: it has expired
_LAST = {SUCCESS, FAILURE, REVOKED}

Step = StreamDelta | tuple[Any, ...]
Reading = Generator[Step, Any, None]


def new_task_id() -> str:
    return str(uuid4())


def _read(task_id: str, timeout_s: float | None) -> Reading:
    """The protocol. `timeout_s` bounds the wait for each delta."""
    stream = _Following(task_id, timeout_s)
    lost_since: float | None = None
    while True:
        try:
            yield ("subscribe",)
            yield from stream.catch_up()
            lost_since = None
            yield from stream.follow()
            return
        except connections.LOST as error:
            now = time.monotonic()
            lost_since = lost_since or now
            stream.check_time(error)
            if now - lost_since > LOST_FOR_S:
                raise StreamError(
                    f"no connection to the streams' Redis for {LOST_FOR_S:.0f} s: {error}"
                ) from error
            yield ("pause", min(1.0, 0.02 + (now - lost_since) / 2))


class _Following:
    """One reader's state between steps."""

    def __init__(self, task_id: str, timeout_s: float | None) -> None:
        self.task_id, self.timeout_s = task_id, timeout_s
        self.assembler = StreamAssembler()
        self.last_delta_at = time.monotonic()
        self.silences_without_log = 0

    def check_time(self, cause: BaseException | None = None) -> None:
        if self.timeout_s is not None and time.monotonic() - self.last_delta_at >= self.timeout_s:
            raise StreamTimeout(f"task {self.task_id}: no delta for {self.timeout_s:g} s") from cause

    def hand_out(self, deltas: list[StreamDelta]) -> Reading:
        for delta in deltas:
            yield delta
            if delta.error is not None:
                raise errors.rebuild(delta.error)
        if deltas:
            self.last_delta_at = time.monotonic()

    def catch_up(self) -> Generator[Step, Any, bool]:
        """Read the log from where we are; whether there was anything new."""
        while True:
            entries, log_length = yield ("read_log", self.assembler.read_from)
            new = self.assembler.logged([StreamDelta.model_validate_json(raw) for raw in entries])
            if new is not None:
                break
            if log_length == 0:
                self.silences_without_log += 1
                return False
            self.assembler.rewind()
        self.silences_without_log = 0
        yield from self.hand_out(new)
        return bool(new)

    def follow(self) -> Reading:
        assembler = self.assembler
        while not assembler.finished:
            raw = yield ("receive", self.patience())
            if raw is None:
                yield from self.after_silence()
                continue
            new = assembler.published(StreamDelta.model_validate_json(raw))
            if new is None:
                yield from self.catch_up()
            else:
                yield from self.hand_out(new)

    def patience(self) -> float:
        if self.timeout_s is None:
            return SILENCE_S
        return max(0.001, min(SILENCE_S, self.last_delta_at + self.timeout_s - time.monotonic()))

    def after_silence(self) -> Reading:
        """Nothing was heard: perhaps we have lost touch, or the task has ended without a stream."""
        state, result = yield ("outcome",)  # before the log: a task that has ended has written all of it
        unheard = yield from self.catch_up()
        if self.assembler.finished:
            return
        if unheard:
            yield ("subscribe",)
        elif state in _LAST:
            yield from self.end_as(state, result)
        elif self.silences_without_log >= _LOG_GONE_FOR:
            raise StreamExpired(f"task {self.task_id}: its log is gone after token {self.assembler.next}")
        else:
            self.check_time()

    def end_as(self, state: str, result: Any) -> Reading:
        """The task has ended and its log does not say so: it never ran, or the log has expired."""
        self.assembler.finished = True
        last = StreamDelta(
            task_id=self.task_id, attempt=self.assembler.attempt, index=self.assembler.next, token_ids=[], text=""
        )
        if state == REVOKED:
            yield last.model_copy(update={"finish_reason": "cancelled"})
        elif state == FAILURE:
            yield last.model_copy(update={"finish_reason": "error", "error": errors.describe(result)})
            raise result
        else:
            try:
                whole = GenerationResult.model_validate(result)
            except ValidationError:
                raise StreamExpired(f"task {self.task_id}: it has ended, and its log is gone") from None
            parts = whole.model_dump(include={"token_ids", "text", "finish_reason", "stop_reason", "attempt"})
            everything = last.model_copy(update={**parts, "index": 0, "logprobs": whole.logprobs})
            yield without(everything, self.assembler.next, self.assembler.text_length)


class _Reader:
    """What both kinds of stream have in common: the protocol, and where it has got to.

    `_step` is what the protocol wants done next, or None where it has handed out a delta and waits to go on.
    """

    def __init__(
        self,
        task: AsyncResult | str,
        timeout_s: float | None = None,
        cancel_on_disconnect: bool = False,
        app: Celery | None = None,
    ) -> None:
        self.task_id = task if isinstance(task, str) else str(task.id)
        self.app = app or celery_app
        self._keys = stream_keys(self.task_id)
        self._cancel_on_disconnect = cancel_on_disconnect
        self._interest_renewed_at = 0.0
        self._complete = self._closed = False
        self._steps = _read(self.task_id, timeout_s)
        self._step: Step | None = next(self._steps)

    @property
    def result(self) -> AsyncResult:
        """The task's Celery result."""
        return self.app.AsyncResult(self.task_id)

    def _hand_out(self, delta: StreamDelta) -> StreamDelta:
        self._step = None
        self._complete = delta.finish_reason is not None
        return delta

    def _interest_is_due(self) -> bool:
        if not self._cancel_on_disconnect or time.monotonic() - self._interest_renewed_at < INTEREST_TTL_S / 3:
            return False
        self._interest_renewed_at = time.monotonic()
        return True

    def _outcome_now(self) -> tuple[str | None, Any]:
        if isinstance(self.app.backend, DisabledBackend):
            return None, None
        meta = self.app.backend.get_task_meta(self.task_id)
        return meta["status"], meta["result"]

    def _cancel_if_abandoned(self) -> None:
        if self._cancel_on_disconnect and not self._complete:
            with contextlib.suppress(OperationalError, *connections.LOST):
                fleet.cancel(self.task_id, self.app)


class Stream(_Reader, Iterator[StreamDelta]):
    """A task's deltas, the last one with a `finish_reason`; the exception of a failed task follows it.

    Close it, or use it in a `with`, where it may not be read to its end.
    """

    _pubsub: PubSub | None = None

    def open(self) -> None:
        """Subscribe now: before a task is submitted, so that its first delta need not wait for it."""
        if self._step == ("subscribe",):
            self._step = self._perform(self._step)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamDelta:
        if self._closed:
            raise StopIteration
        try:
            step = self._steps.send(None) if self._step is None else self._step
            while not isinstance(step, StreamDelta):
                step = self._perform(step)
        except BaseException:  # the end of the stream, too
            self.close()
            raise
        return self._hand_out(step)

    def _perform(self, step: Step) -> Step:
        name, *arguments = step
        try:
            answer = getattr(self, f"_{name}")(*arguments)
        except connections.LOST as error:
            if self._pubsub is not None:
                self._pubsub.close()
                self._pubsub = None
            return self._steps.throw(error)
        return self._steps.send(answer)

    def _subscribe(self) -> None:
        self._unsubscribe()
        self._pubsub = _take_idle() or connections.streams().pubsub()  # type: ignore[no-untyped-call]
        self._pubsub.subscribe(self._keys.channel)
        _confirmed(self._pubsub, "subscribe", self._keys.channel, connections.REPLY_TIMEOUT_S)

    def _read_log(self, start: int) -> tuple[list[bytes], int]:
        with connections.streams().pipeline(transaction=False) as pipe:
            if self._interest_is_due():
                pipe.set(self._keys.interest, 1, ex=INTEREST_TTL_S)
            pipe.lrange(self._keys.log, start, -1)
            pipe.llen(self._keys.log)
            *_, entries, length = pipe.execute()
        return entries, length

    def _receive(self, patience_s: float) -> bytes | None:
        if self._interest_is_due():
            connections.streams().set(self._keys.interest, 1, ex=INTEREST_TTL_S)
        assert self._pubsub is not None
        return _data(self._pubsub.get_message(timeout=patience_s))

    def _outcome(self) -> tuple[str | None, Any]:
        return self._outcome_now()

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def _unsubscribe(self) -> None:
        if (pubsub := self._pubsub) is not None:
            self._pubsub = None
            _make_idle(pubsub, self._keys.channel)

    def close(self) -> None:
        """Give the connection back. With `cancel_on_disconnect`, an unfinished task is cancelled."""
        if not self._closed:
            self._closed = True
            self._steps.close()
            self._unsubscribe()
            self._cancel_if_abandoned()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


class AsyncStream(_Reader, AsyncIterator[StreamDelta]):
    """`Stream` for asyncio."""

    _pubsub: AsyncPubSub | None = None

    async def open(self) -> None:
        if self._step == ("subscribe",):
            self._step = await self._perform(self._step)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamDelta:
        if self._closed:
            raise StopAsyncIteration
        try:
            step = self._steps.send(None) if self._step is None else self._step
            while not isinstance(step, StreamDelta):
                step = await self._perform(step)
        except StopIteration:
            await self.aclose()
            raise StopAsyncIteration from None
        except BaseException:
            await self.aclose()
            raise
        return self._hand_out(step)

    async def _perform(self, step: Step) -> Step:
        name, *arguments = step
        try:
            answer = await getattr(self, f"_{name}")(*arguments)
        except connections.LOST as error:
            return self._steps.throw(error)
        return self._steps.send(answer)

    async def _subscribe(self) -> None:
        await self._unsubscribe()
        self._pubsub = connections.async_streams().pubsub()
        await self._pubsub.subscribe(self._keys.channel)
        async with asyncio.timeout(connections.REPLY_TIMEOUT_S):
            while not _is(await self._pubsub.get_message(timeout=SILENCE_S), "subscribe", self._keys.channel):
                pass

    async def _read_log(self, start: int) -> tuple[list[bytes], int]:
        async with connections.async_streams().pipeline(transaction=False) as pipe:
            if self._interest_is_due():
                pipe.set(self._keys.interest, 1, ex=INTEREST_TTL_S)
            pipe.lrange(self._keys.log, start, -1)
            pipe.llen(self._keys.log)
            *_, entries, length = await pipe.execute()
        return entries, length

    async def _receive(self, patience_s: float) -> bytes | None:
        if self._interest_is_due():
            await connections.async_streams().set(self._keys.interest, 1, ex=INTEREST_TTL_S)
        assert self._pubsub is not None
        return _data(await self._pubsub.get_message(timeout=patience_s))

    async def _outcome(self) -> tuple[str | None, Any]:
        return await asyncio.to_thread(self._outcome_now)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _unsubscribe(self) -> None:
        if (pubsub := self._pubsub) is not None:
            self._pubsub = None
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._steps.close()
            await self._unsubscribe()
            if self._cancel_on_disconnect:
                await asyncio.to_thread(self._cancel_if_abandoned)


def stream(
    task: AsyncResult | str, *, timeout_s: float | None = None, cancel_on_disconnect: bool = False
) -> Stream:
    """The deltas of a task, given its `AsyncResult` or its id, from the first on, whenever one begins to read.

    `StreamTimeout` after `timeout_s` without a delta; the default is to wait for ever. `cancel_on_disconnect`
    cancels the task when this reader goes away, and must have been given to the task as well.
    """
    return Stream(task, timeout_s, cancel_on_disconnect)


async def astream(
    task: AsyncResult | str, *, timeout_s: float | None = None, cancel_on_disconnect: bool = False
) -> AsyncIterator[StreamDelta]:
    """`stream` for asyncio."""
    async with contextlib.aclosing(AsyncStream(task, timeout_s, cancel_on_disconnect)) as deltas:
        async for delta in deltas:
            yield delta


# Subscriptions that readers of this process have finished with: a new one costs a connection.
_idle: list[tuple[int, PubSub]] = []
_MAX_IDLE = 64


def _take_idle() -> PubSub | None:
    while _idle:
        pid, pubsub = _idle.pop()
        if pid == os.getpid() and pubsub.connection_pool is connections.streams().connection_pool:
            return pubsub
    return None


def _make_idle(pubsub: PubSub, channel: str) -> None:
    try:
        if len(_idle) < _MAX_IDLE:
            pubsub.unsubscribe(channel)  # type: ignore[no-untyped-call]
            _confirmed(pubsub, "unsubscribe", channel, SILENCE_S)
            _idle.append((os.getpid(), pubsub))
            return
    except connections.LOST:
        pass
    pubsub.close()


def _confirmed(pubsub: PubSub, kind: str, channel: str, patience_s: float) -> None:
    """Wait for the answer; what is published meanwhile stands in the log."""
    give_up_at = time.monotonic() + patience_s
    while not _is(pubsub.get_message(timeout=patience_s), kind, channel):
        if time.monotonic() > give_up_at:
            raise redis.TimeoutError(f"no answer to {kind}")


def _is(message: dict[str, Any] | None, kind: str, channel: str) -> bool:
    return message is not None and message["type"] == kind and message["channel"] == channel.encode()


def _data(message: dict[str, Any] | None) -> bytes | None:
    return message["data"] if message is not None and message["type"] == "message" else None

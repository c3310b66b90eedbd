"""A request on its way: its record is written, its tasks are submitted, accepted by a worker, followed to their
end.

Any gateway follows any request, from its record alone. A client that leaves ends its gateway's reading, and
nothing else: where the record says that the tasks need readers, a worker cancels them when they have had none for
`PETIOLE_GATEWAY_UNREAD_S`, whichever gateway has died meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any, NamedTuple

import redis
from pydantic import ValidationError

from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core import caller
from petiole.gateway.core.assembly import OutputAssembler, delta_of
from petiole.gateway.core.failures import Failure, failure_of, unavailable
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.task_plan import Plan
from petiole.gateway.serving import records, retry
from petiole.gateway.serving.auth import idempotency, rate_limits
from petiole.gateway.serving.retry import patiently
from petiole.gateway.serving.webhooks import queue
from petiole.tasks import errors
from petiole.tasks.app.application import app as celery_app
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.fleet import control, reports
from petiole.tasks.fleet.availability import lack
from petiole.tasks.servers import connections
from petiole.tasks.servers.connections import LOST, Commands
from petiole.tasks.settings import settings
from petiole.tasks.streams import async_subscriptions
from petiole.tasks.streams.assembly import StreamAssembler
from petiole.tasks.streams.callback_reader import CallbackStream
from petiole.tasks.submission import definitions
from petiole.tasks.submission.message_templates import PreparedMessage
from petiole.tasks.wire.keys import stream_keys

MOST_WAITING = 1024
"""Deltas that wait for a slow client. Behind them the log is read again when they are gone."""

MESSAGES_AT_ONCE = 16
"""Messages that are written before others' requests have their turn."""

Arrival = tuple[int, StreamDelta | None]
"""A delta, with the number of its task; None: nothing of it has come for a while."""

_CLOSING: set[asyncio.Future[None]] = set()


class Generation:
    """The tasks of a record, read by this process."""

    def __init__(
        self, record: RequestRecord, names: Mapping[str, str] | None = None, *, fresh: bool = False
    ) -> None:
        """`fresh`: the tasks are submitted when this is open."""
        known = settings()
        self.record, self._names = record, names or {}
        self._began_at = time.monotonic()
        self._heard = self._silent = self._holding = False
        self._ended = 0
        silence_s = max(1.0, min(known.gateway_heartbeat_s, known.gateway_wait_for_worker_s))
        self._arrived: list[Arrival] = []
        self._held: list[Arrival] = []
        self._waiting: asyncio.Future[None] | None = None
        self._fault: BaseException | None = None
        self._readers = [
            CallbackStream(
                task_id,
                partial(self._take, choice),
                cancel_on_disconnect=record.readers,
                heartbeat_s=silence_s,
                prepared=True,
                unread_s=known.gateway_unread_s,
                fresh=fresh,
                parse=delta_of,
            )
            for choice, task_id in enumerate(record.tasks)
        ]
        self._reading: list[asyncio.Task[None]] = []
        self._running = len(record.tasks)

    async def open(self) -> None:
        """Subscribe. Raises `Failure` if Redis refuses it."""
        first, *others = self._readers
        try:
            await (asyncio.gather(*(reader.open() for reader in self._readers)) if others else first.open())
        except redis.ResponseError as error:
            raise retry.refused(error) from error

    def interest(self) -> list[tuple[Any, ...]]:
        """The commands that say that somebody reads the tasks."""
        return [command for reader in self._readers for command in reader.interest()]

    def start(self) -> None:
        """Read from now on."""
        for reader in self._readers:
            task = asyncio.ensure_future(reader.run())
            task.add_done_callback(self._read)
            self._reading.append(task)

    def _take(self, choice: int, delta: StreamDelta) -> None:
        if delta.is_heartbeat:
            self._arrived.append((choice, None))
            self._silent = True
        else:
            self._arrived.append((choice, delta))
            self._heard = True
            self._ended += delta.finish_reason is not None
        if len(self._arrived) >= MOST_WAITING:
            self._holding = True
            for reader in self._readers:
                reader.hold()
        self._wake()

    def _read(self, reading: asyncio.Task[None]) -> None:
        """A reader has ended: after the last delta, or by what prevents the reading."""
        self._running -= 1
        if not reading.cancelled():
            self._fault = self._fault or reading.exception()
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _change(self) -> asyncio.Future[None]:
        """Done when something has come, or nothing comes any more; and by `_wake`."""
        self._waiting = asyncio.get_running_loop().create_future()
        if self._arrived or not self._running or self._fault is not None:
            self._waiting.set_result(None)
        return self._waiting

    def _taken(self) -> list[Arrival]:
        """What has come. Raises `Failure` where a fault came last."""
        if not self._arrived and self._fault is not None:
            raise retry.failure_of(self._fault) from self._fault
        arrived, self._arrived = self._arrived, []
        if self._holding:
            self._holding = False
            for reader in self._readers:
                reader.resume()
        return arrived

    async def accepted(self, wait_s: float) -> None:
        """Wait until a worker has prepared every task, or for `wait_s`. Raises `Failure` if one is refused."""
        give_up_at = time.monotonic() + wait_s
        silent = set(range(len(self._readers)))
        while silent and (left_s := give_up_at - time.monotonic()) > 0:
            timer = asyncio.get_running_loop().call_later(left_s, self._wake)
            try:
                await self._change()
            finally:
                timer.cancel()
            for choice, delta in self._taken():
                if delta is None:
                    await self._check_worker()
                    continue
                silent.discard(choice)
                if delta.error is not None:
                    raise self.failure(delta.error)
                self._held.append((choice, delta))

    async def batch(self) -> list[Arrival]:
        """The next deltas of all tasks: all that have come meanwhile together; none after the last one. Raises
        `Failure` if they cannot be read; a failed task has a delta that says so."""
        arrived, self._held = self._held, []
        while not arrived and (self._arrived or self._ended < len(self._readers)):
            await self._change()
            arrived = self._taken()
        if self._silent:
            self._silent = False
            await self._check_worker()
        return arrived

    async def deltas(self) -> AsyncGenerator[Arrival, None]:
        """`batch` by `batch`, one by one."""
        while batch := await self.batch():
            for one in batch:
                yield one

    async def _check_worker(self) -> None:
        """Raises `Failure` if nobody will ever begin."""
        if self.record.patient or self._heard or not self.record.queue:
            return
        if time.monotonic() - self._began_at < settings().gateway_wait_for_worker_s:
            return
        try:
            missing = lack(await LOOKUPS.run(reports.workers), self.record.queue)
        except Exception:  # the reports cannot be read: say nothing about workers
            return
        if missing is not None:
            await cancel(self.record)
            await rate_limits.release(self.record)
            await idempotency.forget(self.record.id)
            raise unavailable(f"no worker serves model {self.record.model!r} at the moment", "no_worker")

    async def whole(self, failed: bool = False) -> list[CollectedOutput]:
        """All outputs, when all have ended. `failed`: also of tasks that have failed; otherwise `Failure` is
        raised for one."""
        readings = [
            (OutputAssembler.of(self.record, choice), CollectedOutput())
            for choice in range(len(self.record.tasks))
        ]
        async for choice, delta in self.deltas():
            if delta is None:
                continue
            reading, whole = readings[choice]
            for part in reading.read(delta):
                whole.add(part)
            if delta.error is not None and not failed:
                raise self.failure(delta.error)
        return [whole for _, whole in readings]

    async def ended(self, wait_s: float) -> None:
        """Wait until all tasks have ended, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.whole(failed=True)

    def failure(self, error: Mapping[str, Any]) -> Failure:
        return failure_of(errors.rebuild(error), self._names)

    async def aclose(self) -> None:
        """Read no further."""
        for task in self._reading:
            task.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        for reader in self._readers:
            await reader.aclose()


async def begin(plan: Plan) -> Generation:
    """Write the record, and then submit the tasks. Raises `Failure`; then nothing of the request is left. What
    repeats an earlier request is that one: `record` says which."""
    try:
        earlier = await idempotency.earlier(plan.record.id, plan.record.kind)
    except BaseException:  # a client that leaves, too
        await idempotency.abandon(plan.record.id)
        raise
    if earlier is not None:
        return again(earlier)
    if (made := caller.request()) is None:
        return await _begun(plan)
    # Who repeats it must find it whole, so a client that leaves does not interrupt it.
    made.submitting = True
    beginning = asyncio.ensure_future(_begun(plan))
    try:
        return await asyncio.shield(beginning)
    except asyncio.CancelledError:
        beginning.add_done_callback(_unread)
        raise
    except BaseException:
        made.submitting = False
        raise
    finally:
        del beginning  # its error knows this frame, and with it the request


def _unread(beginning: asyncio.Future[Generation]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        closing = asyncio.ensure_future(beginning.result().aclose())
        _CLOSING.add(closing)
        closing.add_done_callback(_CLOSING.discard)


async def _begun(plan: Plan) -> Generation:
    record = plan.record
    generation = Generation(record, plan.names, fresh=True)
    try:
        keep_s = plan.keep_s or settings().gateway_keep_s
        written = [records.written(record, keep_s), *idempotency.keeping(record, keep_s), *generation.interest()]
        if record.patient and await queue.watching():
            written += queue.watch(record.id)
        messages = await _messages(plan)
        if messages is None:
            held = await rate_limits.admit(plan, written)
            try:
                await generation.open()
            except BaseException:
                await _withdraw(record)
                raise
            await _submit(plan, held)
        else:
            # The subscription is written first, and nobody waits for its reply: no worker answers before Redis has
            # read it. Should a network deliver it later, the reader looks after a second.
            with contextlib.suppress(*LOST):
                await async_subscriptions.connect()
            # Both have ended before anything is undone: what is sent after that would stay.
            both = generation.open(), _sent(plan, written, messages)
            opened, sent = await asyncio.gather(*both, return_exceptions=True)
            try:
                if isinstance(sent, BaseException):
                    raise sent
                if isinstance(opened, BaseException):
                    await _withdraw(record)
                    raise opened
            finally:
                del opened, sent  # an error knows this frame, and with it the request
        generation.start()
    except BaseException:
        await generation.aclose()
        await idempotency.forget(record.id)
        with contextlib.suppress(Failure):
            await rate_limits.release(record)
        raise
    return generation


async def _messages(plan: Plan) -> list[PreparedMessage] | None:
    """The messages of the tasks. None: Celery must submit them. Raises `Failure`."""
    asks, messages = caller.caller(), list[PreparedMessage]()
    submission = {**caller.submission(asks, plan.submission), **_where(plan.record)}
    try:
        for call, task_id in zip(plan.calls, plan.record.tasks, strict=True):
            options = caller.options(asks, call.options)
            templates = getattr(definitions, call.task).templates
            template = await templates.to_the_streams(options, submission)
            if template is None:
                return None
            messages.append(await template.message(task_id, options, submission.get("headers", {})))
            if not len(messages) % MESSAGES_AT_ONCE:
                await asyncio.sleep(0)
    except errors.InvalidRequest as error:
        raise failure_of(error, plan.names) from None
    return messages


async def _sent(plan: Plan, written: Commands, messages: list[PreparedMessage]) -> None:
    """Admit it, and write and submit all of it. Raises `Failure`."""
    try:
        await rate_limits.admit(plan, written, messages)
    except Failure as failure:
        if failure.status == 503:
            await _withdraw(plan.record)
        raise


async def _submit(plan: Plan, held: Mapping[str, Any]) -> None:
    record, asks = plan.record, caller.caller()
    where = _where(record)
    submissions = [
        getattr(definitions, call.task).adelay(
            **caller.options(asks, call.options),
            **caller.submission(asks, plan.submission, held),
            **where,
            task_id=task_id,
        )
        for call, task_id in zip(plan.calls, record.tasks, strict=True)
    ]
    outcomes = await asyncio.gather(*submissions, return_exceptions=True)
    if failed := [outcome for outcome in outcomes if isinstance(outcome, BaseException)]:
        await _withdraw(record)
        raise retry.failure_of(failed[0], plan.names) from failed[0]


def _where(record: RequestRecord) -> dict[str, Any]:
    return {"queue": record.queue} if record.queue != settings().queue else {}


async def _withdraw(record: RequestRecord) -> None:
    """Its tasks may have been submitted, and nobody will read them."""
    with contextlib.suppress(redis.RedisError, *LOST):
        await control.acancel(*record.tasks)
    with contextlib.suppress(Failure):
        await records.forget(record.id)


async def cancel(record: RequestRecord) -> None:
    await patiently(lambda: control.acancel(*record.tasks))


def again(record: RequestRecord) -> Generation:
    """Follow the tasks of a request that was submitted before, by whichever gateway."""
    generation = Generation(record)
    generation.start()
    return generation


class LogSnapshot(NamedTuple):
    """What the log of a request's first task has now. `begun`: a worker has the task. `flagged`: it was
    cancelled."""

    whole: CollectedOutput
    begun: bool
    flagged: bool


async def snapshot(record: RequestRecord) -> LogSnapshot | None:
    """Without waiting. None: Redis has nothing of the task, or no longer. Raises `Failure`."""
    task_id = record.tasks[0]
    keys = stream_keys(task_id)

    async def looked_up() -> tuple[list[bytes], dict[bytes, bytes], dict[bytes, bytes]]:
        async with connections.async_streams().pipeline(transaction=False) as pipe:
            pipe.lrange(keys.log, 0, -1)
            pipe.hgetall(keys.state)
            pipe.hgetall(keys.asked)
            log, state, asked = await pipe.execute()
            return log, state, asked

    log, state, asked = await patiently(looked_up)
    if not log and (not (state or asked) or b"done" in state):
        return None
    reading, whole = OutputAssembler.of(record, 0), CollectedOutput()
    try:
        announced = [delta_of(raw) for raw in filter(None, [state.get(b"prepared")])]
        written = [delta_of(raw) for raw in log]
    except ValidationError:
        raise failure_of(errors.StreamError(f"task {task_id}: a delta of its log cannot be read")) from None
    for delta in (*announced, *(StreamAssembler().logged(written) or ())):
        for part in reading.read(delta):
            whole.add(part)
    return LogSnapshot(whole, bool(log) or bool(state.keys() & {b"attempt", b"running"}), b"cancel" in asked)


async def has_result(record: RequestRecord) -> bool:
    """Whether the result backend says how the first task has ended."""
    try:
        return bool(await LOOKUPS.run(celery_app.AsyncResult(record.tasks[0]).ready))
    except Exception as error:
        raise failure_of(errors.StreamError(f"the result cannot be read: {type(error).__name__}")) from error

"""Counts of tokens: threads take them, and the engine's tokenizer and chat template answer them.

There is a thread for each queue of counts, with a connection and a prefetch of its own. So neither a full engine
nor a long queue delays a count, and a worker takes no count that another could begin. A count is taken, held and
given back as any message: it passes the gate, has an owner with a lease, and is acknowledged after its result is
stored. The thread answers it, or an eager count's caller (`answer`)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import redis
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.utils.time import maybe_iso8601
from celery.worker.state import revoked
from kombu.messaging import Consumer

from petiole.contract.requests.count import SUFFIX, CountRequest, queue_of
from petiole.contract.requests.images import is_handle
from petiole.contract.tasks import COUNT
from petiole.gpu_worker import exceptions as engine_errors
from petiole.gpu_worker.request import Request
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.headers import EXPIRES
from petiole.tasks.worker.broker import gate, quarantine
from petiole.tasks.worker.broker.transport import Channel
from petiole.tasks.worker.generation import local
from petiole.tasks.worker.generation.engine_requests import images_of, stored
from petiole.tasks.worker.generation.engines import EngineLike
from petiole.tasks.worker.idempotency import ServerUnavailable
from petiole.tasks.worker.outage import Outage
from petiole.tasks.worker.output.outcomes import public

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""How often a thread looks whether it is to end."""
PAUSE_S = 1.0
"""Pause after an error of the broker or of the result backend."""
JOIN_S = 3.0
IMAGE = -1
"""A position of an image among the returned token ids."""

_serving: list[EngineLike] = []


def serve(engine: EngineLike) -> None:
    """Count with this engine from now on. In a process that serves none, an eager count loads one."""
    _serving[:] = [engine]


def answer(request: CountRequest) -> dict[str, Any]:
    """The result of the task. Raises the exception that the task fails with."""
    engine = _serving[0] if _serving else local.engine()
    more = dict[str, Any]()
    try:
        if request.token_ids is not None:
            found, special = request.token_ids, request.skip_special_tokens
            more["texts"] = [
                _naming(f"token_ids[{k}]", lambda ids=ids: engine.text_of(ids, skip_special_tokens=special))
                for k, ids in enumerate(found)
            ]
        elif request.texts is not None:
            adds = request.add_special_tokens
            found = [
                _naming(
                    f"texts[{k}]",
                    lambda text=text: engine.tokens_of(Request(prompt=text, add_special_tokens=adds)),
                )
                for k, text in enumerate(request.texts)
            ]
        else:
            found = [_of_chat(engine, request)]
    except Exception as error:
        raise public(error) from None
    if request.with_ids:
        more["token_ids"] = [[max(token, IMAGE) for token in one] for one in found]
    if request.with_tokens:
        more["tokens"] = [*map(engine.entries_of, found)]
    most = engine.facts()["max_model_len"]
    return {"counts": [*map(len, found)], **more, "max_model_len": most, "model": engine.limits.model}


def _of_chat(engine: EngineLike, request: CountRequest) -> list[int]:
    chat, known = request.chat(), dict[str, bytes]()
    if any(map(is_handle, chat.images())):
        known = stored(connections.streams(), [chat], settings().image_ttl_s)
    asked = {**chat.subject(), "add_generation_prompt": request.add_generation_prompt}
    return engine.tokens_of(Request(**asked, images=images_of(chat, known), image_views=chat.image_views()))


def _naming(field: str, count: Any) -> Any:
    """The result of `count`, whose errors name the field."""
    try:
        return count()
    except engine_errors.InvalidRequest as error:
        raise InvalidRequest(field, error.limit, error.value) from None


# ------------------------------------------------------------ the threads


class CountingThreads:
    """The threads of a worker. `app` is Celery's, `hostname` the worker's name."""

    def __init__(self, app: Any, hostname: str) -> None:
        self._app, self._hostname = app, hostname
        self._threads: list[_Counter] = []

    def take(self, queues: Iterable[str]) -> None:
        """Take the counts of these queues, too."""
        for name in sorted({queue_of(queue) for queue in queues if not queue.endswith(SUFFIX)}):
            self._threads.append(_Counter(self._app, self._hostname, name))
            self._threads[-1].start()

    def leave(self, queues: Iterable[str]) -> None:
        """Take no more counts of these queues."""
        names = {queue_of(queue) for queue in queues}
        for thread in self._threads:
            if thread.queue in names:
                thread.closing.set()

    def close(self) -> None:
        """Take no more. A count that has begun is answered. Does not wait for that: see `join`."""
        for thread in self._threads:
            thread.closing.set()

    def join(self) -> None:
        """Wait, `JOIN_S` at most, until the threads have answered and have given back."""
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))


class _Counter(threading.Thread):
    def __init__(self, app: Any, hostname: str, queue: str) -> None:
        super().__init__(name=f"petiole-{queue}", daemon=True)
        self._app, self._hostname, self.queue, self.closing = app, hostname, queue, threading.Event()
        self._task = app.tasks[COUNT]
        self._trace: Callable[..., Any] = build_tracer(COUNT, self._task, app.loader, hostname, app=app)
        failing = f"counts of {queue}: the broker does not answer (%s)"
        self._outage = Outage(logger, failing, f"counts of {queue}: the broker answers again")

    def run(self) -> None:
        while not self.closing.is_set():
            try:
                with self._app.connection_for_read() as connection:
                    connection.connect()
                    self._consume(connection)
            except Exception as error:  # any: the next connection tries again
                self._outage.began(error)
                self.closing.wait(PAUSE_S)

    def _consume(self, connection: Any) -> None:
        if isinstance(channel := connection.default_channel, Channel):
            channel.ledger.be_second()
        queue = self._app.amqp.queues.new_missing(self.queue)
        accept = self._app.conf.accept_content
        with Consumer(  # type: ignore[no-untyped-call]
            channel,
            [queue],
            on_message=self._received,
            on_decode_error=self._undecodable,
            accept=accept,
            prefetch_count=1,
            tag_prefix="count",
        ):
            while not self.closing.is_set():
                with suppress(TimeoutError):
                    connection.drain_events(timeout=LOOK_S)
                if connection.supports_heartbeats:  # RabbitMQ; else a connection that is cut off would stay
                    connection.heartbeat_check()
                self._outage.ended()

    def _received(self, message: Any) -> None:
        if self.closing.is_set():
            message.requeue()
            return
        task = self._checked(message)
        if isinstance(task, gate.RefusedMessage):
            self._refuse(message, task)
            return
        try:
            self._answer(task, message)
        except ServerUnavailable as refusal:  # the result backend is away
            logger.error("count %s: its result cannot be stored yet: %s; requeued", task.task_id, refusal)
            self.closing.wait(PAUSE_S)
            message.requeue()
        except (redis.RedisError, OSError):
            raise
        except Exception as error:  # it would come again, and keep the others from their answers
            logger.exception("count %s could not be handled", task.task_id)
            self._refuse(message, gate.unhandled(task, error))
        else:
            message.ack()

    def _checked(self, message: Any) -> gate.Task | gate.RefusedMessage:
        task = gate.task(message)
        if isinstance(task, gate.RefusedMessage):
            return task
        if task.name != COUNT:
            reason = f"headers.task must be {COUNT} in this queue, got {task.name}"
            return gate.RefusedMessage(reason, task.task_id)
        if not isinstance(task.body, list):
            return gate.RefusedMessage("the message must be of Celery's protocol 2", task.task_id)
        return task

    def _undecodable(self, message: Any, error: Exception) -> None:
        """Called by kombu for a message that it cannot decompress."""
        self._refuse(message, gate.undecodable(message, error))

    def _refuse(self, message: Any, refused: gate.RefusedMessage) -> None:
        quarantine.refuse(message, self.queue, refused)
        message.ack()

    def _answer(self, task: gate.Task, message: Any) -> None:
        assert isinstance(task.body, list)
        args, kwargs, embed = task.body
        request = {
            **task.headers,
            "args": args,
            "kwargs": kwargs,
            "hostname": self._hostname,
            "is_eager": False,
            "delivery_info": dict(message.delivery_info),
            "reply_to": message.properties.get("reply_to"),
            "correlation_id": message.properties.get("correlation_id"),
            **dict(embed or {}),
        }
        if task.task_id in revoked or _is_over(EXPIRES.of(task.headers)):
            reason = "revoked" if task.task_id in revoked else "expired"
            self._task.backend.mark_as_revoked(task.task_id, reason, request=Context(request))
            return
        self._trace(task.task_id, args, kwargs, request)


def _is_over(expires: object) -> bool:
    try:
        until = maybe_iso8601(expires)
    except (TypeError, ValueError):
        return False
    if not isinstance(until, datetime):
        return False
    return (until if until.tzinfo else until.replace(tzinfo=UTC)) < datetime.now(UTC)

"""The quarantine of messages that the gate refuses. If a message has a task id, the task's stream is ended, too,
and the task stored as failed. A task that runs by another message, or has ended otherwise, is left alone.

    `QUARANTINE_KEY`      list, newest first: {"at", "queue", "reason", "task_id", "error", "message"}; capped,
                          with a TTL. `error`: the task's, as `errors.describe` has it

Any thread that meets such a message only queues it: `put_aside` neither waits nor raises. One thread stores the
queued messages, and tries again while Redis or the result backend is away. Only then is a message acknowledged
(`done`), so a worker that ends earlier leaves the message to the next one. Queued messages count as held, so no
more of them wait than a worker may hold."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis

from petiole.tasks.app.backend import refuses
from petiole.tasks.errors import InvalidRequest, describe
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.headers import Account
from petiole.tasks.wire.keys import NAME_PROPERTY, QUARANTINE_KEY, stream_keys
from petiole.tasks.wire.record import codec, ledger
from petiole.tasks.wire.record.scripts import CloseReply
from petiole.tasks.worker import idempotency, scripts
from petiole.tasks.worker.broker.gate import RefusedMessage
from petiole.tasks.worker.outage import Outage
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

KEPT = 1000
KEPT_S = 7 * 86_400
SHOWN_BYTES = 65_536

WAITING = 1000
"""Maximum number of messages that wait to be stored. Further messages stay unacknowledged."""

PAUSE_S = 1.0
"""Pause before a failed store is tried again."""

CLOSE_S = 2.0
"""How long a shutdown waits for queued messages to be stored."""

_ID = re.compile(rb'"(?:id|correlation_id)": ?"([0-9A-Za-z_-]{1,64})"')

Callback = Callable[[], object]


class Sign(NamedTuple):
    """By what a task knows a message of its own. `name`: the same at every delivery; empty on RabbitMQ. `own`: it
    is surely the task's. On RabbitMQ each redelivered message counts as that: its task might run no more."""

    name: str = ""
    own: bool = False


@dataclass(slots=True)
class QuarantinedMessage:
    """One message to be put aside. `item`: its beginning. `sign`: how its task knows it. `account`: whom its
    task's end is told. `steps`: the steps that are left to do."""

    item: bytes
    queue: str
    reason: str
    task_id: str | None
    error: Exception
    done: Callback | None
    sign: Sign
    account: Account
    at: float = field(default_factory=time.time)
    steps: deque[Callable[[Any, QuarantinedMessage], None]] = field(default_factory=deque)


class Quarantine:
    """The queue and its thread. `post` runs `done` on the consumer's thread."""

    def __init__(self) -> None:
        self._waiting: deque[QuarantinedMessage] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        failing = "malformed messages cannot be put aside yet: %s"
        self._outage = Outage(logger, failing, "malformed messages are put aside again")

    def start(self, app: Any, post: Callable[[Callback], object]) -> None:
        self._closing.clear()
        self._thread = threading.Thread(target=self._run, args=(app, post), name="petiole-quarantine", daemon=True)
        self._thread.start()

    def put(self, aside: QuarantinedMessage) -> None:
        with self._changed:
            room = len(self._waiting) < WAITING
            if room:
                self._waiting.append(aside)
                self._changed.notify()
        if not room:
            logger.error("a malformed message of %s is not put aside: %d others wait", aside.queue, WAITING)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Store the queued messages, within `timeout_s`, and log those that are left: they go back to their
        queues."""
        self._closing.set()
        with self._changed:
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        with self._changed:
            left = list(self._waiting)
        for aside in left:
            fate = "is lost" if aside.done is None else "goes back to its queue"
            logger.error("a malformed message of %s could not be put aside, and %s", aside.queue, fate)

    @property
    def empty(self) -> bool:
        return not self._waiting

    def _run(self, app: Any, post: Callable[[Callback], object]) -> None:
        while (aside := self._next()) is not None:
            if self._store(app, aside):
                self._waiting.popleft()
                if aside.done is not None:
                    post(aside.done)
            elif self._closing.wait(PAUSE_S):
                return
            else:
                self._waiting.rotate(-1)

    def _next(self) -> QuarantinedMessage | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing.is_set())
            return self._waiting[0] if self._waiting else None

    def _store(self, app: Any, aside: QuarantinedMessage) -> bool:
        """Store one message. Returns False if another try may succeed. A message that can never be stored is only
        logged."""
        while aside.steps:
            try:
                aside.steps[0](app, aside)
            except Exception as error:
                if refuses(error):
                    self._outage.began(error)
                    return False
                logger.exception("task %s: its malformed message is put aside only in part", aside.task_id)
            aside.steps.popleft()
        self._outage.ended()
        return True


quarantine = Quarantine()
"""The quarantine of this process."""


def refuse(
    message: Any,
    queue: str,
    refused: RefusedMessage,
    error: Exception | None = None,
    done: Callback | None = None,
) -> None:
    """Put a message of kombu's aside, whole, so that it can be sent again. Nothing of it is kept alive."""
    put_aside(
        *(whole(message), queue, refused.reason, refused.task_id),
        sign=sign_of(message),
        headers=message.headers,
        error=error,
        done=done,
    )
    message.forget()


def put_aside(
    item: bytes,
    queue: str,
    reason: str,
    task_id: str | None = None,
    *,
    sign: Sign = Sign(),  # noqa: B008
    headers: object = None,
    error: Exception | None = None,
    done: Callback | None = None,
) -> None:
    """Quarantine a message, fail its task with `error`, unless the task is another message's, and then call `done`
    on the consumer's thread. `headers`: the message's, if they could be read."""
    try:
        if task_id is None and (match := _ID.search(item[:SHOWN_BYTES])):
            task_id = match[1].decode()
        logger.error("a message was put aside, from %s: %s", queue, without_values(reason))
        incidents.count("quarantined")
        error = error or InvalidRequest("message", reason, item[:200].decode(errors="replace"))
        steps = [_enter] if task_id is None else [_enter, _end_stream, _fail]
        shown = item[:SHOWN_BYTES]
        account = Account.of(headers if isinstance(headers, dict) else _headers(shown), days=settings().usage_days)
        quarantine.put(
            QuarantinedMessage(shown, queue, reason, task_id, error, done, sign, account, steps=deque(steps))
        )
    except Exception:
        logger.exception("a malformed message could not be queued for the quarantine")


def sign_of(message: Any) -> Sign:
    """By what its task knows a message of kombu's."""
    properties, where = message.properties, message.delivery_info
    name = properties.get(NAME_PROPERTY, "") if isinstance(properties, dict) else ""
    again = isinstance(where, dict) and where.get("redelivered") is True
    return Sign(str(name), own=again and not name)


def whole(message: Any) -> bytes:
    """A message of kombu's in the form in which Redis has one; its body alone if its headers cannot be written."""
    body = message.body if isinstance(message.body, bytes) else str(message.body).encode(errors="replace")
    properties = message.properties if isinstance(message.properties, dict) else {}
    said = {
        "headers": message.headers,
        "content-type": message.content_type,
        "content-encoding": message.content_encoding,
        "properties": {**properties, "body_encoding": "base64"},
        "body": b64encode(body).decode(),
    }
    try:
        return json.dumps(said, default=repr, skipkeys=True).encode()
    except (ValueError, RecursionError):
        return body


def without_values(reason: str) -> str:
    """A refusal for the log: without the value, and without the message of an exception. Both may quote the
    message that was refused. The quarantine has the whole reason."""
    return ": ".join(reason.partition(", got ")[0].split(": ")[:2])


def _enter(app: Any, aside: QuarantinedMessage) -> None:
    entry = {
        "at": aside.at,
        "queue": aside.queue,
        "reason": aside.reason,
        "task_id": aside.task_id,
        "error": describe(aside.error),
        "message": aside.item.decode(errors="replace"),
    }
    with connections.streams().pipeline() as pipe:
        pipe.lpush(QUARANTINE_KEY, json.dumps(entry, default=repr))
        pipe.ltrim(QUARANTINE_KEY, 0, KEPT - 1)
        pipe.expire(QUARANTINE_KEY, KEPT_S)
        pipe.execute()


def _fail(app: Any, aside: QuarantinedMessage) -> None:
    assert aside.task_id is not None
    with idempotency.tried(aside.task_id):
        app.backend.mark_as_failure(aside.task_id, aside.error)


def _end_stream(app: Any, aside: QuarantinedMessage) -> None:
    assert aside.task_id is not None
    ttl_ms = settings().stream_ttl_s * 1000
    client, error = connections.streams(), describe(aside.error)
    if end_stream(client, aside.task_id, ttl_ms, error, sign=aside.sign, account=aside.account):
        return
    logger.error("task %s: is another message's, and goes on as it was", aside.task_id)
    aside.steps = deque([_end_stream])  # this step, which is the last one


def _headers(item: bytes) -> dict[str, Any]:
    """The headers of a message, if it can be read."""
    try:
        headers = json.loads(item)["headers"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return {}
    return headers if isinstance(headers, dict) else {}


def end_stream(
    client: redis.Redis,
    task_id: str,
    ttl_ms: int,
    error: dict[str, Any],
    *,
    sign: Sign,
    account: Account | None = None,
) -> bool:
    """Write the last delta of a stream without a worker, because its readers wait for one. Returns False if the
    task is another message's. `account`: as of an outbox."""
    keys = stream_keys(task_id)
    script = scripts.load(client, "close")
    names = [keys.log, keys.state, keys.asked, keys.runs, keys.messages]
    arguments = [ttl_ms, keys.channel, *codec.closing(task_id, error), sign.name, int(sign.own)]
    if account is not None:
        at = time.time()
        names += ledger.keys_of(account, at)
        arguments += [ledger.entry(account, task_id, 1, {"finish_reason": "error"}, 0, 0, at)]
    return bool(script(names, arguments) == CloseReply.ENDED)

"""Messages that a worker's gate has put aside: list them, and send them again.

A message is sent as it came, to its queue and under its task's id. What was stored of the refusal is forgotten
first, so whoever waits for the task gets its result. Nothing else is: a message may bear the id of a task that
runs, or that has a result."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any, NamedTuple

from celery import Celery
from celery.states import READY_STATES

from petiole.contract.requests.count import SUFFIX
from petiole.tasks.app.application import app as celery_app
from petiole.tasks.errors import InvalidRequest, describe
from petiole.tasks.fleet import queues
from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import QUARANTINE_KEY, stream_keys
from petiole.tasks.wire.record import codec, scripts

_PROPERTIES = ("correlation_id", "reply_to", "priority")
"""The properties that a producer sets. A broker, or its client, gives each message the others anew."""

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What reading somebody's JSON may raise."""


class Quarantined(NamedTuple):
    """An entry of the list, which is `entry` itself. `at`: in Unix seconds. `task_id` is empty if the message has
    none. `error`: what its task has ended with, as `errors.describe` has it. `kept`: as much as there is of the
    message."""

    entry: bytes
    at: float
    queue: str
    reason: str
    task_id: str
    kept: str
    error: dict[str, Any]


def listed() -> list[Quarantined]:
    """The newest first. Entries that cannot be read are left out."""
    raw: Any = connections.streams().lrange(QUARANTINE_KEY, 0, -1)
    return [found for entry in raw if (found := _read(entry)) is not None]


def _read(entry: bytes) -> Quarantined | None:
    try:
        said = json.loads(entry)
        queue, reason, task_id, kept = (
            str(said.get(name) or "") for name in ("queue", "reason", "task_id", "message")
        )
        error = dict(said.get("error") or {})
        return Quarantined(entry, float(said["at"]), queue, reason, task_id, kept, error)
    except UNREADABLE:
        return None


def replay(one: Quarantined, app: Celery = celery_app) -> None:
    """Send the message again. Raises `InvalidRequest` for one that was not kept whole, whose queue is none of the
    fleet's, or whose task runs or has another end than the refusal; and whatever the broker raises. Then the entry
    stays."""
    body, headers, properties, form = _parts(one)
    known = queues.known_queues()
    if one.queue.removesuffix(SUFFIX) not in known:  # or that of its counts
        raise InvalidRequest("queue", f"must be one of the fleet's: {', '.join(known)}", one.queue)
    if one.task_id:
        _reopen(one, app)
    options = {"retry": True, "retry_policy": app.conf.task_publish_retry_policy, "mandatory": True}
    with app.connection_for_write() as connection:  # its own: RabbitMQ may return the message
        producer = connection.Producer()
        producer.publish(
            body, routing_key=one.queue, exchange="", headers=headers, **options, **form, **properties
        )
    connections.streams().lrem(QUARANTINE_KEY, 0, one.entry.decode())  # a retried write may have entered it twice


def _reopen(one: Quarantined, app: Celery) -> None:
    """Forget what was stored of the refusal."""
    another = InvalidRequest("task", "must have no other end than this refusal", one.task_id)
    stored = app.backend.get_task_meta(one.task_id)
    if stored["status"] in READY_STATES and not _is_the_refusal(stored["result"], one.error):
        raise another
    keys, client = stream_keys(one.task_id), connections.streams()
    names = [keys.log, keys.state, keys.completion, keys.completer, keys.runs]
    reply = scripts.load(client, "reopen")(names, [codec.closing(one.task_id, one.error)[-1]])
    if reply == scripts.ReopenReply.RUNS:
        raise InvalidRequest("task", "must not run", one.task_id)
    if reply == scripts.ReopenReply.ENDED:
        raise another
    app.backend.forget(one.task_id)


def _is_the_refusal(result: object, error: dict[str, Any]) -> bool:
    return isinstance(result, Exception) and describe(result) == error


def _parts(one: Quarantined) -> tuple[bytes, dict[str, Any], dict[str, Any], dict[str, str]]:
    """Body, headers, properties, and form of the body."""
    whole = "must be kept whole: not cut, and of a known form"
    try:
        said = json.loads(one.kept)
        properties, headers = dict(said["properties"]), dict(said.get("headers") or {})
        body = b64decode(said["body"]) if properties.get("body_encoding") == "base64" else said["body"].encode()
    except UNREADABLE as error:
        raise InvalidRequest("message", whole, f"{one.kept[:80]}... ({error})") from None
    own = {name: properties[name] for name in _PROPERTIES if properties.get(name) is not None}
    form = {
        "content_type": str(said.get("content-type") or "application/json"),
        "content_encoding": str(said.get("content-encoding") or "utf-8"),
    }
    return body, headers, own, form

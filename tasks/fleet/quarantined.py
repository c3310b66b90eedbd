"""Messages that a worker's gate has put aside: list them, and send them again.

A message is sent as it came, to its queue and under its task's id. What was stored of the refusal is forgotten
first, so whoever waits for the task gets its result."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any, NamedTuple

from celery import Celery

from petiole.tasks.app.application import app as celery_app
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.keys import QUARANTINE_KEY, stream_keys
from petiole.tasks.servers import connections

_PROPERTIES = ("correlation_id", "reply_to", "priority")
"""Those of a producer. A broker, or its client, gives each message the others anew."""


class Quarantined(NamedTuple):
    """An entry of the list, which is `entry` itself. `at`: in Unix seconds. `task_id` is empty if the message has
    none. `kept`: as much as there is of the message."""

    entry: bytes
    at: float
    queue: str
    reason: str
    task_id: str
    kept: str


def listed() -> list[Quarantined]:
    """The newest first. Entries that cannot be read are left out."""
    raw: Any = connections.streams().lrange(QUARANTINE_KEY, 0, -1)
    return [found for entry in raw if (found := _read(entry)) is not None]


def _read(entry: bytes) -> Quarantined | None:
    try:
        said = json.loads(entry)
        texts = (str(said.get(name) or "") for name in ("queue", "reason", "task_id", "message"))
        return Quarantined(entry, float(said["at"]), *texts)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def replay(one: Quarantined, app: Celery = celery_app) -> None:
    """Send the message again. Raises `InvalidRequest` for one that was not kept whole."""
    body, headers, properties, form = _parts(one)
    if one.task_id:
        keys = stream_keys(one.task_id)
        connections.streams().delete(keys.log, keys.state, keys.completion, keys.completer)
        app.backend.forget(one.task_id)
    with app.pools.producers.acquire(block=True) as producer:
        producer.publish(
            body, routing_key=one.queue, exchange="", headers=headers, retry=True, **form, **properties
        )
    connections.streams().lrem(QUARANTINE_KEY, 1, one.entry.decode())


def _parts(one: Quarantined) -> tuple[bytes, dict[str, Any], dict[str, Any], dict[str, str]]:
    """Body, headers, properties, and form of the body."""
    whole = "must be kept whole: not cut, and of a known form"
    try:
        said = json.loads(one.kept)
        properties, headers = dict(said["properties"]), dict(said.get("headers") or {})
        body = b64decode(said["body"]) if properties.get("body_encoding") == "base64" else said["body"].encode()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest("message", whole, f"{one.kept[:80]}... ({error})") from None
    own = {name: properties[name] for name in _PROPERTIES if properties.get(name) is not None}
    form = {
        "content_type": str(said.get("content-type") or "application/json"),
        "content_encoding": str(said.get("content-encoding") or "utf-8"),
    }
    return body, headers, own, form

"""Messages of tasks, made from one that Celery has made.

Celery and kombu make each message anew, from options, routes and settings. That takes several times as long as
sending it, and nearly all of it is the same in all messages of a task for one queue. So for whoever submits a lot,
such as a gateway, Celery makes one of them. The others are that one with another id, other arguments and other
headers. A worker sees no difference.

Where Celery is asked for more at each submission, there is no template, and `adelay` submits: somebody listens to
its signals, it sends events, replicas confirm, or the broker is another server than that of the streams."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

from celery.utils import uuid
from celery.utils.saferepr import saferepr
from kombu.exceptions import OperationalError

from petiole.contract.requests.generation import in_json
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks.app import amqp, configuration, interop
from petiole.tasks.app.application import App
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.errors import Unavailable
from petiole.tasks.fleet import markers
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.submission.options import affinity_headers, parse
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.traces import carried, spans
from petiole.tasks.wire.keys import AFFINITY_HEADER, SENT_HEADER, TENANT_HEADER

MOST_KEPT = 1000
LARGE = 2**16
"""Characters, token ids and entries of arguments, above which a message takes long to write."""
_OPTIONS = {"queue", "priority", "headers"}
_OF_ONE_TASK = {AFFINITY_HEADER, *carried.NAMES}
"""Headers that a message of Celery's may have, and the messages made from it have of their own."""
_FORM = {"content-type": "application/json", "content-encoding": "utf-8"}


class PreparedMessage(NamedTuple):
    """A message, in two parts, between which a further header may stand. `key`: the list of its queue."""

    key: str
    headers: str
    rest: str

    def command(self) -> tuple[Any, ...]:
        """The command that submits the task."""
        return "LPUSH", self.key, self.headers + self.rest

    def with_last(self, header: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """The same with this header: these values, and behind them one that stands between the last two words."""
        known = "".join(f"{json.dumps(value)}, " for value in values)
        return "LPUSH", self.key, f"{self.headers}, {json.dumps(header)}: [{known}", f"]{self.rest}"


@dataclass(frozen=True)
class MessageTemplate:
    """What the messages of a task for one queue have in common. `embed`: the third part of a body."""

    task: GenerationTask
    queue: str
    key: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    embed: Any
    longest_shown: tuple[int, int]
    tag: str
    numbers: Iterator[int]

    async def message(
        self, task_id: str, kwargs: Mapping[str, Any], headers: Mapping[str, Any]
    ) -> PreparedMessage:
        """The message of a task with this id and these arguments. A thread writes a large one. Raises
        `InvalidRequest`."""
        if _is_large(kwargs):
            return await LOOKUPS.run(self.write, task_id, kwargs, headers)
        return self.write(task_id, kwargs, headers)

    def write(self, task_id: str, kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> PreparedMessage:
        kwargs = in_json(kwargs)
        found = affinity_headers(parse(self.task.name, (), kwargs))
        own = {
            "id": task_id,
            "root_id": task_id,
            "kwargsrepr": amqp.shown(kwargs) or saferepr(kwargs, *self.longest_shown),
            SENT_HEADER: round(time.time(), 3),
        }
        with spans.sending(self.task.name) as span:
            span.sent(task_id, self.queue)
            own |= carried.headers()
        body = b64encode(json.dumps([[], kwargs, self.embed]).encode()).decode()
        properties = {**self.properties, "correlation_id": task_id, "delivery_tag": self._tag()}
        markers.look(self.task.app, self.queue)
        return PreparedMessage(
            self.key,
            f'{{"headers": {json.dumps({**self.headers, **found, **headers, **own})[:-1]}',
            f'}}, "body": "{body}", "properties": {json.dumps(properties)}, {json.dumps(_FORM)[1:]}',
        )

    def _tag(self) -> str:
        return f"{self.tag}-{next(self.numbers)}"


class MessageTemplates:
    """The templates of an event loop: one for each task, queue, priority and tenant."""

    def __init__(self) -> None:
        self._known: dict[object, MessageTemplate | None] = {}

    async def of(
        self, task: GenerationTask, kwargs: Mapping[str, Any], submission: Mapping[str, Any]
    ) -> MessageTemplate | None:
        """The template of a task with this submission. `kwargs`: the arguments of any such task. None: `adelay`
        must submit it. Raises `InvalidRequest`."""
        if not submission.keys() <= _OPTIONS or interop.others_listen():
            return None
        tenant = submission.get("headers", {}).get(TENANT_HEADER)
        which = task.name, submission.get("queue"), submission.get("priority"), tenant
        if which not in self._known:
            told = {**submission, "headers": {} if tenant is None else {TENANT_HEADER: tenant}}
            try:
                found = await LOOKUPS.run(_made, task, kwargs, told)
            except (Unavailable, OperationalError):
                return None  # for now
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[which] = found
        return self._known[which]


templates = connections.PerLoop(MessageTemplates)
"""The running event loop's."""


def _made(
    task: GenerationTask, kwargs: Mapping[str, Any], submission: Mapping[str, Any]
) -> MessageTemplate | None:
    """Let Celery make a message, and send none."""
    app, task_id = task.app, uuid()
    if not _is_plain(app):
        return None
    with app.pools.producers.acquire(block=True) as producer, producer.channel.collecting() as pushes:
        task.apply_async((), kwargs, task_id=task_id, producer=producer, retry=False, **submission)
    [push] = pushes
    message = json.loads(push.message)
    headers, properties = message["headers"], message["properties"]
    if any(message[name] != form for name, form in _FORM.items()) or properties["body_encoding"] != "base64":
        return None
    _, _, embed = json.loads(b64decode(message["body"]))
    prefix = app.conf.broker_transport_options.get("global_keyprefix", "")
    return MessageTemplate(
        task,
        queue=properties["delivery_info"]["routing_key"],
        key=f"{prefix}{push.key}",
        headers={name: value for name, value in headers.items() if name not in _OF_ONE_TASK},
        properties=properties,
        embed=embed,
        longest_shown=(app.amqp.kwargsrepr_maxsize, app.conf.task_repr_maxlevels),
        tag=uuid(),
        numbers=count(),
    )


def _is_large(kwargs: Mapping[str, Any]) -> bool:
    size, waiting = 0, list[Any](kwargs.values())
    for part in waiting:
        if isinstance(part, str | list | dict):
            size += len(part)
            if size > LARGE:
                return True
            waiting += () if isinstance(part, str) else part.values() if isinstance(part, dict) else part
    return False


def _is_plain(app: App) -> bool:
    """Whether a submission does nothing but push a message onto a list of the Redis that has the streams."""
    known, conf = settings(), app.conf
    routes = [getattr(route, "__module__", "") for route in conf.task_routes or ()]
    return (
        known.broker_url == known.streams_url
        and scheme(known.broker_url) not in RABBITMQ
        and str(conf.broker_write_url) == configuration.celery_url(known.broker_url)
        and all(module == configuration.__name__ for module in routes)
        and not (known.confirm_replicas or conf.task_send_sent_event or conf.task_always_eager)
    )

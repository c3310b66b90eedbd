"""Messages of tasks, made from one that Celery has made.

Celery and kombu make each message anew, from options, routes and settings. That takes several times as long as
sending it, and nearly all of it is the same in all messages of a task for one queue. So Celery makes one of them.
The others are that one with another id, other arguments and other headers. A worker sees no difference.

Where Celery is asked for more at each submission, there is no template, and `apply_async` submits: with options
such as `countdown`, inside another task, with a router of the application's, on RabbitMQ, and while somebody
listens to Celery's signals or has put functions of his own around Celery's, as Sentry does."""

from __future__ import annotations

import json
import os
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

from celery import Celery, Task
from celery.utils import uuid
from celery.utils.saferepr import saferepr
from kombu.exceptions import OperationalError
from kombu.messaging import Producer
from kombu.serialization import dumps
from kombu.utils import json as kombu_json

from petiole.contract.requests.generation import in_json
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.tasks.app import amqp, configuration, interop
from petiole.tasks.app.application import App
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.errors import Unavailable
from petiole.tasks.fleet import availability
from petiole.tasks.settings import settings
from petiole.tasks.submission.bundles import reaching_the_broker
from petiole.tasks.traces import carried, spans
from petiole.tasks.wire.headers import KNOWN
from petiole.tasks.wire.keys import AFFINITY_HEADER, SENT_HEADER, TENANT_HEADER

MOST_KEPT = 1000
LARGE = 2**16
"""Characters, token ids and entries of arguments, above which a message takes long to write."""
OPTIONS = {"queue", "priority", "headers", "task_id"}
_OF_ONE_TASK = {"id", "root_id", "kwargsrepr", SENT_HEADER, TENANT_HEADER, AFFINITY_HEADER, *carried.NAMES}
"""Headers that a message of Celery's may have, and the messages made from it have of their own."""
_TAGS = {"correlation_id", "delivery_tag"}
"""The same of its properties."""
_CELERYS = KNOWN.keys() | {"lang"}
"""Headers that a template has from Celery. No template serves a submission that gives one of them itself."""
HeadersOf = Callable[[Sequence[object], Mapping[str, Any]], Mapping[str, str]]
"""The headers that a task's message gets from its arguments. Raises `InvalidRequest`."""

_AWAY = Unavailable, OperationalError
_FORM = {"content-type": "application/json", "content-encoding": "utf-8"}
_END = f", {json.dumps(_FORM)[1:]}"


class PreparedMessage(NamedTuple):
    """A message, in two parts, between which a further header may stand. `key`: the list of its queue. `trace`:
    the headers of the trace that it belongs to."""

    key: str
    headers: str
    rest: str
    trace: Mapping[str, str] = carried.NOTHING

    @property
    def text(self) -> str:
        return self.headers + self.rest

    def command(self) -> tuple[Any, ...]:
        """The command that submits the task."""
        return "LPUSH", self.key, self.text

    def with_last(self, header: str, values: Sequence[Any]) -> tuple[Any, ...]:
        """The same with this header: these values, and behind them one that stands between the last two words."""
        known = "".join(f"{json.dumps(value)}, " for value in values)
        return "LPUSH", self.key, f"{self.headers}, {json.dumps(header)}: [{known}", f"]{self.rest}"


@dataclass(frozen=True)
class MessageTemplate:
    """What the messages of a task for one queue have in common. `list_name`: the list of the queue for kombu,
    which puts `prefix` before it. `headers`, `properties`: their JSON, open at its end. `embed`: the third part of
    a body. `is_timed`: a header says when the task was submitted."""

    task: Task
    headers_of: HeadersOf
    queue: str
    list_name: str
    prefix: str
    headers: str
    properties: str
    embed: Any
    is_timed: bool
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
        """`message` on this thread."""
        with self.sending(task_id, kwargs, headers) as message:
            return message

    @contextmanager
    def sending(
        self, task_id: str, kwargs: Mapping[str, Any], headers: Mapping[str, Any]
    ) -> Iterator[PreparedMessage]:
        """A context in which this message may be sent, in the span of the submission. Raises `InvalidRequest`."""
        kwargs = in_json(kwargs)
        found = self.headers_of((), kwargs)
        with spans.sending(self.task.name) as span:
            span.sent(task_id, self.queue)
            yield self._written(task_id, kwargs, {**found, **headers})

    def _written(self, task_id: str, kwargs: Mapping[str, Any], headers: Mapping[str, Any]) -> PreparedMessage:
        trace = carried.headers()
        own = {
            **trace,
            **headers,
            "id": task_id,
            "root_id": task_id,
            "kwargsrepr": amqp.shown(kwargs) or saferepr(kwargs, *self.longest_shown),
        }
        if self.is_timed:
            own[SENT_HEADER] = round(time.time(), 3)
        body = b64encode(_body([[], kwargs, self.embed]).encode()).decode()
        tags = f'"correlation_id": {json.dumps(task_id)}, "delivery_tag": "{self.tag}-{next(self.numbers)}"'
        availability.look_for_results(self.task.app, self.queue)
        return PreparedMessage(
            self.prefix + self.list_name,
            f'{{"headers": {self.headers}, {_headers(own)[1:-1]}',
            f'}}, "body": "{body}", "properties": {self.properties}, {tags}}}{_END}',
            trace,
        )


def _open(value: Mapping[str, Any], without: Collection[str]) -> str:
    """JSON of an object without these names, to which more can be added."""
    return json.dumps({name: one for name, one in value.items() if name not in without})[:-1]


def _headers(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # kombu writes more types, such as dates, and takes longer for all
        return str(kombu_json.dumps(value))  # type: ignore[no-untyped-call]


def _body(value: Sequence[Any]) -> str:
    try:
        return json.dumps(value)
    except TypeError:  # as above; kombu's error is another one
        return str(dumps(value, "json")[-1])  # type: ignore[no-untyped-call]


class MessageTemplates:
    """The templates of a task: one for each queue, priority and tenant. They are made anew when the app's settings
    or Celery's functions have changed, and in a forked child, whose messages need tags of their own."""

    def __init__(self, task: Task, headers_of: HeadersOf) -> None:
        self._task, self._headers_of = task, headers_of
        self._known: dict[object, MessageTemplate | None] = {}
        self._made_in: tuple[object, ...] = ()
        self._functions: Sequence[object] = ()
        self._is_plain = self._goes_to_the_streams = False
        self._tenants: Collection[str] = ()

    def of(self, kwargs: Mapping[str, Any], submission: Mapping[str, Any]) -> MessageTemplate | None:
        """The template for this submission, which has been checked. `kwargs`: arguments of the task. None:
        `apply_async` must submit it. Connects to the broker if the template is new. Raises `InvalidRequest`;
        `Unavailable` if the broker is away."""
        if (which := self._which(submission)) is None:
            return None
        if which not in self._known:
            self._headers_of((), in_json(kwargs))  # before anybody waits for the broker
            app = self._task.app
            with app.pools.producers.acquire(block=True) as producer:
                if not producer.connection.connected:
                    with reaching_the_broker(app):
                        producer.connection.ensure_connection(**app.conf.task_publish_retry_policy)
                try:
                    self._keep(which, self._made(producer, kwargs, submission))
                except _AWAY:  # the connection was lost: `apply_async` makes another one
                    return None
        return self._known.get(which)

    async def to_the_streams(
        self, kwargs: Mapping[str, Any], submission: Mapping[str, Any]
    ) -> MessageTemplate | None:
        """The same for whoever sends the messages with commands of its own, to the Redis of the streams. None also
        if they do not go there, if replicas confirm them, or if the broker is away for now."""
        if (which := self._which(submission)) is None or not self._goes_to_the_streams:
            return None
        if which not in self._known:
            try:
                self._keep(which, await LOOKUPS.run(self._make, kwargs, submission))
            except _AWAY:
                return None
        return self._known.get(which)

    def _make(self, kwargs: Mapping[str, Any], submission: Mapping[str, Any]) -> MessageTemplate | None:
        with self._task.app.pools.producers.acquire(block=True) as producer:
            return self._made(producer, kwargs, submission)

    def _made(
        self, producer: Any, kwargs: Mapping[str, Any], submission: Mapping[str, Any]
    ) -> MessageTemplate | None:
        """Let Celery make a message, and send none."""
        task, app, task_id = self._task, self._task.app, uuid()
        if not hasattr(producer.channel, "collecting"):  # no Redis
            return None
        tenant = self._tenant(submission)
        told = {**submission, "task_id": task_id, "headers": {} if tenant is None else {TENANT_HEADER: tenant}}
        try:
            with producer.channel.collecting() as pushes:
                task.apply_async((), kwargs, producer=producer, retry=False, **told)
        except _AWAY:
            producer.revive(producer.connection)  # kombu has closed the channel
            raise
        if len(pushes) != 1:
            return None
        message = json.loads(pushes[0].message)
        headers, properties = message["headers"], message["properties"]
        if (
            any(message[name] != form for name, form in _FORM.items())
            or properties["body_encoding"] != "base64"
            or "compression" in headers
            or headers.get("expires", True)  # its task's own: each message has another. Protocol 1 has none
        ):
            return None
        _, _, embed = json.loads(b64decode(message["body"]))
        shown_levels = app.conf.get("task_repr_maxlevels", 3)  # before Celery 5.7 always 3
        return MessageTemplate(
            task,
            self._headers_of,
            queue=properties["delivery_info"]["routing_key"],
            list_name=pushes[0].key,
            prefix=app.conf.broker_transport_options.get("global_keyprefix", ""),
            headers=_open(headers, _OF_ONE_TASK),
            properties=_open(properties, _TAGS),
            embed=embed,
            is_timed=SENT_HEADER in headers,
            longest_shown=(app.amqp.kwargsrepr_maxsize, shown_levels),
            tag=uuid(),
            numbers=count(),
        )

    def _keep(self, which: object, made: MessageTemplate | None) -> None:
        if len(self._known) >= MOST_KEPT:
            self._known.clear()
        self._known[which] = made

    def _which(self, submission: Mapping[str, Any]) -> object:
        """None: no template serves it."""
        app, queue = self._task.app, submission.get("queue")
        if (
            not submission.keys() <= OPTIONS
            or type(queue) not in {str, type(None)}
            or not (submission.get("headers") or {}).keys().isdisjoint(_CELERYS)
            or interop.others_listen()
            or app.current_worker_task is not None
            or self._task.ignore_result
            or "apply_async" in vars(self._task)
            or "send_task" in vars(app)
        ):
            return None
        now = os.getpid(), dict(app.conf.changes)
        functions = [getattr(*where) for where in _submitters(self._task)]
        if self._made_in != now or not all(map(is_, functions, self._functions)):
            self._is_plain = _is_plain(app) and all(_is_as_written(*where) for where in _submitters(self._task))
            self._goes_to_the_streams = _goes_to_the_streams(app)
            self._tenants = settings().weights.keys()
            self._known, self._made_in, self._functions = {}, now, functions
        return (queue, submission.get("priority"), self._tenant(submission)) if self._is_plain else None

    def _tenant(self, submission: Mapping[str, Any]) -> str | None:
        """The tenant, if a queue of his own may be meant."""
        tenant = (submission.get("headers") or {}).get(TENANT_HEADER)
        return tenant if tenant in self._tenants else None


def _submitters(task: Task) -> Sequence[tuple[type, str]]:
    """The functions through which Celery submits."""
    return (
        (type(task), "apply_async"),
        (Task, "apply_async"),
        (type(task.app), "send_task"),
        (Celery, "send_task"),
        (Producer, "publish"),
    )


def _is_as_written(kind: type, name: str) -> bool:
    """Whether nobody has put a function of his own in the place of this method. A wrapper of wrapt's, such as New
    Relic's, calls itself a function, and equals what it wraps."""
    owner = next(one for one in kind.__mro__ if name in vars(one))
    found, module = vars(owner)[name], sys.modules[owner.__module__]
    return type(found) is FunctionType and found.__code__.co_filename == module.__file__


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
    """Whether a submission does nothing but push a message onto a list of Redis."""
    conf = app.conf
    routes = [getattr(route, "__module__", "") for route in conf.task_routes or ()]
    return (
        scheme(conf.broker_url) not in RABBITMQ
        and all(module == configuration.__name__ for module in routes)
        and conf.task_publish_retry
        and not (conf.task_send_sent_event or conf.task_always_eager)
    )


def _goes_to_the_streams(app: App) -> bool:
    known = settings()
    return (
        known.broker_url == known.streams_url
        and str(app.conf.broker_write_url) == configuration.celery_url(known.broker_url)
        and not known.confirm_replicas
    )

"""A message from a template is the message that Celery makes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import wrapt
from celery import Celery, Task, signals
from kombu.exceptions import EncodeError
from kombu.messaging import Producer
from kombu.transport.redis import Channel, Transport
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from petiole.tasks import InvalidRequest, Unavailable
from petiole.tasks.app.amqp import Breaker
from petiole.tasks.app.application import make_app
from petiole.tasks.fleet import models
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import settings
from petiole.tasks.submission import message_templates
from petiole.tasks.submission.counting import CountTask
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.traces import carried, spans
from petiole.tasks.wire.keys import SENT_HEADER
from tests.support.site import RedisServer

Options = dict[str, Any]
PROMPT = {"prompt": 'It\'s "x" \\ é', "stop": ["a", "b"], "seed": 3, "logit_bias": {5: -1.5}}
TALK = {"messages": [{"role": "user", "content": 'It\'s "x" \\ é ' + "long " * 300}], "max_tokens": "rest"}


THEIRS = "00-11111111111111111111111111111111-2222222222222222-01"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def tasks(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, Any]]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setenv("PETIOLE_TENANT_WEIGHTS", "acme=2")
    settings.cache_clear()
    app = make_app()

    def hand_over(*given: object, **request: object) -> None:
        """The body is the worker's."""

    bases = {"tasks.generate": GenerationTask, "tasks.chat": GenerationTask, "tasks.count": CountTask}
    yield {name: app.task(hand_over, base=base, name=name, shared=False) for name, base in bases.items()}
    app.close()
    settings.cache_clear()


async def message_of(task: Any, kwargs: Options, submission: Options) -> message_templates.PreparedMessage | None:
    found = await task.templates.to_the_streams(kwargs, submission)
    return None if found is None else await found.message("mine", kwargs, submission.get("headers", {}))


def as_said(raw: bytes) -> Options:
    """A message without what differs from message to message."""
    message: Options = json.loads(raw)
    message["body"] = json.loads(base64.b64decode(message["body"]))
    assert message["headers"].pop("origin")
    if message["headers"]["task"] != "tasks.count":
        assert message["headers"].pop(SENT_HEADER)
    for name in ("delivery_tag", "reply_to"):
        assert message["properties"].pop(name)
    return message


@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
@pytest.mark.parametrize(
    ("submission", "queue"),
    [
        ({}, "petiole"),
        ({"priority": 3}, "petiole\x06\x163"),
        ({"queue": "other"}, "other"),
        ({"headers": {"tenant": "acme", "mine": ["é"]}}, "petiole.acme"),
        ({"headers": {"tenant": "globex"}, "priority": 9, "queue": "other"}, "other\x06\x169"),
    ],
)
@pytest.mark.parametrize(
    ("name", "kwargs"), [("tasks.generate", PROMPT), ("tasks.chat", TALK)], ids=["generate", "chat"]
)
def test_a_message_is_what_celery_makes(
    server: RedisServer, tasks: Mapping[str, Any], name: str, kwargs: Options, submission: Options, queue: str,
    large: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if large:
        monkeypatch.setattr(message_templates, "LARGE", 10)
    client, task = connect(server.url), tasks[name]

    async def both() -> tuple[message_templates.PreparedMessage | None, message_templates.PreparedMessage | None]:
        before = await message_of(task, {**kwargs, "max_tokens": 1}, submission)
        return before, await message_of(task, kwargs, submission)

    first, second = asyncio.run(both())
    assert not client.llen(queue), "a template submits nothing"
    assert first is not None
    assert second is not None
    task.apply_async((), kwargs, **submission, task_id="mine")
    [theirs] = client.lrange(queue, 0, -1)
    client.delete(queue)
    client.execute_command(*second.command())
    [ours] = client.lrange(queue, 0, -1)
    assert as_said(ours) == as_said(theirs)
    *before, behind = second.with_last("held", ["k", 1])
    more = json.loads(before[-1] + "7" + behind)
    assert more["headers"].pop("held") == ["k", 1, 7]
    assert as_said(json.dumps(more).encode()) == as_said(theirs)
    tags = {json.loads(str(one.command()[2]))["properties"]["delivery_tag"] for one in (first, second)}
    assert len(tags) == 2


def test_what_is_wrong_is_refused(tasks: Mapping[str, Any]) -> None:
    async def ask() -> None:
        assert await message_of(tasks["tasks.generate"], {"prompt": "x"}, {}) is not None
        for kwargs in ({"prompt": "x", "temprature": 1}, {"prompt": 5}):
            with pytest.raises(InvalidRequest):
                await message_of(tasks["tasks.generate"], kwargs, {})

    asyncio.run(ask())
    with pytest.raises(InvalidRequest):
        asyncio.run(message_of(tasks["tasks.generate"], {"prompt": 5}, {}))


def test_where_celery_does_more_it_submits(tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks["tasks.generate"]

    def has_one(**submission: Any) -> bool:
        return asyncio.run(message_of(task, {"prompt": "x"}, submission)) is not None

    def heard(**_: object) -> None:
        pass

    assert has_one()
    assert not has_one(expires=5)
    for signal in (signals.before_task_publish, signals.after_task_publish, signals.task_sent):
        signal.connect(heard)
        assert not has_one()
        signal.disconnect(heard)
    for name, value in {"task_send_sent_event": True, "task_routes": {"*": "elsewhere"}}.items():
        monkeypatch.setitem(task.app.conf, name, value)
        assert not has_one()
        monkeypatch.undo()
    assert has_one()


@pytest.mark.parametrize(
    "known",
    [{"PETIOLE_CONFIRM_REPLICAS": "1"}, {"PETIOLE_REDIS_URL": "redis://another:1"}],
    ids=["confirmed", "elsewhere"],
)
def test_where_the_settings_ask_for_more_celery_submits(
    tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, known: dict[str, str]
) -> None:
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    assert asyncio.run(message_of(tasks["tasks.generate"], {"prompt": "x"}, {})) is None


def test_without_the_broker_there_is_none_for_now(server: RedisServer, tasks: Mapping[str, Any]) -> None:
    server.kill()

    async def ask() -> None:
        assert await message_of(tasks["tasks.generate"], {"prompt": "x"}, {}) is None
        server.restart()
        assert await message_of(tasks["tasks.generate"], {"prompt": "x"}, {}) is not None

    asyncio.run(ask())


def queued(server: RedisServer, queue: str = "petiole") -> list[Options]:
    """What is in a queue, taken from it."""
    client = connect(server.url)
    found = [as_said(raw) for raw in client.lrange(queue, 0, -1)]
    client.delete(queue)
    return found


def test_the_first_submission_waits_for_the_broker_once(
    server: RedisServer, tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, tried, stock = tasks["tasks.generate"], list[str](), Transport.establish_connection
    monkeypatch.setattr(Transport, "establish_connection", lambda self: tried.append("") or stock(self))
    server.kill()

    def tries(submit: Callable[[], object]) -> int:
        task.app.breaker = Breaker()
        tried.clear()
        with pytest.raises(Unavailable):
            submit()
        return len(tried)

    ours = tries(lambda: task.delay(prompt="x"))
    assert ours == tries(lambda: task.apply_async((), {"prompt": "x"}))


WRITTEN_BY_KOMBU = {"today": date(2026, 1, 2), "at": UUID(int=7), "share": Decimal("1.5")}


@pytest.mark.parametrize(
    ("name", "request_", "submission", "queue"),
    [
        ("tasks.generate", PROMPT, {}, "petiole"),
        ("tasks.chat", TALK, {"priority": 3, "headers": {"tenant": "acme", "mine": 1}}, "petiole.acme\x06\x163"),
        ("tasks.generate", PROMPT, {"queue": "other", "headers": WRITTEN_BY_KOMBU}, "other"),
        ("tasks.generate", PROMPT, {"headers": {"shadow": "hidden"}, "countdown": 0}, "petiole"),
        ("tasks.generate", PROMPT | {"temperature": Decimal("0.5")}, {}, "petiole"),
    ],
)
def test_delay_sends_what_apply_async_sends(
    server: RedisServer, tasks: Mapping[str, Any], name: str, request_: Options, submission: Options, queue: str
) -> None:
    task = tasks[name]
    theirs = task.apply_async((), request_, task_id="mine", **submission)
    [sent] = queued(server, queue)
    for _ in range(2):
        ours = task.delay(**request_, task_id="mine", **submission)
        assert queued(server, queue) == [sent]
        assert (ours.id, ours.submitted_to, ours.trace) == (theirs.id, theirs.submitted_to, theirs.trace)


def test_a_count_is_submitted_in_the_same_way(server: RedisServer, tasks: Mapping[str, Any]) -> None:
    task = tasks["tasks.count"]
    theirs = task.apply_async((), {"texts": "x"}, task_id="mine")
    [sent] = queued(server, "petiole.count")
    ours = task.delay(texts="x", task_id="mine")
    assert queued(server, "petiole.count") == [sent]
    assert type(ours) is type(theirs)
    assert ours.submitted_to == theirs.submitted_to == "petiole"
    for eta in ("2099-01-01T00:00:00", "soon"):
        with pytest.raises(InvalidRequest, match="eta: must not be given"):
            task.delay(texts="x", eta=eta)


def test_a_count_for_an_adapter_counts_with_its_model(
    server: RedisServer, tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(queue="far", adapter="pirate")
    monkeypatch.setattr(models.directory, "find", lambda *_: found)
    assert tasks["tasks.count"].delay(texts="x", model="pirate").submitted_to == "far"
    [sent] = queued(server, "far.count")
    assert sent["body"][1] == {"texts": "x"}


def test_a_trace_that_is_given_is_kept(server: RedisServer, tasks: Mapping[str, Any]) -> None:
    task = tasks["tasks.generate"]
    with carried.following({"traceparent": THEIRS.replace("2", "3")}):
        task.apply_async((), {"prompt": "x"}, headers={"traceparent": THEIRS})
        task.delay(prompt="x", headers={"traceparent": THEIRS})
    assert {sent["headers"]["traceparent"] for sent in queued(server)} == {THEIRS}


def test_what_json_cannot_write_is_kombu_s_error(tasks: Mapping[str, Any]) -> None:
    class Unknown:
        def __float__(self) -> float:
            return 0.5

    task = tasks["tasks.generate"]
    task.delay(prompt="x")
    with pytest.raises(EncodeError):
        task.apply_async((), {"prompt": "x", "temperature": Unknown()})
    with pytest.raises(EncodeError):
        task.delay(prompt="x", temperature=Unknown())


def test_what_a_task_says_of_itself_holds_for_each_message(
    server: RedisServer, tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time is each message's own, and a result that is ignored is not waited for."""
    task = tasks["tasks.generate"]
    task.expires = 60
    for _ in range(3):
        task.delay(prompt="x")
    assert len({sent["headers"]["expires"] for sent in queued(server)}) == 3
    task.expires, task._exec_options = None, None
    assert not task.delay(prompt="x").ignored
    monkeypatch.setattr(task, "ignore_result", True)
    assert task.delay(prompt="x").ignored
    assert [sent["headers"]["ignore_result"] for sent in queued(server)] == [True, False]


@pytest.mark.parametrize(
    "known", [{"broker_url": "memory://"}, {"broker_write_url": "memory://"}, {"task_protocol": 1}], ids=str
)
def test_what_no_template_can_make_is_celery_s(tasks: Mapping[str, Any], known: Options) -> None:
    task = tasks["tasks.generate"]
    task.app.conf.update(known)
    for _ in range(2):
        task.delay(prompt="x")
    assert [*task.templates._known.values()] == [None]


def test_a_connection_that_is_lost_before_a_template_is_made_is_made_again(
    server: RedisServer, tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, lost, stock = tasks["tasks.generate"], list[str](), Channel._queue_bind
    task.delay(prompt="x")

    def lose(self: Any, *more: Any) -> None:
        if not lost:
            lost.append("the connection")
            raise ConnectionResetError
        stock(self, *more)

    monkeypatch.setattr(Channel, "_queue_bind", lose)
    for _ in range(3):
        task.delay(prompt="x", queue="other")
    assert lost
    assert len(queued(server, "other")) == 3


def test_a_submission_is_one_span_that_fails_with_it(
    server: RedisServer, tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, memory, task = TracerProvider(), InMemorySpanExporter(), tasks["tasks.generate"]
    provider.add_span_processor(SimpleSpanProcessor(memory))
    monkeypatch.setattr(spans, "tracer", lambda: provider.get_tracer("petiole"))

    def sent() -> list[Any]:
        found = [*memory.get_finished_spans()]
        memory.clear()
        return found

    with pytest.raises(InvalidRequest):
        task.delay(prompt=5)
    task.delay(prompt="x")
    with pytest.raises(InvalidRequest):
        task.delay(prompt=5)
    [span] = sent()
    assert span.status.is_unset
    [message] = queued(server)
    assert f"{span.context.span_id:016x}" in message["headers"]["traceparent"]
    task.app.conf.task_publish_retry_policy = {"max_retries": 0}
    task.delay(prompt="x")
    sent()
    server.kill()
    with pytest.raises(Unavailable):
        task.delay(prompt="x")
    [span] = sent()
    assert not span.status.is_ok
    assert span.attributes["error.type"] == "Unavailable"


def test_a_function_around_celery_s_is_called_each_time(
    tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sentry, Datadog and New Relic put theirs there, before or after the first submission, and tests put theirs
    into an object."""
    task, called = tasks["tasks.generate"], list[str]()
    task.delay(prompt="x")

    def around(stock: Any, _: object, args: Any, options: Any) -> Any:
        called.append(stock.__name__)
        return stock(*args, **options)

    def plain(stock: Any) -> Any:
        return functools.wraps(stock)(lambda *args, **options: around(stock, None, args, options))

    of_classes = [(Task, "apply_async"), (Celery, "send_task"), (Producer, "publish")]
    of_objects = [(task, "apply_async"), (task.app, "send_task")]
    cases = [(*one, plain) for one in of_classes + of_objects]
    cases += [(*one, lambda stock: wrapt.FunctionWrapper(stock, around)) for one in of_classes]
    for where, name, wrapper in cases:
        monkeypatch.setattr(where, name, wrapper(getattr(where, name)))
        task.delay(prompt="x")
        assert called == [name]
        monkeypatch.undo()
        called.clear()
    task.delay(prompt="x")
    assert not called


def test_a_change_of_the_settings_counts_at_once(server: RedisServer, tasks: Mapping[str, Any]) -> None:
    task = tasks["tasks.generate"]
    task.delay(prompt="x")
    for is_eager in (True, False):
        task.app.conf.task_always_eager = is_eager
        task.delay(prompt="x")
        assert len(queued(server)) == 1, "the first one, or the last one"


def test_a_forked_child_has_tags_of_its_own(server: RedisServer, tasks: Mapping[str, Any]) -> None:
    task = tasks["tasks.generate"]
    task.delay(prompt="x")
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            task.delay(prompt="x")
        os._exit(0)
    os.waitpid(child, 0)
    task.delay(prompt="x")
    raw = connect(server.url).lrange("petiole", 0, -1)
    assert len({json.loads(one)["properties"]["delivery_tag"] for one in raw}) == 3

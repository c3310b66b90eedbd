"""Submissions of one event loop that wait together are sent together, and each is what it would be alone."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import signals
from celery.utils.saferepr import saferepr
from hypothesis import given, strategies as st

from petiole.tasks import InvalidRequest, Unavailable, Unconfirmed
from petiole.tasks.app import amqp, redis_transport
from petiole.tasks.app.application import make_app
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import settings
from petiole.tasks.submission.definitions import generate
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.wire.keys import SENT_HEADER
from tests.support.site import RedisServer

Options = dict[str, Any]
who: ContextVar[str] = ContextVar("who")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def task(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setenv("PETIOLE_TENANT_WEIGHTS", "acme=2")
    monkeypatch.setenv("PETIOLE_CONFIRM_TIMEOUT_S", "0.1")
    settings.cache_clear()
    app = make_app()

    def hand_over(*given: object, **request: object) -> None:
        """The body is the worker's."""

    yield app.task(hand_over, base=GenerationTask, name=generate.name, shared=False)
    app.close()
    settings.cache_clear()


def together(task: Any, *options: Options) -> list[Any]:
    """What the submissions with these options, made at once, return or raise."""

    async def main() -> list[Any]:
        return await asyncio.gather(*(task.adelay(**one) for one in options), return_exceptions=True)

    return asyncio.run(main())


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each round trip has."""
    made, stock = list[int](), redis_transport._Channel._replies
    monkeypatch.setattr(
        redis_transport._Channel,
        "_replies",
        lambda self, pushes, *more: made.append(len(pushes)) or stock(self, pushes, *more),
    )
    return made


@contextmanager
def heard(signal: Any, receiver: Callable[..., Any]) -> Iterator[None]:
    signal.connect(receiver, weak=False)
    try:
        yield
    finally:
        signal.disconnect(receiver)


def messages(server: RedisServer, queue: str) -> list[Options]:
    """What is in a queue, without what differs from message to message."""
    found = []
    for raw in connect(server.url).lrange(queue, 0, -1):
        message = json.loads(raw)
        message["body"] = json.loads(base64.b64decode(message["body"]))
        message["properties"].pop("delivery_tag")
        message["headers"].pop(SENT_HEADER)
        own = message["headers"]["id"]
        found.append(json.loads(json.dumps(message).replace(own, "OWN")))
    return found


@pytest.mark.parametrize(
    ("options", "queue"),
    [
        ({}, "petiole"),
        ({"priority": 3}, "petiole\x06\x163"),
        ({"queue": "other"}, "other"),
        ({"headers": {"tenant": "acme", "mine": [1]}}, "petiole.acme"),
        ({"countdown": 0.0, "expires": 1e9, "time_limit": 5, "ignore_result": True}, "petiole"),
        ({"eta": "2099-01-01T00:00:00", "task_id": "mine"}, "petiole"),
        ({"link": generate.s(max_tokens=1), "stop": ["a", "b"], "seed": 3}, "petiole"),
        ({"retry": False}, "petiole"),
    ],
)
def test_a_message_is_what_it_is_alone(server: RedisServer, task: Any, options: Options, queue: str) -> None:
    request = {"prompt": 'It\'s "x" \\ é', **options}
    task.delay(**request)
    (alone,) = messages(server, queue)
    together(task, *[request] * 20)
    found = messages(server, queue)
    for message in found:
        for time in ("expires",):
            message["headers"][time] = alone["headers"][time]
        message["properties"]["reply_to"] = alone["properties"]["reply_to"]  # one for each thread
        message["headers"]["origin"] = alone["headers"]["origin"]
    assert found == [alone] * 21


def test_those_that_wait_together_share_a_round_trip(task: Any, trips: list[int]) -> None:
    task.delay(prompt="x")
    trips.clear()
    submitted = together(task, *[{"prompt": "x", "task_id": f"t{k}"} for k in range(100)])
    assert [one.id for one in submitted] == [f"t{k}" for k in range(100)]
    assert {one.submitted_to for one in submitted} == {"petiole"}
    assert sum(trips) == 100
    assert len(trips) < 50


def test_signals_are_sent_to_each_in_its_callers_context(server: RedisServer, task: Any) -> None:
    """As Celery's: the one before may change headers and properties; the one after follows the write."""
    client, log = connect(server.url), list[tuple[str, str, bool]]()

    def before(body: Any, headers: Options, properties: Options, **_: object) -> None:
        headers["traced"] = who.get()
        properties["priority"] = 9
        log.append(("before", who.get(), headers["id"] in sent()))

    def after(headers: Options, routing_key: str, exchange: str, **_: object) -> None:
        assert (routing_key, exchange) == ("petiole", "")
        log.append(("after", who.get(), headers["id"] in sent()))

    def sent() -> str:
        return str(client.lrange("petiole\x06\x169", 0, -1))

    async def submit(name: str) -> None:
        who.set(name)
        await task.adelay(prompt="x", task_id=f"task-{name}")

    async def main() -> None:
        await asyncio.gather(*(submit(f"c{k}") for k in range(8)))

    with heard(signals.before_task_publish, before), heard(signals.after_task_publish, after):
        asyncio.run(main())
    assert sorted(log) == sorted(
        (when, f"c{k}", when == "after") for k in range(8) for when in ("before", "after")
    )
    traced = {message["headers"]["traced"]: message for message in messages(server, "petiole\x06\x169")}
    assert traced.keys() == {f"c{k}" for k in range(8)}


def test_a_receiver_may_change_the_policy_of_one(server: RedisServer, task: Any) -> None:
    def before(headers: Options, retry_policy: Options, **_: object) -> None:
        if headers["id"] == "patient":
            retry_policy["max_retries"] = 99

    with heard(signals.before_task_publish, before):
        found = together(task, *[{"prompt": "x", "task_id": name} for name in ("first", "patient", "last")])
    assert [one.id for one in found] == ["first", "patient", "last"]
    assert len(messages(server, "petiole")) == 3


@pytest.mark.parametrize("is_heard", [False, True], ids=["together", "one by one"])
def test_the_fault_of_one_is_no_other_s(server: RedisServer, task: Any, is_heard: bool, trips: list[int]) -> None:
    """A wrong request, a header that is no JSON, a queue that is none: each fails alone."""
    connect(server.url).set("damaged", "x")
    after: list[str] = []

    def sent(headers: Options, **_: object) -> None:
        after.append(headers["id"])

    with heard(signals.after_task_publish, sent) if is_heard else nullcontext():
        found = together(
            task,
            {"prompt": "x", "task_id": "first"},
            {"prompt": 5},
            {"prompt": "x", "headers": {"mine": object()}},
            {"prompt": "x", "queue": "damaged"},
            {"prompt": "x", "confirm": 1},
            {"prompt": "x", "task_id": "last"},
        )
    assert [found[0].id, found[5].id] == ["first", "last"]
    kinds = [type(one) for one in found[1:5]]
    assert kinds[0] is InvalidRequest
    assert issubclass(kinds[1], Exception)
    assert kinds[2:] == [Unavailable, Unconfirmed]
    assert "WRONGTYPE" in str(found[3])
    assert sorted(after) == (["first", "last"] if is_heard else [])
    assert len(trips) == 1 if is_heard else sum(trips) == 3, "one by one only what is confirmed needs a push"
    with pytest.raises(Unavailable, match="WRONGTYPE"):
        task.delay(prompt="x", queue="damaged")
    task.delay(prompt="x")  # nobody's breaker is open
    with pytest.raises(kinds[1]):
        task.delay(prompt="x", headers={"mine": object()})


def test_a_connection_that_is_lost_is_replaced(server: RedisServer, task: Any) -> None:
    client = connect(server.url)
    for _ in range(3):
        together(task, *[{"prompt": "x"}] * 5)
        client.client_kill_filter(_type="normal", skipme=True)
    assert client.llen("petiole") == 15


def test_what_was_sent_before_the_broker_went_is_sent_once(
    server: RedisServer, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reply is known, so it is not sent again with the others."""
    stock, refused = redis_transport._Channel._replies, list[int]()

    def push(self: Any, pushes: Any, confirmation: Any) -> Any:
        if not refused:
            refused.append(1)
            replies = stock(self, pushes[:2], confirmation)
            return replies + [redis.ConnectionError("lost")] * (len(pushes) - 2)
        return stock(self, pushes, confirmation)

    monkeypatch.setattr(redis_transport._Channel, "_replies", push)
    found = together(task, *[{"prompt": "x"}] * 4)
    assert not any(isinstance(one, Exception) for one in found)
    assert connect(server.url).llen("petiole") == 4


@given(
    st.dictionaries(
        st.text("ab_", max_size=20),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=600) | st.lists(st.integers()),
        max_size=10,
    )
)
def test_arguments_are_shown_as_celery_shows_them(given: Options) -> None:
    shown = amqp.shown(given)
    assert shown is None or shown == saferepr(given, 1024)

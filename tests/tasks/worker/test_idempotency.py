"""The rules of `once`: what a try sends, what ends it, and what is the same in the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery, states
from celery.app.task import Context
from kombu import Connection
from kombu.utils.uuid import uuid

from petiole.tasks.servers.replies import DamagedKey
from petiole.tasks.worker import idempotency as rules
from petiole.tasks.worker.broker.transport import Transport
from petiole.tasks.worker.completion import backend as backends
from petiole.tasks.worker.completion.backend import BACKENDS, BodyClaimedError
from petiole.tasks.worker.idempotency import IdempotentCompletion, ServerUnavailable, guarded, trial
from tests.support.site import RedisServer

QUEUE = "links"
NO_KINDS = ()


@pytest.fixture(autouse=True)
def ids() -> Iterator[None]:
    before = uuid.__defaults__
    rules.install()
    yield
    uuid.__defaults__ = before


def made(once: IdempotentCompletion, step: str = "") -> list[str]:
    with once.trying(step):
        return [uuid() for _ in range(3)]


def test_each_try_of_a_task_makes_the_same_ids_on_every_worker() -> None:
    assert made(IdempotentCompletion("a")) == made(IdempotentCompletion("a"))
    assert (
        len(
            {
                *made(IdempotentCompletion("a")),
                *made(IdempotentCompletion("b")),
                *made(IdempotentCompletion("a"), "another step"),
            }
        )
        == 9
    )
    assert uuid() != uuid(), "outside a try they are random"


def test_nothing_follows_a_refusal() -> None:
    once, sent = IdempotentCompletion("a"), []
    with once.trying():
        with pytest.raises(ServerUnavailable, match="away"), guarded():
            raise redis.ConnectionError("away")
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match="away"), guarded():
                sent.append(1)
    with once.trying(), guarded():
        sent.append(2)
    assert sent == [2]


def test_an_error_of_the_call_is_no_refusal() -> None:
    with IdempotentCompletion("a").trying():
        with pytest.raises(DamagedKey), guarded():
            raise DamagedKey("WRONGTYPE")
        with guarded():
            pass


# ------------------------------------------------------------ messages


@pytest.fixture
def producer(server: RedisServer) -> Iterator[Any]:
    connection = Connection(server.url)
    connection.transport_cls = Transport
    yield connection.Producer()
    connection.release()


def send(once: IdempotentCompletion, producer: Any, *messages: str) -> None:
    with once.trying():
        for message in messages:
            once.send(message, lambda: producer.publish({}, routing_key=QUEUE), NO_KINDS)


def test_a_message_is_put_once_in_however_many_tries_of_whichever_worker(
    producer: Any, client: redis.Redis
) -> None:
    once = IdempotentCompletion("a")
    for _ in range(3):
        send(once, producer, "x", "y")
    send(IdempotentCompletion("a"), producer, "x", "y", "z")
    assert client.llen(QUEUE) == 3
    send(IdempotentCompletion("b"), producer, "x")
    assert client.llen(QUEUE) == 4, "another task's"


def test_what_is_linked_twice_is_sent_twice(producer: Any, client: redis.Redis) -> None:
    for once in (IdempotentCompletion("a"), IdempotentCompletion("a")):
        send(once, producer, "x", "x")
    assert client.llen(QUEUE) == 2


def test_a_message_that_was_refused_is_put_by_the_next_try(producer: Any, client: redis.Redis) -> None:
    once = IdempotentCompletion("a")
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(ServerUnavailable):
            send(once, producer, "x")
    finally:
        client.config_set("maxmemory", 0)
    send(once, producer, "x")
    assert client.llen(QUEUE) == 1


# ------------------------------------------------------------ chords


class Bodies:
    """Chords of two tasks, and how often their bodies were sent."""

    def __init__(self, app: Celery) -> None:
        self.app, self.sent, self.lost = app, 0, False

    def count(self, task_id: str, *, tries: int = 1, lost: bool = False) -> None:
        """Count a task. `lost`: the connection is lost before the body is sent."""
        request = Context(id=task_id, group="g", group_index=0, chord=self.app.signature("body"))
        once = IdempotentCompletion(task_id)
        for _ in range(tries):
            with once.trying():
                self.lost = lost
                self.app.backend.on_chord_part_return(request, states.SUCCESS, task_id)

    def send(self, *_: object, **__: object) -> None:
        if self.lost and (once := trial()):
            raise once.refuse(redis.ConnectionError("lost"))
        self.sent += 1


@pytest.fixture
def bodies(server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bodies]:
    app = Celery("test", set_as_current=False)
    app.loader.override_backends = BACKENDS
    app.conf.update(result_backend=server.url)
    bodies = Bodies(app)
    monkeypatch.setattr(app.amqp, "_retry_publish", bodies.send)
    app.backend.set_chord_size("g", 2)
    yield bodies
    app.close()


def test_a_chord_counts_each_task_once_and_sends_one_body(bodies: Bodies) -> None:
    bodies.count("a", tries=3)
    assert bodies.sent == 0
    bodies.count("b", tries=3)
    bodies.count("a")
    assert bodies.sent == 1


def test_the_task_that_has_claimed_the_body_claims_it_again(bodies: Bodies) -> None:
    bodies.count("a")
    with pytest.raises(ServerUnavailable):
        bodies.count("b", lost=True)
    bodies.count("a")
    assert bodies.sent == 0, "the other task's message comes again"
    bodies.count("b")
    assert bodies.sent == 1


def test_a_claim_of_a_worker_that_does_not_note_its_task_is_waited_for(
    bodies: Bodies, client: redis.Redis
) -> None:
    bodies.count("a")
    claim = bodies.app.backend.get_key_for_group("g", ".c")
    client.set(claim, "a stock worker's")
    with pytest.raises(ServerUnavailable) as refused:
        bodies.count("b")
    assert isinstance(refused.value.reason, BodyClaimedError)
    client.delete(claim)  # it expires
    bodies.count("b")
    assert bodies.sent == 1


def test_a_task_of_the_application_is_counted_until_it_is_taken(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "AGAIN_S", 0.01)
    bodies.count("a")
    request = Context(id="b", group="g", group_index=0, chord=bodies.app.signature("body"))
    execute, refusals = redis.Redis.execute_command, [redis.ConnectionError("away")] * 3

    def refuse(*arguments: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return execute(*arguments, **options)

    monkeypatch.setattr(redis.Redis, "execute_command", refuse)
    bodies.app.backend.on_chord_part_return(request, states.SUCCESS, "b")
    assert bodies.sent == 1

"""Keys of one task that something else has written into: its stream is damaged, and no other notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery import Celery

from petiole.gpu_worker.request import Delta
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker import scripts
from petiole.tasks.worker.completion import standby
from petiole.tasks.worker.completion.reports import OtherDelivery
from petiole.tasks.worker.delivery.delivery import Messages
from petiole.tasks.worker.generation.attempts import BeginReply
from petiole.tasks.worker.output.publisher import Outbox, Publisher
from tests.support.jobs import Turned, delivery_of, nothing

Damage = Callable[[redis.Redis, str], Any]

WRONG_TYPES: list[Damage] = [
    lambda client, task: client.set(stream_keys(task).log, "somebody's", ex=60),
    lambda client, task: client.set(stream_keys(task).state, "somebody's", ex=60),
    lambda client, task: client.hset(stream_keys(task).state, "attempt", "somebody's"),
]
NO_NUMBERS: list[Damage] = [
    lambda client, task: client.hset(stream_keys(task).state, "deaths", "somebody's"),
    lambda client, task: client.hset(stream_keys(task).state, "retries", "somebody's"),
    lambda client, task: client.hset(stream_keys(task).state, "attempt", 2**63 - 1),
]
TASKS = ["a", "b", "c"]


def begin(client: redis.Redis) -> list[BeginReply | None]:
    names = [stream_keys(task) for task in TASKS]
    keys = [key for name in names for key in (name.log, name.state, name.completion, name.asked)]
    facts = [0, "a-message", 0, ""] * len(TASKS)
    replies = scripts.load(client, "begin")(keys, [60_000, "m", 3, "call", "w", *facts])
    return [BeginReply.parse(reply) for reply in replies]


class Damaged:
    """A listener that only expects to hear this."""

    heard = False

    def on_damaged(self) -> None:
        self.heard = True


@pytest.mark.parametrize("damage", WRONG_TYPES + NO_NUMBERS)
def test_a_task_with_damaged_keys_is_not_begun_and_the_others_are(client: redis.Redis, damage: Damage) -> None:
    damage(client, "b")
    first, second, third = begin(client)
    assert first is not None
    assert third is not None
    assert second is None
    assert (first.attempt, third.attempt) == (1, 1)


@pytest.mark.parametrize("damage", WRONG_TYPES)
def test_a_stream_that_is_damaged_is_dropped_and_the_others_are_written(
    client: redis.Redis, damage: Damage
) -> None:
    begin(client)
    publisher = Publisher(client, ttl_s=60)
    listeners: list[Any] = [Damaged() for _ in TASKS]
    outboxes = [Outbox(publisher, task, 1, LoggedOutput(), listeners[i]) for i, task in enumerate(TASKS)]
    client.delete(stream_keys("b").log)
    damage(client, "b")
    for _ in range(2):
        for outbox in outboxes:
            outbox.push(Delta(outbox.end, (5,), "x"))
        publisher.flush([outbox for outbox in outboxes if not outbox.closed])
    assert [listener.heard for listener in listeners] == [False, True, False]
    for task in ("a", "c"):
        assert LoggedOutput.of(client.lrange(stream_keys(task).log, 0, -1)).token_ids == [5, 5]


def test_a_server_that_takes_no_writes_damages_no_stream(client: redis.Redis) -> None:
    begin(client)
    publisher, listener = Publisher(client, ttl_s=60), Damaged()
    outbox = Outbox(publisher, "a", 1, LoggedOutput(), listener)  # type: ignore[arg-type]
    outbox.push(Delta(0, (5,), "x"))
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.ResponseError, match="OOM"):
            begin(client)
        publisher.flush([outbox])
    finally:
        client.config_set("maxmemory", 0)
    assert (listener.heard, publisher.behind_s > 0) == (False, True)
    publisher.flush([outbox])
    assert LoggedOutput.of(client.lrange(stream_keys("a").log, 0, -1)).token_ids == [5]


@pytest.mark.parametrize("damage", [WRONG_TYPES[1], WRONG_TYPES[2]])
def test_who_stands_by_a_task_whose_state_is_damaged_requeues_it(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: Damage
) -> None:
    monkeypatch.setattr(standby.connections, "streams", lambda: client)
    monkeypatch.setattr(standby, "completed", lambda request: False)
    damage(client, "b")
    told: list[object] = []
    with Celery("test", set_as_current=False, backend="cache+memory://") as app:
        app.task(nothing, name="tasks.test", shared=False)
        messages, thread = Messages(delivery_of(app, task_id="b")), Turned()
        standby.Standby("b", messages, thread, thread, 60.0, told.append)._look()  # type: ignore[arg-type]
    assert told == [OtherDelivery.SILENT]
    assert f"its key {stream_keys('b').state} is damaged" in caplog.text

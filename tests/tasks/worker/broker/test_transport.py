"""Our transport in kombu's event loop."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from hypothesis import given, strategies as st
from kombu import Connection, Consumer, Queue
from kombu.asynchronous import Hub
from kombu.pidbox import Mailbox

from petiole.tasks.worker.broker import transport
from petiole.tasks.worker.broker.transport import Transport
from tests.support.site import RedisServer


def test_a_connection_that_was_lost_leaves_nothing_in_the_event_loop(server: RedisServer) -> None:
    hub, alive = Hub(), weakref.WeakSet()
    mine = {print}
    hub.on_tick.update(mine)
    for _ in range(3):
        connection = Connection(server.url)
        connection.transport_cls = Transport  # as in a worker
        connection.channel()
        connection.register_with_event_loop(hub)
        alive.add(connection.transport)
        turns = len(hub.on_tick - mine)
        assert mine < hub.on_tick
        connection.release()  # Celery cancels the timers and resets the hub
        hub.timer.clear()
        hub.reset()
        assert turns == 2, "kombu's and ours"
    del connection
    gc.collect()
    assert len(alive) <= 1
    hub.close()


def test_a_message_of_a_closed_channel_can_be_rejected(server: RedisServer) -> None:
    connection = Connection(server.url)
    connection.transport_cls = Transport
    channel = connection.channel()
    channel.close()
    for requeue in (True, False):
        channel.basic_reject("1", requeue=requeue)
    connection.release()


def test_a_message_whose_rejection_fails_goes_back_when_the_channel_closes(
    server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery ignores a lost connection when it rejects; the event loop does not."""
    connection = Connection(server.url)
    connection.transport_cls = Transport
    channel = connection.channel()
    channel.deferred = True
    client.lpush("petiole", "{}")
    [message] = channel.ledger.take(client, ["petiole"], 1)

    def hangs(*_: object, **__: object) -> None:
        raise redis.TimeoutError("Timeout reading from socket")

    with monkeypatch.context() as patched:
        patched.setattr("petiole.tasks.worker.broker.ledger.restore", hangs)
        channel.basic_reject(message.tag, requeue=True)
        with pytest.raises(redis.TimeoutError):
            channel.tick()
    assert client.lrange("petiole", 0, -1) == []
    channel.close()
    assert client.lrange("petiole", 0, -1) == [b"{}"]
    connection.release()


PRIORITIES = st.one_of(st.none(), st.integers(-3, 12), st.just("high"))


@given(st.lists(st.one_of(PRIORITIES.map(lambda p: ("append", p)), st.tuples(st.just("ack"), st.integers(0, 9)))))
def test_the_least_urgent_message_that_is_held_is_known(
    server: RedisServer, steps: list[tuple[str, object]]
) -> None:
    connection = Connection(server.url)
    connection.transport_cls = Transport
    channel, held = connection.channel(), {}
    for number, (action, argument) in enumerate(steps):
        tag = str(argument if action == "ack" else number)
        if action == "ack":  # of what is held, was held, or never was
            channel.qos.ack(tag)
            held.pop(tag, None)
        else:
            channel.qos.append(SimpleNamespace(properties={"priority": argument}), tag)
            held[tag] = channel.priority(argument if isinstance(argument, int) else 0)
        assert channel.qos.least_urgent_step() == max(held.values(), default=0)
    channel.qos.forget()
    assert channel.qos.least_urgent_step() == 0
    for tag in held:  # they end here after they have gone to others
        channel.qos.ack(tag)
    assert channel.qos.count == 0
    connection.release()


class Full:
    """A channel that takes from `petiole`, full of messages of a priority."""

    def __init__(self, url: str, prefetch: int = 4, priority: int = 6) -> None:
        self.connection = Connection(url)
        self.connection.transport_cls = Transport
        self.channel = self.connection.channel()
        self.channel.deferred = True
        self.channel.basic_qos(0, prefetch, False)
        self.held: list[Any] = []
        self.consumer = Consumer(self.channel, [Queue("petiole")], on_message=self.held.append)
        self.consumer.consume()
        full = prefetch + (prefetch // 4 if priority == 9 else 0)
        self.publish(*[priority] * (full + 1))
        assert self.take() == [priority] * full

    def publish(self, *priorities: int) -> None:
        with self.connection.Producer() as producer:
            for priority in priorities:
                producer.publish({}, routing_key="petiole", priority=priority)

    def take(self) -> list[int]:
        """The priorities of the messages that come without waiting."""
        before = len(self.held)
        self.channel.deliver()
        for _ in range(3):
            self.channel.tick()
        return [message.properties["priority"] for message in self.held[before:]]

    def begin(self, *messages: Any) -> None:
        for message in messages:
            self.channel.qos.begun(message.delivery_tag)

    def ticked(self) -> list[int]:
        before = len(self.held)
        for _ in range(3):
            self.channel.tick()
        return [message.properties["priority"] for message in self.held[before:]]


@pytest.fixture
def full(server: RedisServer, client: redis.Redis) -> Iterator[Full]:
    full = Full(server.url)
    yield full
    full.connection.release()


def test_a_burst_of_urgent_messages_is_taken_as_fast_as_they_get_a_slot(full: Full) -> None:
    full.publish(*[0] * 7)
    assert full.take() == [0, 0]
    assert full.ticked() == []
    for _ in range(2):
        full.begin(*full.held)
        assert full.ticked() == [0, 0]
    full.begin(full.held[-1])
    assert full.ticked() == [0]


def test_a_large_worker_takes_many_urgent_messages_together(server: RedisServer, client: redis.Redis) -> None:
    """Since its engine gives them their slots together. The rest is for others, until these have begun."""
    full = Full(server.url, prefetch=32)
    full.publish(*[0] * 12)
    assert full.take() == [0] * 8
    assert full.ticked() == []
    full.begin(*full.held[-8:])
    assert full.ticked() == [0] * 4
    full.connection.release()


def test_a_worker_holds_some_more_messages_of_the_last_priority(server: RedisServer, client: redis.Redis) -> None:
    """Since many rows of a batch end together. They take nothing from more urgent messages."""
    full = Full(server.url, prefetch=32, priority=9)
    assert len(full.held) == 32 + 8
    full.publish(*[0] * 12)
    assert full.take() == [0] * 8
    full.connection.release()


def test_urgent_messages_that_wait_do_not_keep_out_more_urgent_ones(full: Full) -> None:
    full.publish(3, 3, 3)
    assert full.take() == [3, 3]
    full.publish(0, 0, 0)
    assert full.take() == [0, 0]
    full.begin(*full.held[-2:])
    assert full.ticked() == [0]


def test_urgent_messages_are_within_the_prefetch_count_once_there_is_room(full: Full) -> None:
    full.publish(0, 0)
    assert full.take() == [0, 0]
    full.begin(*full.held)
    for message in full.held[:3]:
        message.ack()
    assert full.ticked() == [6]
    full.publish(*[0] * 5)
    assert full.take() == [0, 0]


def test_messages_for_later_do_not_keep_out_urgent_ones(full: Full) -> None:
    """Celery raises the prefetch count for each, up to a limit."""
    for _ in range(3):
        full.publish(0, 0)
        assert full.take() == [0, 0]
        full.channel.qos.prefetch_count += 2
    full.publish(*[0] * 5)
    assert full.take() == [0, 0]
    assert full.ticked() == []


def test_a_worker_that_holds_less_urgent_messages_looks_for_more_of_them(
    full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wait is for the most urgent ones alone, and would end half a second after they have come."""
    monkeypatch.setattr(transport, "SHARED_WAIT_S", 3600.0)
    for message in full.held[:2]:
        message.ack()
    assert full.ticked() == [6]
    full.publish(6)
    assert full.ticked() == []
    monkeypatch.setattr(transport, "SHARED_WAIT_S", 0.0)
    assert full.take() == [6]
    for message in full.held[2:4]:
        message.ack()
    assert full.ticked() == []
    full.publish(6)
    assert full.ticked() == [6]


def test_a_control_command_lets_an_idle_worker_look_for_less_urgent_messages(
    server: RedisServer, full: Full, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "WAIT_S", 3600.0)
    commands, mailbox = [], Mailbox("celery", "fanout")
    node = mailbox.Node(
        "a", handlers={"ping": lambda state: commands.append("ping")}, channel=full.connection.channel()
    )
    with node.listen():
        full.channel.deliver()
        for message in full.held[:]:
            message.ack()
        assert full.ticked() == [6]
        full.held[-1].ack()
        assert full.ticked() == []
        full.publish(6)
        assert full.ticked() == []
        while not commands:  # the first wait subscribes
            with Connection(server.url) as other, suppress(TimeoutError):
                mailbox(other).cast(["a"], "ping")
                full.connection.drain_events(timeout=0.1)
        assert full.ticked() == [6]


@pytest.mark.parametrize("ends", ["acknowledged", "scheduled"])
def test_a_backlog_that_leaves_its_room_at_once_needs_no_wait(
    server: RedisServer, client: redis.Redis, ends: str
) -> None:
    connection = Connection(server.url)
    connection.transport_cls = Transport
    channel = connection.channel()
    channel.deferred = True
    channel.basic_qos(0, 5, False)
    seen = []

    def handle(message: Any) -> None:
        seen.append(message.delivery_tag)
        if ends == "acknowledged":  # it has expired or was revoked
            message.ack()
        else:  # as Celery raises the prefetch for a task with an eta
            channel.qos.prefetch_count += 1

    with Consumer(channel, [Queue("petiole")], on_message=handle):
        with connection.Producer() as producer:
            for number in range(23):
                producer.publish(number, routing_key="petiole", priority=3)
        channel.deliver()
        for _ in range(5):
            channel.tick()
        assert len(seen) == 23
        assert not channel.more
    connection.release()


def test_a_message_that_needs_no_acknowledgement_is_not_held(server: RedisServer, client: redis.Redis) -> None:
    """A worker's reply to a control command, which no channel would take if it went back to its queue."""
    connection = Connection(server.url)
    connection.transport_cls = Transport
    channel = connection.channel()
    connection.Producer(channel).publish({"ok": "pong"}, routing_key="replies")
    replies: list[object] = []
    with Consumer(channel, [Queue("replies")], no_ack=True, callbacks=[lambda body, _: replies.append(body)]):
        connection.drain_events(timeout=10)
    assert replies == [{"ok": "pong"}]
    assert client.keys("petiole:unacked:*") == []
    channel.close()
    assert not client.exists("replies")
    connection.release()

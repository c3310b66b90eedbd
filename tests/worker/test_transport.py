"""Our transport in kombu's event loop."""

from __future__ import annotations

import gc
import weakref

import pytest
import redis
from kombu import Connection
from kombu.asynchronous import Hub
from support.site import RedisServer

from tasks.worker.transport import Transport


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
        patched.setattr("tasks.worker.ledger.restore", hangs)
        channel.basic_reject(message.tag, requeue=True)
        with pytest.raises(redis.TimeoutError):
            channel.tick()
    assert client.lrange("petiole", 0, -1) == []
    channel.close()
    assert client.lrange("petiole", 0, -1) == [b"{}"]
    connection.release()

"""Our transport in kombu's event loop."""

from __future__ import annotations

import gc
import weakref

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

"""Real workers that get thousands of hostile control commands, events and replies: none ends, none stalls, and a
task gives what it always gives.

`PETIOLE_FUZZ_SEED` repeats a run, `PETIOLE_FUZZ_BROADCASTS` sets the number."""

from __future__ import annotations

import base64
import json
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from amqp.basic_message import Message
from amqp.exceptions import AMQPError
from kombu import pools

from tests.support.fake_engine import expected
from tests.support.hostile import message, raw
from tests.support.hostile_broadcasts import NESTED, ROUTES, HostileBroadcasts
from tests.support.rabbitmq import INSTALLED, RabbitServer, site_on
from tests.support.site import Site, Worker, eventually

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("PETIOLE_FUZZ_SEED") or random.SystemRandom().randrange(2**31))
MESSAGES = int(os.environ.get("PETIOLE_FUZZ_BROADCASTS", 3000))
BATCH = 300
COMMANDS, EVENTS = "/0.celery.pidbox", "/0.celeryev/"
"""Channels of Redis."""


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Workers on RabbitMQ."""
    server = RabbitServer(tmp_path_factory.mktemp("rabbit"))
    with site_on(server, tmp_path_factory.mktemp("site")) as site:
        yield site
    server.close()


def serves(site: Site, *workers: Worker) -> None:
    """All workers answer commands, and a task runs once what the commands have set is taken back."""
    names = {worker.node for worker in workers}
    answered: set[str] = set()
    for _ in range(60):
        assert all(worker.alive() for worker in workers), f"seed {SEED}: {workers[0].output[-4000:]}"
        answered |= {name for reply in site.app.control.ping(timeout=1) for name in reply}
        if answered >= names:
            break
    assert answered >= names, f"seed {SEED}: {names - answered} do not answer"
    eventually(lambda: resumed(site) >= names, f"seed {SEED}: no worker is paused or reloads")
    site.app.control.broadcast("time_limit", arguments={"task_name": "tasks.generate"}, reply=True)
    assert site.get(site.generate("alive", max_tokens=3, seed=1))["token_ids"] == expected("alive", 1, 3)


def resumed(site: Site) -> set[str]:
    """The workers that take an order to resume: one that reloads does not."""
    replies = site.app.control.broadcast("resume_engine", reply=True) or []
    return {name for reply in replies for name, said in reply.items() if "ok" in said}


def test_one_publication_ends_no_worker(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        workers = [site.worker(gossip=True) for _ in range(2)]
        for channel in (COMMANDS, f"{EVENTS}worker.heartbeat"):
            hostile = HostileBroadcasts(SEED)
            whole: dict[str, Any] = {"properties": {"delivery_tag": "1", "delivery_info": {}}, "headers": {}}
            for raw in (NESTED, json.dumps({**whole, "body": NESTED.decode()}).encode(), b"x" * 2**23):
                site.redis.publish(channel, raw)
            site.redis.publish(channel, hostile.on_a_channel(5, "celery.pidbox", ""))
            serves(site, *workers)


def test_no_command_and_no_event_ends_or_stalls_a_worker(tmp_path: Path) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED} PETIOLE_FUZZ_BROADCASTS={MESSAGES}")
    hostile = HostileBroadcasts(SEED)
    with Site(tmp_path) as site:
        worker = site.worker(gossip=True)
        for _ in range(0, MESSAGES, BATCH):
            for _ in range(BATCH):
                if hostile.random.random() < 0.6:
                    site.redis.publish(COMMANDS, hostile.on_a_channel(hostile.command(), "celery.pidbox", ""))
                else:
                    route = hostile.random.choice(ROUTES)
                    raw = hostile.on_a_channel(hostile.event(), "celeryev", route)
                    site.redis.publish(EVENTS + route, raw)
            serves(site, worker)
        site.redis.client_kill_filter(_type="normal", skipme=True)
        pools.reset()
        site.use(site.url)
        serves(site, worker)  # what it has in mind does not bar a new connection
        late = site.worker(gossip=True)  # and does not end the next worker
        serves(site, worker, late)


REPLIES = (
    b"5",
    b"null",
    b"[1]",
    NESTED,
    b"{broken",
    b'{"a": 5}',
    b'{"celery@a": {"clock": "x", "revoked": 5}}',
    b'{"celery@a": {"clock": 1e400, "revoked": [5, {}]}}',
    b'{"celery@a": {"self": 1, "c": 2}}',
)


def test_no_reply_ends_a_worker_that_starts(tmp_path: Path) -> None:
    """A worker that starts asks the others for their clocks and for revoked tasks."""
    with Site(tmp_path) as site, site.redis.pubsub() as commands:
        commands.subscribe(COMMANDS)
        for headers in ({}, {"clock": "x"}, {"ticket": {}, "expires": []}, {"compression": "nope"}):
            worker = site.start_worker(gossip=True)

            def hello() -> Any:
                heard = commands.get_message(ignore_subscribe_messages=True, timeout=0.1)
                body = json.loads(base64.b64decode(json.loads(heard["data"])["body"])) if heard else {}
                return body if body.get("method") == "hello" else None

            asked = eventually(hello, "it asks")
            for body in REPLIES:
                envelope = json.loads(raw(message("a-reply", "", queue=asked["reply_to"]["routing_key"])))
                envelope["headers"] = {"ticket": asked["ticket"], "clock": 1, **headers}
                envelope["body"] = base64.b64encode(body).decode()
                queue = f"{asked['reply_to']['routing_key']}.{asked['reply_to']['exchange']}"
                site.redis.lpush(queue, json.dumps(envelope))
            serves(site, worker.ready())
            worker.kill()


# ---------------------------------------------------------------- RabbitMQ

on_rabbitmq = pytest.mark.skipif(not INSTALLED, reason="rabbitmq-server is not installed")


class Raw(Message):  # type: ignore[misc]
    """A message whose properties are these bytes."""

    def __init__(self, body: bytes, properties: bytes) -> None:
        super().__init__(body)
        self.raw = properties

    def _serialize_properties(self) -> bytes:
        return self.raw


def with_header(kind: bytes, value: bytes, name: bytes = b"odd") -> bytes:
    """Properties with one header."""
    table = bytes([len(name)]) + name + kind + value
    return pack(">HI", 0x2000, len(table)) + table


def nested(levels: int) -> bytes:
    """The length and the contents of an array of arrays."""
    value = pack(">I", 0)
    for _ in range(levels - 1):
        value = pack(">I", len(value) + 1) + b"A" + value
    return value


UNREADABLE = {
    "arrays in arrays": with_header(b"A", nested(5000)),
    "a year after 9999": with_header(b"T", pack(">Q", 2**62)),
    "a value that is no text": with_header(b"S", pack(">I", 2) + b"\xff\xfe"),
    "a name that is no text": with_header(b"t", b"\1", b"\xff\xfe"),
    "a content type that is no text": pack(">HB", 0x8000, 2) + b"\xff\xfe",
    "an encoding of Python's": pack(">HB", 0x4000, 8) + b"punycode",
}
EVERYWHERE = (
    ("celery.pidbox", b""),
    ("celery.pidbox", b"\xff\xfe"),
    ("celeryev", b"worker.heartbeat"),
    ("celeryev", b"worker.\xff\xfe"),
    ("celery_delayed_delivery", b"\xff.petiole"),
    ("", b"petiole"),
)


@on_rabbitmq
def test_nothing_unreadable_on_rabbitmq_ends_a_worker(rabbit: Site) -> None:
    worker = rabbit.worker(gossip=True)
    with rabbit.app.connection_for_write() as connection, connection.channel() as channel:
        for exchange, routing_key in EVERYWHERE:
            for properties in (*UNREADABLE.values(), pack(">H", 0)):
                for body in (NESTED, b"-" + b"a" * 100_000, b""):
                    channel.basic_publish(Raw(body, properties), exchange=exchange, routing_key=routing_key)
            serves(rabbit, worker)
    refused = rabbit.redis.llen("petiole:quarantine")
    assert refused >= 3 * (len(UNREADABLE) + 1)


@on_rabbitmq
def test_no_command_and_no_event_on_rabbitmq_ends_or_stalls_a_worker(rabbit: Site) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED} PETIOLE_FUZZ_BROADCASTS={MESSAGES}")
    hostile, worker = HostileBroadcasts(SEED), rabbit.worker(gossip=True)

    def publish(body: Any, exchange: str, routing_key: str) -> None:
        """Publish on a connection of its own: RabbitMQ closes it for some headers."""
        content_type, content_encoding = hostile.content_type()
        try:
            with rabbit.app.connection_for_write() as connection, connection.channel() as channel:
                message = channel.prepare_message(
                    hostile.encoded(body), None, content_type, content_encoding, hostile.headers()
                )
                channel.basic_publish(message, exchange=exchange, routing_key=routing_key)
        except (struct.error, ValueError, TypeError, AMQPError, OSError):
            pass

    for _ in range(0, MESSAGES // 5, BATCH // 5):
        for _ in range(BATCH // 5):
            if hostile.random.random() < 0.6:
                publish(hostile.command(), "celery.pidbox", "")
            else:
                publish(hostile.event(), "celeryev", hostile.random.choice(ROUTES))
        serves(rabbit, worker)
    late = rabbit.worker(gossip=True)
    serves(rabbit, worker, late)

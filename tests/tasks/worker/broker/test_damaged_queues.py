"""Keys of the broker that something else has written into: they are named or set aside, and the rest goes on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from kombu import Connection, Consumer, Queue

from petiole.tasks.wire.keys import LedgerKeys, stream_keys
from petiole.tasks.worker import scripts
from petiole.tasks.worker.broker import corruption
from petiole.tasks.worker.broker.ledger import Ledger, sweep
from petiole.tasks.worker.broker.transport import Transport
from petiole.tasks.worker.completion import claims
from tests.support.site import RedisServer

QUEUE, OTHER = "jobs", "jobs\x06\x163"
NAMES = LedgerKeys.under("")


@pytest.fixture(autouse=True)
def aside(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, str]]:
    """What was put aside, and from which key."""
    items: list[tuple[bytes, str]] = []
    monkeypatch.setattr(corruption, "_reported_at", {})
    monkeypatch.setattr(corruption, "quarantine", lambda item, key, reason: items.append((item, key)))
    return items


def ledger(affinity_wait_ms: int = 0) -> Ledger:
    return Ledger(prefix="", visibility_timeout_s=60, affinity_wait_ms=affinity_wait_ms)


def put(client: redis.Redis, *names: str, queue: str = QUEUE) -> None:
    for name in names:
        headers = {"id": name, "petiole-affinity": "k"}
        client.lpush(queue, json.dumps({"body": name, "headers": headers, "properties": {"delivery_info": {}}}))


def take(client: redis.Redis, mine: Ledger) -> list[str] | None:
    taken = mine.take(client, [QUEUE, OTHER], 10)
    return None if taken is None else [json.loads(message.item)["body"] for message in taken]


def names(client: redis.Redis, queue: str = QUEUE) -> list[str]:
    return [json.loads(item)["body"] for item in reversed(client.lrange(queue, 0, -1))]


def test_a_queue_that_is_no_list_is_passed_over(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    mine = ledger()
    client.set(QUEUE, "somebody's")
    put(client, "a", queue=OTHER)
    for expected in (["a"], []):
        assert take(client, mine) == expected
    (record,) = caplog.records
    assert f"key {QUEUE} is damaged: it must be a list" in record.message
    client.delete(QUEUE)
    put(client, "b")
    assert take(client, mine) == ["b"]


def test_an_owner_whose_hash_is_none_goes_on_as_another(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    mine = ledger()
    put(client, "a", "b")
    assert take(client, mine) == ["a", "b"]
    lost = mine.unacked
    client.set(lost, "somebody's")
    put(client, "c")
    assert take(client, mine) is None
    assert f"key {lost} is damaged: it must be a hash" in caplog.text
    mine.begin_anew()
    assert take(client, mine) == ["c"]
    assert sweep(client, NAMES).restored == 0
    assert client.get(lost) == b"somebody's"


def test_an_acknowledgement_into_such_a_hash_loses_the_lease(client: redis.Redis) -> None:
    mine = ledger()
    put(client, "a")
    take(client, mine)
    client.set(mine.unacked, "somebody's")
    mine.ack("1")
    mine.flush(client)
    assert mine.lost
    assert mine.settled


def test_a_sweep_passes_over_a_hash_that_is_none(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    damaged, dead = ledger(), ledger()
    put(client, "a", "b")
    damaged.take(client, [QUEUE], 1)
    dead.take(client, [QUEUE], 1)
    client.delete(damaged.lease, dead.lease)
    client.set(damaged.unacked, "somebody's")
    assert sweep(client, NAMES).restored == 1
    assert names(client) == ["b"]
    assert f"key {damaged.unacked} is damaged: it must be a hash" in caplog.text
    assert client.scard(NAMES.owners) == 0


@pytest.mark.parametrize(
    "entry", [b"", b"garbage", b"3:ab", b"0:x", b"-1:abc", b"1.5:abc", b"5:jobs", b"\xff:\x00"]
)
@pytest.mark.parametrize("tag", ["7", "garbage"])
def test_an_entry_that_is_no_message_is_put_aside_and_the_others_go_back(
    client: redis.Redis, aside: list[tuple[bytes, str]], entry: bytes, tag: str
) -> None:
    dead = ledger()
    put(client, "a", "b")
    take(client, dead)
    client.hset(dead.unacked, tag, entry)
    client.delete(dead.lease)
    sweep(client, NAMES)
    assert names(client) == ["a", "b"]
    assert aside == [(entry, dead.unacked)]
    assert client.scard(NAMES.owners) == client.exists(dead.unacked) == 0


def test_a_message_whose_queue_is_no_list_stays_until_it_is_one(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    dead = ledger()
    put(client, "a", "b")
    put(client, "c", queue=OTHER)
    take(client, dead)
    client.delete(dead.lease)
    client.set(QUEUE, "somebody's")
    for restored in (1, 0):
        assert sweep(client, NAMES).restored == restored
    assert names(client, OTHER) == ["c"]
    assert [record.message for record in caplog.records] == [f"key {QUEUE} is damaged: it must be a list"]
    client.delete(QUEUE)
    assert sweep(client, NAMES).restored == 2
    assert names(client) == ["a", "b"]
    assert client.scard(NAMES.owners) == 0


def test_a_home_of_another_type_is_nobodys(client: redis.Redis) -> None:
    mine = ledger(affinity_wait_ms=60_000)
    client.hset(f"{NAMES.home}{QUEUE}:k", "somebody's", 1)
    put(client, "a")
    assert take(client, mine) == ["a"]


def test_a_channel_whose_queue_is_no_list_serves_the_other_priorities(
    server: RedisServer, client: redis.Redis
) -> None:
    client.set("petiole", "somebody's")
    connection = Connection(server.url)
    connection.transport_cls = Transport
    channel = connection.channel()
    received: list[Any] = []
    client.rpush(
        "petiole\x06\x163",
        json.dumps(
            {
                "body": "e30=",
                "content-type": "application/json",
                "content-encoding": "utf-8",
                "headers": {},
                "properties": {
                    "body_encoding": "base64",
                    "delivery_tag": "x",
                    "delivery_info": {"exchange": "", "routing_key": "petiole"},
                },
            }
        ),
    )
    with Consumer(channel, [Queue("petiole")], on_message=received.append):
        connection.drain_events(timeout=10)
    assert len(received) == 1
    connection.release()


# ---------------------------------------------------------------- claims


@pytest.mark.parametrize(
    ("held", "reply"), [(None, 1), ("claimed", 0), ("done", 0), ("somebody's", 2), ({"a": 1}, 2)]
)
def test_only_a_claim_or_a_record_keeps_a_completion_from_others(
    client: redis.Redis, held: str | dict[str, Any] | None, reply: int
) -> None:
    key = stream_keys("task").completion
    if isinstance(held, str):
        client.set(key, held)
    elif held:
        client.hset(key, mapping=held)
    claim, keys = scripts.load(client, "claim"), [key, stream_keys("task").completer]
    assert claim(keys, [60_000, "first"]) == reply
    assert claim(keys, [60_000, "first"]) == bool(reply), "whose claim it is may claim it again"
    assert claim(keys, [60_000, "second"]) == 0
    assert client.get(key) == (b"done" if held == "done" else b"claimed")
    assert (client.pttl(key) > 0) == bool(reply)


def test_a_record_of_another_type_records_nothing(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims.connections, "streams", lambda: client)
    monkeypatch.setattr(claims, "_shown", lambda request: False)
    request = SimpleNamespace(id="task", _payload=((), {}, {"callbacks": [{}]}))
    key = stream_keys("task").completion
    client.rpush(key, "somebody's")
    assert not claims.completed(request)
    assert claims.claim(request, "first")
    assert f"its key {key} was of the wrong type and is overwritten" in caplog.text
    assert not claims.claim(request, "second")
    claims.mark(request)
    assert claims.completed(request)

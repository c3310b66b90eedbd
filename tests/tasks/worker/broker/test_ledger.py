"""Messages have owners: what one worker takes no other can lose for it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from petiole.tasks.wire.keys import LedgerKeys
from petiole.tasks.worker.broker.ledger import Ledger, sweep

QUEUE, URGENT = "jobs\x06\x163", "jobs"
NAMES = LedgerKeys.under("")


def ledger() -> Ledger:
    return Ledger(prefix="", visibility_timeout_s=60)


def put(client: redis.Redis, *names: str, queue: str = QUEUE) -> None:
    for name in names:
        client.lpush(queue, envelope(name))


def envelope(name: str) -> str:
    """As kombu writes it."""
    return json.dumps(
        {"body": name, "headers": {"id": name, "none": []}, "properties": {"delivery_info": {"exchange": ""}}}
    )


def names(client: redis.Redis, queue: str = QUEUE) -> list[str]:
    """What is in the queue, the next to be taken first."""
    return [json.loads(item)["body"] for item in reversed(client.lrange(queue, 0, -1))]


def take(client: redis.Redis, ledger: Ledger, most: int = 10) -> list[str]:
    taken = ledger.take(client, [URGENT, QUEUE], most)
    assert taken is not None
    return [json.loads(message.item)["body"] for message in taken]


def expire(client: redis.Redis, ledger: Ledger) -> None:
    """The lease runs out."""
    client.delete(ledger.lease)


def test_urgent_messages_are_taken_first_and_no_more_than_asked_for(client: redis.Redis) -> None:
    put(client, "a", "b", "c")
    put(client, "now", queue=URGENT)
    assert take(client, ledger(), 3) == ["now", "a", "b"]
    assert names(client) == ["c"]


def test_acknowledged_messages_are_gone(client: redis.Redis) -> None:
    mine = ledger()
    put(client, "a", "b")
    taken = mine.take(client, [QUEUE], 10)
    assert taken is not None
    mine.ack(taken[0].tag)
    mine.flush(client)
    assert mine.close(client) == 1
    assert names(client) == ["b"]
    assert not client.exists(NAMES.owners, mine.lease, mine.unacked)


class RenewedBehindItsClose(Ledger):
    """The lease keeper's renewal reaches Redis just behind the close."""

    def _restore(self, client: redis.Redis, **options: Any) -> int:
        restored = super()._restore(client, **options)
        assert self.renew(client)
        return restored


def test_a_renewal_just_behind_the_close_has_lost_no_lease(client: redis.Redis) -> None:
    mine = RenewedBehindItsClose(prefix="", visibility_timeout_s=60)
    put(client, "a")
    take(client, mine)
    assert mine.close(client) == 1
    assert not mine.lost
    assert not client.exists(NAMES.owners, mine.lease)


def test_what_a_closing_worker_held_is_next_in_the_old_order(client: redis.Redis) -> None:
    mine = ledger()
    put(client, "a", "b", "c")
    take(client, mine)
    put(client, "d")
    mine.close(client)
    assert names(client) == ["a", "b", "c", "d"]


def test_a_message_comes_back_byte_for_byte_but_for_the_mark(client: redis.Redis) -> None:
    mine = ledger()
    put(client, "a")
    for _ in range(3):
        take(client, mine)
        mine.close(client)
    expected = json.loads(envelope("a"))
    expected["properties"]["delivery_info"]["redelivered"] = True
    assert [json.loads(item) for item in client.lrange(QUEUE, 0, -1)] == [expected]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@pytest.mark.parametrize("info", [{"exchange": "", "priority": 3}, {}])
def test_the_mark_fits_into_the_json_of_any_producer(
    client: redis.Redis, separators: tuple[str, str], info: dict[str, object]
) -> None:
    mine = ledger()
    client.lpush(QUEUE, json.dumps({"body": "a", "properties": {"delivery_info": info}}, separators=separators))
    take(client, mine)
    mine.close(client)
    (item,) = client.lrange(QUEUE, 0, -1)
    assert json.loads(item)["properties"]["delivery_info"] == ({**info, "redelivered": True} if info else info)


@pytest.mark.parametrize("garbage", [b"", b"5", b"{broken", b"\xff\x00:7:", b"3:abc"])
def test_garbage_goes_back_as_it_came(client: redis.Redis, garbage: bytes) -> None:
    mine = ledger()
    client.lpush(QUEUE, garbage)
    assert [message.item for message in mine.take(client, [QUEUE], 1) or ()] == [garbage]
    mine.close(client)
    assert client.lrange(QUEUE, 0, -1) == [garbage]


def test_a_sweep_gives_back_what_the_dead_held_and_touches_nobody_else(client: redis.Redis) -> None:
    dead, alive = ledger(), ledger()
    put(client, "a", "b", "c")
    take(client, dead, 2)
    take(client, alive, 1)
    expire(client, dead)
    assert sweep(client, NAMES).restored == 2
    assert names(client) == ["a", "b"]
    assert client.hlen(alive.unacked) == 1
    assert sweep(client, NAMES).restored == 0


def test_a_zombies_acknowledgement_does_not_touch_the_next_owners_message(client: redis.Redis) -> None:
    zombie, heir = ledger(), ledger()
    put(client, "a")
    taken = zombie.take(client, [QUEUE], 1)
    assert taken is not None
    expire(client, zombie)
    sweep(client, NAMES)
    take(client, heir)
    zombie.ack(taken[0].tag)
    zombie.flush(client)
    assert not zombie.renew(client)
    assert zombie.close(client) == 0
    assert client.hlen(heir.unacked) == 1


def test_a_zombie_takes_nothing_under_its_old_name(client: redis.Redis) -> None:
    zombie = ledger()
    put(client, "a")
    take(client, zombie)
    expire(client, zombie)
    sweep(client, NAMES)
    assert zombie.take(client, [QUEUE], 1) is None
    assert names(client) == ["a"]
    zombie.begin_anew()
    assert take(client, zombie) == ["a"]


def test_a_lease_that_ran_out_unnoticed_is_as_good(client: redis.Redis) -> None:
    mine = ledger()
    put(client, "a")
    take(client, mine)
    expire(client, mine)
    assert mine.renew(client)
    assert sweep(client, NAMES).restored == 0


def test_more_messages_than_one_call_restores(client: redis.Redis) -> None:
    mine = ledger()
    put(client, *map(str, range(450)))
    take(client, mine, 450)
    assert mine.close(client) == 450
    assert names(client) == list(map(str, range(450)))


def test_a_global_key_prefix_is_kept(client: redis.Redis) -> None:
    mine = Ledger(prefix="app:", visibility_timeout_s=60)
    put(client, "a", queue="app:jobs")
    assert [message.queue for message in mine.take(client, ["app:jobs"], 1) or ()] == ["app:jobs"]
    assert all(key.startswith(b"app:") for key in client.keys("*"))
    mine.close(client)
    assert names(client, "app:jobs") == ["a"]


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "take", "ack", "die", "sweep", "close", "give back", "zombie ack"]),
            st.integers(0, 2),
            st.integers(1, 3),
        ),
        max_size=40,
    )
)
def test_a_message_is_acknowledged_in_a_queue_or_held_by_one_worker(
    client: redis.Redis, life: list[tuple[str, int, int]]
) -> None:
    client.flushall()
    ledgers = [ledger() for _ in range(3)]
    held: list[dict[str, str]] = [{} for _ in ledgers]
    stale: list[list[str]] = [[] for _ in ledgers]
    waiting: set[str] = set()
    dead: set[int] = set()
    count = 0
    for what, who, many in life:
        mine = ledgers[who]
        match what:
            case "put":
                for _ in range(many):
                    put(client, f"m{count}")
                    waiting.add(f"m{count}")
                    count += 1
            case "take":
                taken = mine.take(client, [QUEUE], many)
                if taken is None:
                    assert not held[who]
                    mine.begin_anew()
                    taken = mine.take(client, [QUEUE], many)
                assert taken is not None
                dead.discard(who) if mine.renew(client) else None
                for message in taken:
                    held[who][message.tag] = json.loads(message.item)["body"]
                    waiting.remove(held[who][message.tag])
            case "ack" if held[who]:
                tag, _ = held[who].popitem()
                mine.ack(tag)
                mine.flush(client)
            case "die" if mine.registered:
                expire(client, mine)
                dead.add(who)
            case "sweep":
                sweep(client, NAMES)
                for lost in dead:
                    waiting |= set(held[lost].values())
                    stale[lost] += held[lost]
                    held[lost] = {}
                dead.clear()
            case "close":
                mine.close(client)
                waiting |= set(held[who].values())
                held[who] = {}
                dead.discard(who)
            case "give back" if held[who]:
                tag, name = held[who].popitem()
                mine.give_back(tag)
                mine.flush(client)
                waiting.add(name)
            case "zombie ack" if stale[who]:
                mine.ack(stale[who].pop())
                mine.flush(client)
        assert set(names(client)) == waiting
        in_hashes = sum(client.hlen(key) for key in client.keys("petiole:unacked:*"))
        assert in_hashes == sum(map(len, held))

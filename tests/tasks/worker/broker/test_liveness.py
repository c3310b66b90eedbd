"""A dead owner is noticed by its connection, and no living one is taken for dead."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import given, strategies as st
from kombu import Connection

from petiole.tasks.wire.keys import LedgerKeys
from petiole.tasks.worker.broker.leases import LeaseKeeper
from petiole.tasks.worker.broker.ledger import Ledger, sweep
from petiole.tasks.worker.broker.liveness import QUIET_MS, HeldSubscription, MissingOwners, run_of
from petiole.tasks.worker.broker.transport import Transport
from tests.support.site import REPOSITORY, RedisServer, eventually

QUEUE = "jobs"
NAMES = LedgerKeys.under("")
LEASE_S = 3600
COMMANDS_BEFORE = 2.5
"""A second, for renewals every 3 s and sweeps every 2 s, in the version before presence."""


# ------------------------------------------------------------ who seems to be gone


@pytest.mark.parametrize(
    ("looks", "absent"),
    [
        ([1, 0, 0], True),
        ([0, 0, 0, 0], False),  # never seen: it may be of a version that does not subscribe
        ([1, 0], False),
        ([1, 0, 1, 0], False),
        ([1, 0, 1, 0, 0], True),
        ([0, 0, 1, 0, 0, 0], True),
    ],
)
def test_who_was_seen_and_is_missed_twice_in_a_row_is_absent(looks: list[int], absent: bool) -> None:
    absences = MissingOwners()
    absences.know(["a", "b"])
    for count in looks:
        found = absences.look({"a": count, "b": 1})
    assert found == (["a"] if absent else [])


def test_who_is_trusted_to_have_been_there_counts_as_seen() -> None:
    absences = MissingOwners()
    absences.know(["a", "b"])
    absences.trust(["a", "unknown"])
    assert [absences.look({"a": 0, "b": 0}) for _ in range(2)] == [[], ["a"]]


def test_who_is_known_no_longer_is_forgotten() -> None:
    absences = MissingOwners()
    absences.know(["a"])
    for count in (1, 0):
        absences.look({"a": count})
    absences.know([])
    absences.know(["a"])
    assert [absences.look({"a": 0}) for _ in range(3)] == [[], [], []]


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 1), min_size=3), max_size=12))
def test_absence_is_what_its_definition_says(looks: list[dict[str, int]]) -> None:
    absences = MissingOwners()
    absences.know("abc")
    for n, look in enumerate(looks):
        expected = [
            owner
            for owner in "abc"
            if n and not look[owner] and not looks[n - 1][owner] and any(past[owner] for past in looks[: n - 1])
        ]
        assert absences.look(look) == expected


# ------------------------------------------------------------ the script has the last word


def holding(client: redis.Redis, name: str = "a", lease_s: float = LEASE_S) -> Ledger:
    """An owner that holds a message and has shown a sign of life a while ago."""
    mine = Ledger(prefix="", visibility_timeout_s=lease_s)
    client.lpush(QUEUE, f'{{"body": "{name}"}}')
    assert mine.take(client, [QUEUE], 1)
    quiet(client, mine, QUIET_MS + 100)
    return mine


def quiet(client: redis.Redis, ledger: Ledger, for_ms: int) -> None:
    seconds, microseconds = client.time()
    client.set(ledger.lease, seconds * 1000 + microseconds // 1000 - for_ms, keepttl=True)


def test_an_absent_owner_that_is_quiet_is_dead_before_its_lease_has_expired(client: redis.Redis) -> None:
    dead, other = holding(client, "a"), holding(client, "b")
    swept = sweep(client, NAMES, [dead.owner])
    assert (swept.restored, swept.dead, swept.alive) == (1, [dead.owner], [other.owner])
    assert client.llen(QUEUE) == 1
    assert not dead.renew(client)
    assert other.renew(client)


def test_an_owner_that_has_shown_a_sign_of_life_is_not_dead(client: redis.Redis) -> None:
    """Its subscription was cut, and its renewals go on: while its engine hangs, too."""
    mine = holding(client)
    assert mine.renew(client)
    assert sweep(client, NAMES, [mine.owner]).dead == []
    quiet(client, mine, QUIET_MS + 100)
    left_ms = client.pttl(mine.lease)
    assert mine.renew(client, hanging=True)
    assert sweep(client, NAMES, [mine.owner]).dead == []
    assert client.pttl(mine.lease) <= left_ms, "the lease of one that hangs runs out"


def test_a_lease_that_has_expired_is_not_made_again_by_one_that_hangs(client: redis.Redis) -> None:
    mine = holding(client)
    client.delete(mine.lease)
    assert mine.renew(client, hanging=True)
    assert sweep(client, NAMES).dead == [mine.owner]


def test_an_owner_that_has_subscribed_again_is_not_dead(client: redis.Redis) -> None:
    mine = holding(client)
    with client.pubsub() as pubsub:
        pubsub.subscribe(mine.channel)
        eventually(lambda: subscribers(client, mine), "subscribed")
        assert sweep(client, NAMES, [mine.owner]).dead == []


@pytest.mark.parametrize("value", ["", "soon"])
def test_a_lease_that_does_not_say_when_it_was_renewed_has_to_expire(client: redis.Redis, value: str) -> None:
    mine = holding(client)
    client.set(mine.lease, value, keepttl=True)
    assert sweep(client, NAMES, [mine.owner]).dead == []


def test_a_lease_into_which_somebody_has_written_is_no_expired_one(client: redis.Redis) -> None:
    mine = holding(client)
    client.delete(mine.lease)
    client.rpush(mine.lease, "somebody's")
    assert sweep(client, NAMES, [mine.owner]).dead == []
    assert mine.renew(client)
    assert int(client.get(mine.lease) or 0) > 1


def test_many_owners_are_swept_in_one_call(client: redis.Redis) -> None:
    client.sadd(NAMES.owners, *(f"host:1:{i}" for i in range(2500)))
    mine = holding(client)
    swept = sweep(client, NAMES)
    assert (len(swept.dead), swept.alive) == (2500, [mine.owner])


# ------------------------------------------------------------ the subscription


@pytest.fixture
def subscription(client: redis.Redis) -> Iterator[HeldSubscription]:
    subscription = HeldSubscription(client.connection_pool, "petiole:present:0:me")
    subscription.start()
    yield subscription
    subscription.close()


def subscribers(client: redis.Redis, who: Ledger | HeldSubscription) -> int:
    return int(client.pubsub_numsub(who.channel)[0][1])


def test_a_subscription_holds_from_its_start_to_its_close(
    client: redis.Redis, subscription: HeldSubscription
) -> None:
    assert subscribers(client, subscription) == 1
    subscription.close()
    eventually(lambda: subscribers(client, subscription) == 0, "closed")


def test_a_subscription_that_is_cut_is_made_again(client: redis.Redis, subscription: HeldSubscription) -> None:
    for _ in range(3):
        client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        eventually(lambda: subscribers(client, subscription) == 1, "subscribed again")


FORKS = """
import os, sys, time
from petiole.tasks.servers.connections import connect
from petiole.tasks.worker.broker.liveness import HeldSubscription

subscription = HeldSubscription(connect(sys.argv[1]).connection_pool, "petiole:present:0:parent")
subscription.start()
child = os.fork()
if not child:
    time.sleep(3600)
print(child, flush=True)
time.sleep(3600)
"""


def test_a_forked_process_does_not_hold_its_parents_subscription(client: redis.Redis, server: RedisServer) -> None:
    def present() -> bool:
        return bool(client.pubsub_numsub("petiole:present:0:parent")[0][1])

    command = [sys.executable, "-c", FORKS, server.url]
    parent = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert present(), "the child's copy is closed, and the parent's is not"
        parent.kill()
        eventually(lambda: not present(), "nobody else holds it")
        os.kill(child, signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()


def test_a_user_who_may_not_subscribe_is_an_owner_all_the_same(
    client: redis.Redis, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    client.execute_command("ACL", "SETUSER", "deaf", "on", ">word", "~*", "+@all", "resetchannels")
    pool = redis.ConnectionPool(
        connection_class=redis.UnixDomainSocketConnection,
        path=str(server.socket),
        username="deaf",
        password="word",
    )
    subscription = HeldSubscription(pool, "petiole:present:0:me")
    with caplog.at_level(logging.INFO):
        subscription.start()
    assert "will be noticed by its lease alone" in caplog.text
    client.execute_command("ACL", "DELUSER", "deaf")


def test_an_owner_subscribes_before_it_is_registered_and_so_does_the_next_one(
    server: RedisServer, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    connection = Connection(server.url)
    connection.transport_cls = Transport
    channel = connection.channel()
    channel.basic_consume(QUEUE, no_ack=False, callback=print, consumer_tag="1")
    seen: list[tuple[str, int]] = []
    take = channel.ledger.take

    def looking(*arguments: Any, **options: Any) -> Any:
        if not channel.ledger.registered:
            assert channel.subscription._made.is_set(), "nobody waits until the wait for it is over"
            seen.append((channel.ledger.owner, subscribers(client, channel.ledger)))
        return take(*arguments, **options)

    channel.ledger.take = looking
    channel.deliver()
    first = channel.ledger.channel
    client.delete(NAMES.owners)  # the lease is lost
    channel.deliver()
    assert [count for _, count in seen if count] == [1, 1]
    assert len({owner for owner, _ in seen}) == 2
    assert "has not confirmed" not in caplog.text
    eventually(lambda: client.pubsub_numsub(first)[0][1] == 0, "the first owner's subscription ends")
    last = channel.ledger
    connection.release()
    eventually(lambda: subscribers(client, last) == 0, "the channel's end is the subscription's")


# ------------------------------------------------------------ the keeper


class Looks:
    """The keeper's connections, and what it has seen on them."""

    def __init__(self, server: RedisServer) -> None:
        self.server, self.counts, self.clients = server, list[int](), list[redis.Redis]()

    def connect(self) -> redis.Redis:
        pool = redis.ConnectionPool(
            connection_class=redis.UnixDomainSocketConnection, path=str(self.server.socket), max_connections=1
        )
        client = redis.Redis(connection_pool=pool, single_connection_client=True)
        numsub = client.pubsub_numsub

        def looking(*channels: str) -> Any:
            found = numsub(*channels)
            self.counts.append(sum(count for _, count in found))
            return found

        client.pubsub_numsub = looking  # type: ignore[method-assign]
        self.clients.append(client)
        return client

    def last(self, *counts: int) -> bool:
        return self.counts[-len(counts) :] == list(counts)


@pytest.fixture
def looks(server: RedisServer) -> Looks:
    return Looks(server)


@pytest.fixture
def keeper(looks: Looks) -> Iterator[LeaseKeeper]:
    """Of a worker that holds nothing."""
    mine = [Ledger(prefix="", visibility_timeout_s=LEASE_S)]
    keeper = LeaseKeeper(
        ledgers=lambda: mine, connect=looks.connect, heartbeat_age_s=lambda: 0.0, visibility_timeout_s=LEASE_S
    )
    keeper.look_s = keeper.sweep_s = 0.05
    yield keeper
    keeper.stop()


def test_a_killed_owners_messages_are_back_long_before_its_lease_expires(
    client: redis.Redis, subscription: HeldSubscription, keeper: LeaseKeeper, looks: Looks
) -> None:
    dead = holding(client)
    subscription.channel = dead.channel
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    keeper.start()
    eventually(lambda: looks.last(1), "it is seen")
    assert client.llen(QUEUE) == 0
    subscription.close()
    eventually(lambda: client.llen(QUEUE) == 1, "its message is back")


def test_what_was_seen_on_a_connection_that_was_lost_does_not_count(
    client: redis.Redis, subscription: HeldSubscription, keeper: LeaseKeeper, looks: Looks
) -> None:
    mine = holding(client)
    subscription.channel = mine.channel
    client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    keeper.start()
    eventually(lambda: looks.last(1), "it is seen")
    subscription.close()
    eventually(lambda: subscribers(client, mine) == 0, "closed")
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    if client.llen(QUEUE):
        pytest.skip("this machine was too slow: it was given back before the connection was lost")
    eventually(lambda: len(looks.clients) == 2 and looks.last(0, 0, 0, 0), "four looks on another connection")
    assert client.llen(QUEUE) == 0


@pytest.mark.parametrize("same_run", [True, False])
def test_a_keeper_that_starts_after_an_owners_death_notices_it_on_the_same_run_of_the_server(
    client: redis.Redis, keeper: LeaseKeeper, looks: Looks, same_run: bool
) -> None:
    run = client.info("server")["run_id"]
    dead = holding(client)
    dead.present_on = lambda: run if same_run else run[::-1]
    assert dead.renew(client)
    quiet(client, dead, QUIET_MS + 100)
    keeper.start()
    if same_run:
        eventually(lambda: client.llen(QUEUE) == 1, "its message is back")
    else:
        eventually(lambda: looks.last(0, 0, 0, 0), "four looks")
        assert client.llen(QUEUE) == 0


def test_a_subscription_says_on_which_run_of_the_server_it_holds(
    client: redis.Redis, subscription: HeldSubscription
) -> None:
    assert subscription.server == client.info("server")["run_id"]
    subscription.close()
    eventually(lambda: subscription.server == "", "closed")


@pytest.mark.parametrize(
    ("answer", "run"),
    [
        (b"# Server\r\nredis_version:7.2.4\r\nrun_id:0a1b\r\nos:Linux", "0a1b"),
        (b"run_id:0000000000000000\r\n", ""),
        (b"# Server\r\nversion:1", ""),
        (b"", ""),
    ],
)
def test_a_server_may_say_nothing_of_its_run(answer: bytes, run: str) -> None:
    assert run_of(answer) == run


def test_an_idle_worker_costs_few_commands(client: redis.Redis) -> None:
    """Commands of scripts are counted, as Redis counts them."""
    ledgers = [holding(client, name) for name in "abc"]
    keeper = LeaseKeeper(
        ledgers=lambda: ledgers[:1], connect=lambda: client, heartbeat_age_s=lambda: 0.0, visibility_timeout_s=15
    )
    for step in (keeper._renew, keeper._sweep, keeper._look):
        step(client)  # the scripts are loaded

    def cost(step: Any) -> int:
        client.config_resetstat()
        step(client)
        stats: dict[str, Any] = client.info("commandstats")
        return sum(stat["calls"] for name, stat in stats.items() if not name.startswith("cmdstat_config"))

    a_second = sum(
        cost(step) / every_s
        for step, every_s in (
            (keeper._renew, keeper.renew_s),
            (keeper._sweep, keeper.sweep_s),
            (keeper._look, keeper.look_s),
        )
    )
    assert a_second <= COMMANDS_BEFORE + 8

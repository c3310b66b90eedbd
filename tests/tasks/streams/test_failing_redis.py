"""What happens to Redis, or to a connection with it, costs a reader no token."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import redis
from celery import Celery

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks import errors
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.streams import protocol, readers
from tests.support.proxy import Proxy
from tests.tasks.streams.conftest import Read, Server, Writer, token_ids


def test_a_cut_connection_is_made_anew(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")
    writer.write(1)

    def cut() -> None:
        if writer.index == 1:
            client.client_kill_filter(_type="pubsub")
            writer.write(2)
            writer.finish(3)

    assert token_ids(read("t", between=cut)) == [1, 2, 3]


def test_a_subscription_that_cannot_be_made_anew_costs_no_token() -> None:
    """After a silence in which something was missed."""
    first, second = (
        StreamDelta(task_id="t", attempt=1, index=k, token_ids=[k], text="", finish_reason=reason)
        for k, reason in enumerate((None, "stop"))
    )
    reading = protocol.read("t", timeout_s=None)
    assert next(reading) == ("subscribe",)
    assert reading.send(None) == ("read_log", 0)
    operation, left_s = reading.send(([], 0))  # type: ignore[misc]
    assert operation == "receive"
    assert 0 < left_s() <= protocol.SILENCE_S
    assert reading.send(None) == ("outcome",)
    assert reading.send((None, None)) == ("read_log", 0)
    assert reading.send(([first.model_dump_json()], 1)) == first
    assert next(reading) == ("hears",)
    assert reading.send(False) == ("distrust",)
    assert reading.send(None) == ("subscribe",)
    assert reading.throw(protocol.ConnectionLost(OSError()))[0] == "pause"
    assert next(reading) == ("subscribe",)
    assert reading.send(None) == ("read_log", 0)
    assert reading.send(([delta.model_dump_json() for delta in (first, second)], 2)) == second
    with pytest.raises(StopIteration):
        next(reading)


def test_a_restart_of_redis_is_survived(read: Read, server: Server, client: redis.Redis) -> None:
    writer = Writer(client, "t")
    writer.write(1)
    restarts = []

    def restart() -> None:
        if not restarts:
            restarts.append(1)
            server.kill()
            thread = threading.Thread(target=lambda: (server.start(), writer.finish(2)))
            thread.start()

    assert token_ids(read("t", between=restart)) == [1, 2]


def test_a_master_that_became_a_replica_and_keeps_its_connections_is_left(
    read: Read, app: Celery, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers reads with what it had, and nothing is published on it."""
    promoted, address = Server(tmp_path), Proxy(tmp_path / "p.sock", server.socket)
    old, new = (redis.Redis.from_url(one.url) for one in (server, promoted))
    monkeypatch.setenv("PETIOLE_BROKER_URL", address.url)
    settings.cache_clear()
    monkeypatch.setattr(protocol, "SILENCE_S", 0.1)
    several = [readers.Stream(name, app=app) for name in "uvw"]
    for reader in several:
        reader.open()
    for reader in several:
        reader.close()  # their subscriptions are kept for others

    for client in (old, new):
        Writer(client, "t").write(1)

    def fail_over() -> None:
        if address.upstream == server.socket:
            address.upstream = promoted.socket
            old.replicaof("127.0.0.1", 1)
            Writer(new, "t", index=1).finish(2)

    try:
        assert token_ids(read("t", between=fail_over)) == [1, 2]
        monkeypatch.setattr(protocol, "SILENCE_S", 3600.0)
        with readers.Stream("u", app=app) as first:
            first.open()  # takes the newest subscription
            writer = Writer(new, "v")
            writer.write(3)
            assert token_ids(read("v", between=lambda: writer.index == 1 and writer.finish(4))) == [3, 4]
    finally:
        old.replicaof("NO", "ONE")
        promoted.kill()


def test_a_user_who_may_not_write_may_read(server: Server, client: redis.Redis) -> None:
    client.set("petiole:k", 1)
    client.execute_command(
        "ACL", "SETUSER", "reader", "on", ">secret", "~petiole*", "-@all", "+@connection", "+get"
    )
    reading = connections.connect(server.url.replace("unix://", "unix://reader:secret@"))
    assert reading.get("petiole:k") == b"1"


def test_redis_away_for_good_ends_the_wait(read: Read, server: Server, client: redis.Redis) -> None:
    Writer(client, "t").write(1)
    with pytest.raises(errors.StreamTimeout) as raised:
        read("t", between=server.kill, timeout_s=0.2)
    assert isinstance(raised.value.__cause__, connections.LOST)


def test_nothing_for_too_long_is_a_timeout(read: Read, client: redis.Redis, impatient: None) -> None:
    Writer(client, "t").write(1)
    with pytest.raises(TimeoutError, match=r"task t: no delta for 0\.05 s"):
        read("t", timeout_s=0.05)

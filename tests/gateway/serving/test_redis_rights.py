"""A gateway knows what its Redis user may not do, whatever that is, and changes nothing to find out."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from petiole.gateway.http import application
from petiole.gateway.serving.auth import redis_rights
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import OPEN_BATCHES_KEY
from tests.support.rights import SECRET, commands, documented, grant_gateway, of_gateways, version_of
from tests.support.site import RedisServer

OF_SCRIPTS = {"eval", "evalsha", "script|load"}
OF_OTHERS = ("taskset", "pidbox", "running*", "+del", "petiole:nothing")
"""In rules of `webapp`'s for what no gateway asks for: groups, revoking, detached batches, forgetting."""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", f"redis+socket://batches:{SECRET}@{server.socket}?virtual_host=0")
    monkeypatch.setenv("PETIOLE_GATEWAY_FILES", str(tmp_path))
    settings.cache_clear()
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        grant_gateway(client)
        yield client
    settings.cache_clear()
    server.kill()


def denied() -> list[str]:
    return asyncio.run(redis_rights._look(redis_rights.needed()))


def grant(client: redis.Redis, *words: str) -> None:
    client.execute_command("ACL", "DELUSER", "batches")
    client.execute_command("ACL", "SETUSER", "batches", *" ".join(words).replace("( ", "(").split())


def allow(client: redis.Redis, without: str = "") -> None:
    """The user with all rights of a gateway with batches, but for this command."""
    version = version_of(client)
    words = [*documented(version)["webapp"], *(word for of in of_gateways(version).values() for word in of)]
    kept = [word.replace(f"+{without}", "") if word.strip("()") == f"+{without}" else word for word in words]
    grant(client, *kept)


def test_what_is_looked_at_is_what_the_docs_grant() -> None:
    gateway, batches = (commands(of_gateways((7,))[user]) for user in ("gateway", "batches"))
    assert gateway == {*redis_rights.OF_RECORDS.split(), *OF_SCRIPTS, "time", "unwatch"}
    assert batches == {*redis_rights.OF_BATCHES.split(), *OF_SCRIPTS, "time"}


def test_each_right_that_is_missing_is_named_and_nothing_is_changed(client: redis.Redis) -> None:
    allow(client)
    assert denied() == []
    rights = set[str]().union(*(commands(rules) for rules in of_gateways(version_of(client)).values()))
    for right in sorted(rights):
        allow(client, without=right)
        assert {one.replace("script load", "script|load").split()[0] for one in denied()} == {right}, right
    assert client.keys("*") == []


def test_each_rule_of_a_submission_that_is_missing_shows(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    if version_of(client) < (7,):
        pytest.skip("Redis 6.2 has no rules in parentheses")
    monkeypatch.setenv("PETIOLE_CONFIRM_REPLICAS", "1")
    settings.cache_clear()
    rules = " ".join([*documented(version_of(client))["webapp"], *own(client)])
    looked_at = [rule for rule in re.findall(r"\([^)]*\)", rules) if not any(of in rule for of in OF_OTHERS)]
    assert len(looked_at) >= 8
    grant(client, rules)
    assert denied() == []
    parts = [(of, word) for of in ("+wait", *looked_at) for word in of.strip("()").split()]
    for of, word in parts:
        grant(client, rules.replace(of, of.replace(word, "", 1), 1))
        assert denied(), (of, word)
    assert client.keys("*") == []


def test_a_server_without_transactions_is_asked_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RedisServer(tmp_path, "--rename-command", "multi", "")
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setenv("PETIOLE_GATEWAY_FILES", str(tmp_path))
    settings.cache_clear()
    try:
        with redis.Redis(unix_socket_path=str(server.socket)) as client:
            client.sadd(OPEN_BATCHES_KEY, "open")
            client.config_resetstat()
            assert denied() == ["multi"]
            assert client.keys("*") == [OPEN_BATCHES_KEY.encode()]
            called = {name.removeprefix("cmdstat_") for name in client.info("commandstats")}
            asked = {str(call[0]) for call in redis_rights.needed()} - {"expire"}  # which begins each connection
            assert called.isdisjoint(asked)
    finally:
        settings.cache_clear()
        server.kill()


def test_a_gateway_whose_connections_are_all_in_use_is_ready_and_shows_what_it_knows(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIOLE_STREAM_CONNECTIONS", "2")
    monkeypatch.setattr(redis_rights, "KNOWN_FOR_S", 0.0)
    settings.cache_clear()

    async def answers() -> tuple[list[object], Sequence[str]]:
        async def answer() -> object:
            return json.loads(bytes((await application.ready(None)).body))  # type: ignore[arg-type]

        first, pool = await answer(), connections.async_streams().connection_pool
        held = [await pool.get_connection()]
        full = await answer()
        await application.metrics(None)  # type: ignore[arg-type]
        for connection in held:
            await pool.release(connection)
        return [first, full], redis_rights.denied_commands()._known

    allow(client, without="zcount")
    said, known = asyncio.run(answers())
    assert said == [{"status": "ok", "may_not": known}] * 2
    assert len(known) == 1


def test_a_user_who_may_not_queue_carries_out_nothing(client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "batches", "resetkeys", "~*", "+@all", "-multi")
    assert denied() == ["multi"]
    assert client.keys("*") == []


def test_a_user_without_channels_reads_no_streams(client: redis.Redis) -> None:
    allow(client)
    words = [word for word in documented(version_of(client))["webapp"] if "&petiole:{*" not in word]
    client.execute_command("ACL", "SETUSER", "batches", "resetchannels")
    if version_of(client) >= (7,):
        client.execute_command("ACL", "SETUSER", "batches", "clearselectors", *words, *own(client))
    assert [one.split()[0] for one in denied()][-1] == "subscribe"


def own(client: redis.Redis) -> list[str]:
    return [word for of in of_gateways(version_of(client)).values() for word in of]

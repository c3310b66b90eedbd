"""What gateways have told of budgets is read, or left out: a scrape and the doctor go on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from petiole.tasks.fleet import usage
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import budgets_key
from tests.support.site import RedisServer

SHARE = usage.BudgetShare("acme", "day_tokens", 90, 100)


def used(tenant: str, tokens: int) -> usage.TenantUsage:
    sums = {"requests": 1, "prompt": tokens, "output": 0}
    return usage.TenantUsage("2026-01-01", tenant, "m", sums, {"stop": 1})


def test_the_sum_of_all_grows_when_a_tenant_joins_the_busiest() -> None:
    """What others have is the difference: as a series of its own it would fall here."""
    before, after = ([used("a", 9), used("b", 5), used("c", c)] for c in (4, 7))
    assert [one.tenant for one in usage.of_the_busiest(before, 2)] == ["a", "b"]
    assert [one.tenant for one in usage.of_the_busiest(after, 2)] == ["a", "c"]
    [[one], [other]] = map(usage.of_all, (before, after))
    assert (one.sums["prompt"], other.sums["prompt"]) == (18, 21)
    assert (one.model, one.ends) == ("m", {"stop": 3})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    settings.cache_clear()
    yield server
    settings.cache_clear()
    server.kill()


def test_what_was_told_is_read(server: RedisServer) -> None:
    assert usage.budgets() == []
    connections.perform([usage.telling([SHARE])])
    assert [one[:4] for one in usage.budgets()] == [SHARE[:4]]


def test_what_another_gateway_has_told_stays_for_a_while(server: RedisServer) -> None:
    other, more = SHARE._replace(tenant="other"), SHARE._replace(used=95)
    for shares in ([SHARE], [other], [more]):
        connections.perform([usage.telling(shares)])
    told = usage.budgets()
    assert {one[:4] for one in told} == {other[:4], more[:4]}
    gone = [one._replace(at=one.at - usage.SHARES_KEPT_S) for one in told]
    connections.streams().set(budgets_key(), json.dumps(gone))
    connections.perform([usage.telling([SHARE])])
    assert [one[:4] for one in usage.budgets()] == [SHARE[:4]]


@pytest.mark.parametrize("before", ["{", "7", "[7]", '[["a"]]', b"\xff"])
def test_what_cannot_be_read_is_written_anew(server: RedisServer, before: str) -> None:
    connections.streams().set(budgets_key(), before)
    connections.perform([usage.telling([SHARE])])
    assert [one[:4] for one in usage.budgets()] == [SHARE[:4]]


@pytest.mark.parametrize(
    "told", ["{", "7", "[7]", '[["a"]]', '[["a", "b", "c", 1]]', '[["a", "b", 1, 0]]', b"\xff"]
)
def test_what_cannot_be_read_is_left_out(server: RedisServer, told: str) -> None:
    connections.streams().set(budgets_key(), told)
    assert usage.budgets() == []


def test_a_key_of_another_kind_and_a_lost_redis_are_left_out(server: RedisServer) -> None:
    client: redis.Redis = connections.streams()
    client.lpush(budgets_key(), json.dumps([SHARE]))
    assert usage.budgets() == []
    server.kill()
    assert usage.budgets() == []

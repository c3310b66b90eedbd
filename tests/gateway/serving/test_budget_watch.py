"""A tenant's server is told at 80 and at 100 % of a budget: once in a period, whoever looks and whoever dies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from petiole.gateway.serving.auth import budgets, manage
from petiole.gateway.serving.webhooks import queue
from petiole.gateway.serving.webhooks.budget_watch import BudgetWatch
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import usage_keys
from tests.gateway.serving.test_webhooks import everything_is_due
from tests.support.gateway import Gateway
from tests.support.receiver import Got, Receiver
from tests.support.site import RedisServer, eventually

NETWORKS = {"PETIOLE_GATEWAY_WEBHOOK_NETWORKS": "127.0.0.0/8"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    settings.cache_clear()
    yield server
    settings.cache_clear()
    server.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield client


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def used(client: redis.Redis, tokens: int, tenant: str = "acme", days_ago: int = 0) -> None:
    """As the ledger's script writes it."""
    day = f"{datetime.now(UTC) - timedelta(days=days_ago):%Y-%m-%d}"
    client.hincrby(usage_keys(day)[1], f"{json.dumps([tenant, 'm'], separators=(',', ':'))} output", tokens)


def look(*watches: BudgetWatch) -> None:
    async def at_once() -> None:
        await asyncio.gather(*(watch.look() for watch in watches))

    asyncio.run(at_once())


def waiting(client: redis.Redis, tenant: str = "acme") -> list[tuple[str, str, int]]:
    """What tenants are about to be told: type, budget and percent."""
    found = map(json.loads, client.zrange(queue._key(tenant), 0, -1))
    return sorted((one["type"], one["more"]["budget"], one["more"]["percent"]) for one in found)


def watch() -> BudgetWatch:
    return BudgetWatch(lambda outcome: None)


WARNED = ("budget.warning", "day_tokens", 80)
EXHAUSTED = ("budget.exhausted", "day_tokens", 100)


def test_each_threshold_is_told_once_however_many_look(client: redis.Redis) -> None:
    manage.add("acme", {}, {"day_tokens": 100}, {})
    manage.webhook("acme", "https://a.example/")
    for tokens, told in (
        (79, []),
        (1, [WARNED]),
        (10, [WARNED]),
        (10, [EXHAUSTED, WARNED]),
        (50, [EXHAUSTED, WARNED]),
    ):
        used(client, tokens)
        used(client, 1000, "globex")
        look(*(watch() for _ in range(20)))
        assert waiting(client) == told, tokens
    client.delete(queue._key("acme"))
    look(watch())
    assert waiting(client) == [], "what was told is not told again"


def test_a_month_has_all_its_days_and_a_budget_that_was_changed_is_another(client: redis.Redis) -> None:
    manage.add("acme", {}, {"month_tokens": 100}, {})
    manage.webhook("acme", "https://a.example/")
    today = datetime.now(UTC).day
    used(client, 1000, days_ago=today)  # the month before
    used(client, 40, days_ago=today - 1)
    used(client, 40)
    look(watch())
    warned = ("budget.warning", "month_tokens", 80)
    assert waiting(client) == [warned]
    manage.change("acme", {}, {"month_tokens": 200})
    look(watch())
    assert waiting(client) == [warned]
    used(client, 80)
    look(watch())
    assert waiting(client) == [warned, warned]


def test_who_has_no_webhook_is_told_when_there_is_one(client: redis.Redis) -> None:
    manage.add("acme", {}, {"day_tokens": 100}, {})
    used(client, 90)
    own = watch()
    look(own)
    assert not client.keys("petiole:gateway:/told/*")
    manage.webhook("", "https://operator.example/")
    look(own)
    assert (waiting(client), waiting(client, "")) == ([], [WARNED]), "the operator's is for those without one"
    manage.webhook("acme", "https://a.example/")
    used(client, 10)
    look(own)
    assert (waiting(client), waiting(client, "")) == ([EXHAUSTED], [WARNED])


def test_what_was_used_in_the_last_seconds_of_a_period_is_told(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [one.name for one in budgets.recent_periods(datetime(2026, 12, 1, 0, 0, 5, tzinfo=UTC))]
    assert sorted(names) == ["2026-11", "2026-11-30", "2026-12", "2026-12-01"]
    noon = datetime(2026, 12, 1, 12, tzinfo=UTC)
    assert budgets.recent_periods(noon) == [*budgets.periods(noon)]
    manage.add("acme", {}, {"day_tokens": 100}, {})
    manage.webhook("acme", "https://a.example/")
    used(client, 85, days_ago=1)
    for recent, told in ((timedelta(0), []), (timedelta(days=1), [WARNED])):
        monkeypatch.setattr(budgets, "RECENT", recent)
        look(watch(), watch())
        assert waiting(client) == told


def test_a_tenant_that_cannot_be_read_holds_up_no_other(client: redis.Redis) -> None:
    manage.add("acme", {}, {"day_tokens": 100}, {})
    manage.webhook("acme", "https://a.example/")
    client.hset("petiole:gateway:/tenants", mapping={b"\xff": b"{}", "damaged": b"{", "later": b'{"more": 1}'})
    used(client, 100)
    look(watch())
    assert waiting(client) == [EXHAUSTED, WARNED]


def test_a_day_that_is_over_is_read_once(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A month has thirty days, and a gateway with many tenants must not read them all the time."""
    monkeypatch.setattr(budgets, "KNOWN_FOR_S", -1.0)
    now = datetime.now(UTC)
    days = [f"{now - timedelta(days=ago):%Y-%m-%d}" for ago in (0, 3, 4)]

    async def known() -> list[int]:
        found = [await budgets.used_tokens().of("acme", days)]
        for ago in (0, 4):
            used(client, 5, days_ago=ago)
        return [*found, await budgets.used_tokens().of("acme", days)]

    used(client, 7, days_ago=3)
    assert asyncio.run(known()) == [7, 12]


@pytest.mark.e2e
def test_two_gateways_tell_each_once_and_a_killed_one_is_replaced(
    server: RedisServer, client: redis.Redis, receiver: Receiver, tmp_path: Path
) -> None:
    told: dict[str, Any] = {"PETIOLE_BROKER_URL": server.url, **NETWORKS}
    key, _ = manage.add("acme", {}, {"day_tokens": 1000}, {})
    secret = manage.webhook("acme", receiver.url)
    with Gateway(tmp_path, **told) as first, Gateway(tmp_path, **told) as second:
        for one in (first, second):
            assert httpx2.get(f"{one.url}/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        used(client, 800)
        eventually(lambda: receiver.got, "the warning is told")
        eventually(lambda: not client.exists(queue._key("acme")), "it is taken")
        event = receiver.got[0].event(secret)
        period = f"{datetime.now(UTC):%Y-%m-%d}"
        assert (event.type, event.data.id) == ("budget.warning", f"acme.day_tokens.{period}.80.1000")
        assert event.data.model_dump(exclude={"id"}) == {
            "tenant": "acme",
            "budget": "day_tokens",
            "period": period,
            "percent": 80,
            "limit": 1000,
            "used": 800,
        }
        receiver.open.clear()  # the next one is on its way, and its gateways die before it has arrived
        used(client, 200)
        eventually(lambda: len(receiver.got) == 2, "it is sent")
        first.kill()
        second.kill()
    receiver.open.set()
    everything_is_due(client)  # a lease later
    with Gateway(tmp_path, **told) as third:
        httpx2.get(f"{third.root}/health")
        eventually(lambda: not client.exists(queue._key("acme")), "the third has told it")
    assert [kind_of(one) for one in receiver.got] == ["budget.warning", "budget.exhausted", "budget.exhausted"]
    assert len(set(receiver.ids())) == 2, "both tries have one id"


def kind_of(got: Got) -> str:
    return str(json.loads(got.body)["type"])


def test_what_is_told_is_of_a_tenant_in_the_settings_too(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = {"salt": "s", "limits": {"day_tokens": 10}}
    webhook = {"url": "https://a.example/", "secrets": ["whsec_" + "A" * 44]}
    monkeypatch.setenv(
        "PETIOLE_GATEWAY_KEYS", json.dumps({"tenants": {"acme": tenant}, "webhooks": {"acme": webhook}})
    )
    settings.cache_clear()
    used(client, 8)
    look(watch())
    assert waiting(client) == [WARNED]

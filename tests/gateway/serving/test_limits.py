"""Limits under many clients at once: never above, and nobody is left out."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import redis

from petiole.gateway.core.caller import ANYBODY, Caller, Limits, Tenant, as_caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.serving.auth import rate_limits, usage_report
from petiole.tasks.fleet.usage import days
from petiole.tasks.settings import settings
from petiole.tasks.submission.message_templates import PreparedMessage
from petiole.tasks.wire.keys import HELD_HEADER, account_keys, usage_keys
from petiole.tasks.wire.record.ledger import SLOT_MS
from tests.support.site import RedisServer

CLIENTS = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("limits"))
    yield server
    server.kill()


@pytest.fixture
def client(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    settings.cache_clear()
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.flushall()
        yield client
    settings.cache_clear()


def caller(of_tenant: Limits, of_key: Limits | None = None, key: str = "key") -> Caller:
    return Caller("acme", key, Tenant(limits=of_tenant), of_key or Limits())


def plan(n: int = 1, characters: int = 40, max_tokens: int | str = 10) -> Plan:
    name = f"chatcmpl-{uuid.uuid4().hex}"
    tasks = [f"{name}-{choice}" for choice in range(n)]
    record = RequestRecord(id=name, kind="chat.completion", created=0, model="m", tasks=tasks, queue="petiole")
    options = {"messages": [{"role": "user", "content": "x" * characters}], "max_tokens": max_tokens}
    return Plan(record, [TaskCall("chat", options)] * n)


def run(work: Callable[[], Awaitable[Any]], who: Caller) -> tuple[Any, dict[str, str]]:
    async def asked() -> tuple[Any, dict[str, str]]:
        with as_caller(who) as told:
            return await work(), told

    return asyncio.run(asked())


async def outcome(of: Plan) -> dict[str, Any] | Failure:
    try:
        return await rate_limits.admit(of)
    except Failure as failure:
        return failure


@pytest.mark.parametrize(
    ("most", "admitted"),
    [
        (Limits(requests=30), 30),
        (Limits(input_tokens=100), 10),
        (Limits(output_tokens=155), 15),
        (Limits(concurrent=7), 7),
        (Limits(requests=50, output_tokens=100, concurrent=60), 10),
    ],
)
@pytest.mark.parametrize("whose", ["tenant", "key"])
def test_of_many_clients_at_once_as_many_are_admitted_as_the_limit_says(
    client: redis.Redis, most: Limits, admitted: int, whose: str
) -> None:
    who = caller(most) if whose == "tenant" else caller(Limits(), most)
    outcomes, _ = run(lambda: asyncio.gather(*(outcome(plan()) for _ in range(CLIENTS))), who)
    refused = [one for one in outcomes if isinstance(one, Failure)]
    assert len(outcomes) - len(refused) == admitted
    for one in refused:
        assert (one.status, one.code, one.kind) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert one.retry_after_s is not None
        assert 1 <= one.retry_after_s <= 65


def test_many_clients_that_come_again_are_all_served_and_never_too_many(client: redis.Redis) -> None:
    most, running, highest, served = 6, 0, 0, 0
    _, set_of_running = account_keys("acme")

    async def one() -> None:
        nonlocal running, highest, served
        while isinstance(await outcome(asked := plan()), Failure):
            await asyncio.sleep(0)
        running += 1
        highest = max(highest, running)
        await asyncio.sleep(0)
        running -= 1
        client.zrem(set_of_running, *asked.record.tasks)  # as a worker does with the end
        served += 1

    run(lambda: asyncio.gather(*(one() for _ in range(CLIENTS))), caller(Limits(concurrent=most)))
    assert (served, client.zcard(set_of_running)) == (CLIENTS, 0)
    assert highest <= most


@pytest.mark.parametrize(
    "most",
    [Limits(requests=60), Limits(input_tokens=600), Limits(output_tokens=600)],
    ids=["requests", "in", "out"],
)
def test_clients_that_wait_as_they_are_told_are_all_served_minute_by_minute(
    client: redis.Redis, most: Limits
) -> None:
    """In each minute as many as the limit says, so nobody waits for longer than these minutes."""
    used, _ = account_keys("acme")
    admitted, waits = list[int](), list[float]()

    async def all_of_them() -> None:
        waiting = CLIENTS
        while waiting:
            outcomes = await asyncio.gather(*(outcome(plan()) for _ in range(waiting)))
            refused = [one for one in outcomes if isinstance(one, Failure)]
            waits.extend(one.retry_after_s or 0 for one in refused)
            admitted.append(waiting - len(refused))
            waiting = len(refused)
            a_minute_passes(client, used)

    run(all_of_them, caller(most))
    assert sum(admitted) == CLIENTS
    assert all(number >= 60 for number in admitted[:3]), "more, if the machine takes minutes for it"
    assert len(admitted) <= 4
    assert 1 <= min(waits) <= max(waits) <= 65


def a_minute_passes(client: redis.Redis, used: str) -> None:
    """And the slot in which it began."""
    slots = {name.decode(): int(value) for name, value in client.hgetall(used).items()}
    client.delete(used)
    for name, value in slots.items():
        what, _, slot = name.partition(":")
        client.hset(used, f"{what}:{int(slot) - 60_000 // SLOT_MS - 1}", value)


def test_a_greedy_key_leaves_the_others_of_its_tenant_their_part(client: redis.Redis) -> None:
    of_tenant, of_key = Limits(requests=60), Limits(requests=30)
    for key, clients, expected in (("greedy", 180, 30), ("other", 20, 20)):
        who = caller(of_tenant, of_key, key)
        outcomes, _ = run(lambda: asyncio.gather(*(outcome(plan()) for _ in range(clients))), who)  # noqa: B023
        assert sum(not isinstance(one, Failure) for one in outcomes) == expected


def test_a_request_that_generates_nothing_counts_as_one_and_runs_no_task(client: redis.Redis) -> None:
    who = caller(Limits(requests=2, concurrent=1))
    assert not isinstance(run(lambda: outcome(plan()), who)[0], Failure)
    run(lambda: rate_limits.admit_brief("petiole"), who)
    with pytest.raises(Failure) as refused:
        run(lambda: rate_limits.admit_brief("petiole"), who)
    assert refused.value.status == 429
    assert client.zcard(account_keys("acme")[1]) == 1
    run(lambda: rate_limits.admit_brief("petiole"), ANYBODY)


def test_a_limit_of_0_in_the_settings_is_none(client: redis.Redis) -> None:
    who = caller(Limits(requests=0, input_tokens=0, output_tokens=0, concurrent=0), Limits(requests=9))
    assert not isinstance(run(lambda: outcome(plan()), who)[0], Failure)


def test_keys_of_a_tenant_share_its_limit_and_other_tenants_do_not(client: redis.Redis) -> None:
    most = Limits(requests=2)
    for key in ("one", "two"):
        found, _ = run(lambda: outcome(plan()), caller(most, key=key))
        assert not isinstance(found, Failure)
    assert isinstance(run(lambda: outcome(plan()), caller(most, key="three"))[0], Failure)
    other = Caller("globex", "key", Tenant(limits=most))
    assert not isinstance(run(lambda: outcome(plan()), other)[0], Failure)
    assert run(lambda: outcome(plan()), ANYBODY)[0] == {}


def test_choices_run_one_by_one_and_too_many_of_them_are_refused_at_once(client: redis.Redis) -> None:
    who = caller(Limits(concurrent=3))
    assert not isinstance(run(lambda: outcome(plan(n=2)), who)[0], Failure)
    assert run(lambda: outcome(plan(n=2)), who)[0].status == 429
    assert run(lambda: outcome(plan(n=4)), who)[0].status == 400
    first = plan()

    async def released() -> None:
        await rate_limits.admit(first)
        await rate_limits.release(first.record)

    run(released, who)
    assert client.zcard(account_keys("acme")[1]) == 2


@pytest.mark.parametrize("most", [Limits(requests=1, concurrent=1), Limits(requests=1, output_tokens=100)])
def test_what_is_written_of_a_request_is_written_if_it_is_admitted(client: redis.Redis, most: Limits) -> None:
    first, second, free = plan(n=1), plan(n=1), plan(n=1)

    def written(of: Plan) -> list[tuple[Any, ...]]:
        raw = b"\0\xff a record"  # any bytes
        return [("SET", of.record.id, raw, "EX", 60), ("ZADD", f"watched:{of.record.id}", "NX", 5, "x")]

    assert HELD_HEADER in run(lambda: rate_limits.admit(first, written(first)), caller(most))[0]
    with pytest.raises(Failure):
        run(lambda: rate_limits.admit(second, written(second)), caller(most))
    assert run(lambda: rate_limits.admit(free, written(free)), ANYBODY)[0] == {}
    for of in (first, free):
        assert client.get(of.record.id) == b"\0\xff a record"
        assert client.zscore(f"watched:{of.record.id}", "x") == 5
    assert not client.exists(second.record.id, f"watched:{second.record.id}")


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_submitted_is_submitted_if_it_is_admitted(client: redis.Redis, n: int) -> None:
    """The message says what is held, and in which slot, as a submission of Celery's is told to."""
    asked, who = plan(n), caller(Limits(requests=1, concurrent=5))
    messages = [
        PreparedMessage("tasks", f'{{"headers": {{"id": "{task}"', '}, "body": "é"}')
        for task in asked.record.tasks
    ]
    held, _ = run(lambda: rate_limits.admit(asked, [("SET", "written", "1")], messages), who)
    found = [json.loads(message) for message in client.lrange("tasks", 0, -1)]
    tasks = [*reversed(asked.record.tasks)]
    assert found == [{"headers": {"id": task, HELD_HEADER: held[HELD_HEADER]}, "body": "é"} for task in tasks]
    with pytest.raises(Failure):
        run(lambda: rate_limits.admit(plan(), (), messages), who)
    assert client.llen("tasks") == n
    assert run(lambda: rate_limits.admit(plan(), (), messages[:1]), ANYBODY)[0] == {}
    assert json.loads(client.lindex("tasks", 0)) == {"headers": {"id": asked.record.tasks[0]}, "body": "é"}


def test_an_answer_says_what_is_left_after_it(client: redis.Redis) -> None:
    who = caller(Limits(requests=10, output_tokens=100), Limits(requests=5))
    held, told = run(lambda: outcome(plan(max_tokens=30)), who)
    assert held[HELD_HEADER][:3] == ["key", 10, 30]
    assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-remaining-requests"]) == ("5", "4")
    _, told = run(lambda: outcome(plan(max_tokens=30)), who)
    assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-remaining-requests"]) == ("5", "3")
    assert (told["x-ratelimit-limit-tokens"], told["x-ratelimit-remaining-tokens"]) == ("100", "40")
    assert 60 <= float(told["x-ratelimit-reset-requests"].removesuffix("s")) <= 65


def test_a_request_larger_than_its_limit_waits_for_a_whole_minute_and_not_for_ever(client: redis.Redis) -> None:
    who = caller(Limits(output_tokens=100))
    held, _ = run(lambda: outcome(plan(max_tokens="rest")), who)
    assert held[HELD_HEADER][2] == 100, "no more is held than the limit, so no more is given back"
    assert isinstance(run(lambda: outcome(plan(max_tokens=1)), who)[0], Failure)


def test_what_was_used_over_a_minute_ago_counts_no_longer(client: redis.Redis) -> None:
    who, (used, _) = caller(Limits(requests=10)), account_keys("acme")
    slot = int(client.time()[0] * 1000 // SLOT_MS)
    client.hset(used, mapping={f"requests:{slot - 20}": 9, f"requests:{slot - 5}": 6, f"requests:{slot - 2}": 4})
    failure, _ = run(lambda: outcome(plan()), who)
    assert failure.status == 429
    assert 30 <= failure.retry_after_s <= 45, "until the older six are a minute old"
    client.hdel(used, f"requests:{slot - 5}")
    assert not isinstance(run(lambda: outcome(plan()), who)[0], Failure)
    assert not client.hexists(used, f"requests:{slot - 20}")


def test_an_answer_has_no_more_sums_of_usage_than_a_bound(client: redis.Redis) -> None:
    for name, number in (("acme", 3), ("globex", usage_report.MOST_ROWS)):
        sums = {json.dumps([name, f"m{one}"]) + " requests": 1 for one in range(number)}
        client.hset(usage_keys(days(2)[1])[1], mapping=sums)
    with pytest.raises(Failure, match="days: must be so few"):
        run(lambda: usage_report.used("3"), ANYBODY)
    rows, _ = run(lambda: usage_report.used("3"), caller(Limits()))
    assert [row["model"] for row in rows] == ["m0", "m1", "m2"]


@pytest.mark.parametrize("most", [Limits(day_tokens=50), Limits(month_tokens=50)], ids=["day", "month"])
def test_a_budget_that_is_used_up_says_when_it_begins_anew(client: redis.Redis, most: Limits) -> None:
    """The ledger's sums of all models count, and no other tenant's."""
    totals, field = usage_keys(days(1)[0])[1], "day_tokens" if most.day_tokens else "month_tokens"
    client.hset(
        totals, mapping={'["acme", "a"] prompt': 30, '["acme", "b"] output': 19, '["globex", "a"] output': 99}
    )
    assert not isinstance(run(lambda: outcome(plan()), caller(most))[0], Failure)
    client.hincrby(totals, '["acme", "b"] output', 3)
    refused, told = run(lambda: outcome(plan()), caller(most))
    assert (refused.status, refused.code, refused.kind) == (429, "insufficient_quota", "insufficient_quota")
    assert told == {"x-should-retry": "false"}
    assert (
        f"{field}: the tenant's budget must be at most 50 tokens, got 52; it begins anew at 2" in refused.message
    )
    assert 0 < refused.retry_after_s <= (1 if most.day_tokens else 31) * 86_400
    with pytest.raises(Failure, match=field):
        run(lambda: rate_limits.admit_brief("petiole"), caller(most))


def test_a_queue_that_is_too_long_is_not_joined(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_GATEWAY_MOST_QUEUED", "3")
    settings.cache_clear()
    client.rpush("petiole", "a", "b")
    assert not isinstance(run(lambda: outcome(plan()), ANYBODY)[0], Failure)
    client.rpush("petiole", "c")
    assert run(lambda: outcome(plan()), ANYBODY)[0].status == 429


def test_the_wait_is_estimated_from_what_workers_end(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_GATEWAY_MOST_WAIT_S", "10")
    settings.cache_clear()
    client.rpush("petiole", *range(50))

    async def asked(rate: float) -> Any:
        rate_limits.line()._rates = {"petiole": rate}
        rate_limits.line()._read_at = float("inf")
        return await outcome(plan())

    assert not isinstance(run(lambda: asked(0.0), ANYBODY)[0], Failure), "nothing is known"
    assert not isinstance(run(lambda: asked(6.0), ANYBODY)[0], Failure)
    refused, _ = run(lambda: asked(2.0), ANYBODY)
    assert (refused.status, refused.retry_after_s) == (429, 15)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({"prompt": "x" * 400, "max_tokens": 7}, (100, 7)),
        ({"prompt": [1, 2, 3], "max_tokens": "rest"}, (3, rate_limits.UNKNOWN_OUTPUT)),
        ({"messages": [{"role": "user", "content": "x" * 40}]}, (10, rate_limits.UNKNOWN_OUTPUT)),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "x" * 40},
                            {"type": "image_url", "image_url": {"url": "data:" + "y" * 4000}},
                        ],
                    }
                ],
                "max_tokens": 1,
            },
            (10, 1),
        ),
        ({"texts": ["x" * 8, [1, 2]]}, (4, 0)),
        ({"query": "x" * 4, "documents": ["y" * 4, "z" * 8]}, (5, 0)),
        ({"pairs": [("x" * 4, "y" * 4)]}, (2, 0)),
    ],
)
def test_tokens_are_estimated(options: dict[str, Any], tokens: tuple[int, int]) -> None:
    assert rate_limits.estimated([options]) == tokens


@pytest.mark.parametrize(
    "most", [Limits(requests=1, concurrent=2), Limits(requests=1), Limits(requests=5, output_tokens=20)]
)
def test_a_request_that_is_admitted_again_is_counted_once(client: redis.Redis, most: Limits) -> None:
    """The script has run, and the connection was lost before its reply came."""
    asked, who = plan(2), caller(most)
    written = [("SET", asked.record.id, "its record"), ("SET", "more", "1")]
    held, _ = run(lambda: rate_limits.admit(asked, written), who)
    client.delete("more")
    before = client.hgetall(account_keys("acme")[0])
    assert run(lambda: rate_limits.admit(asked, written), who)[0].keys() == held.keys()
    assert client.get("more") == b"1"
    used, running = account_keys("acme")
    assert client.zcard(running) == (2 if most.concurrent else 0)
    assert client.hgetall(used) == before
    with pytest.raises(Failure, match=r"(requests|output tokens) a minute"):
        run(lambda: rate_limits.admit(plan()), who)

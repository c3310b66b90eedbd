"""The ledger: one entry for each task that has ended, written with its end, whatever happened on the way."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from petiole.contract.results.outputs import Prepared
from petiole.gpu_worker.request import Delta
from petiole.tasks.errors import WorkersLost
from petiole.tasks.fleet import usage
from petiole.tasks.wire.headers import Account
from petiole.tasks.wire.keys import account_keys, usage_keys
from petiole.tasks.wire.record.ledger import SLOT_MS, SUMS
from petiole.tasks.worker.broker.quarantine import Sign, end_stream
from petiole.tasks.worker.output.outcomes import Outcome, ended, failed
from petiole.tasks.worker.output.publisher import Publisher, ScriptCall
from tests.support.publishing import TASK, attempt, begin

ACCOUNT = Account("acme", ("key", 50, 60, 7), "m", "adapter")
PREPARED = Prepared("m", "f", prompt_tokens=9, prompt_end="")


def result(output: int, **more: Any) -> Outcome:
    used = {"prompt_tokens": 7, "cached_prompt_tokens": 3, "completion_tokens": output, "reasoning_tokens": 2}
    made = {"text": "", "token_ids": [*range(output)], "usage": used, "finish_reason": "stop", **more}
    return Outcome(made, None, str(made["finish_reason"]), made.get("stop_reason"))


def entries(client: redis.Redis) -> dict[str, dict[str, Any]]:
    found = [json.loads(raw) for raw in usage.entries(2, client=client)]
    return {entry["task"]: entry for entry in found}


def sums(client: redis.Redis) -> dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]]:
    """By tenant and model, over two days: a test may run at midnight."""
    of = usage.days(2)
    found: dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]] = {}
    for one in (one for day in of for one in usage.read(day, client.hgetall(usage_keys(day)[1]))):
        assert (one.tenant, one.model) not in found, "midnight"
        found[one.tenant, one.model] = dict(one.sums), dict(one.ends)
    return found


def test_sums_that_cannot_be_read_are_left_out() -> None:
    own = {b'["acme","m"] requests': b"2", b'["acme","m"] end stop': b"2", b'["a","b"] prompt': b"3"}
    damaged = {
        b"\xff] x": b"1",
        b"x": b"1",
        b'["acme","m"] output': b"x",
        b"[1] requests": b"1",
        b'{"a":1] x': b"1",
    }
    both = usage.read("2026-11-26", [one for pair in (own | damaged).items() for one in pair])
    assert [(one.tenant, one.model, dict(one.ends)) for one in both] == [
        ("a", "b", {}),
        ("acme", "m", {"stop": 2}),
    ]
    assert both[1].sums == {"requests": 2, "prompt": 0, "cached": 0, "output": 0, "reasoning": 0}
    assert usage.read("2026-11-26", own | damaged, "acme") == both[1:]


def test_the_end_of_a_task_is_entered_with_it(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client, account=ACCOUNT)
    stream.push(Delta(0, (1, 2), "a"))
    publisher.flush([stream])
    assert entries(client) == {}
    stream.finish(result(2))
    publisher.flush([stream])
    [entry] = entries(client).values()
    shown = {name: entry[name] for name in ("tenant", "model", "adapter", *SUMS[1:], "end", "attempt", "held")}
    assert shown == {
        "tenant": "acme", "model": "m", "adapter": "adapter", "prompt": 7, "cached": 3, "output": 2,
        "reasoning": 2, "end": "stop", "attempt": 1, "held": [50, 60, 7, SLOT_MS],
    }  # fmt: skip
    assert sums(client) == {
        ("acme", "m"): (
            {"requests": 1, "prompt": 7, "cached": 3, "output": 2, "reasoning": 2},
            {"stop": 1},
        )
    }
    for key in client.scan_iter("petiole:usage:*"):
        assert client.ttl(key) > 0


@pytest.mark.parametrize("account", [Account(model="m"), Account("acme", model="m", days=0)])
def test_a_task_without_a_tenant_is_in_the_sums_alone(
    publisher: Publisher, client: redis.Redis, account: Account
) -> None:
    stream, _ = attempt(publisher, client, account=account)
    stream.finish(result(2))
    publisher.flush([stream])
    assert entries(client) == {}
    assert sums(client)[account.tenant, "m"][0]["output"] == 2


def test_a_call_that_is_repeated_after_a_lost_reply_enters_nothing_twice(
    publisher: Publisher, client: redis.Redis
) -> None:
    stream, _ = attempt(publisher, client, account=ACCOUNT)
    stream.finish(result(0))
    for _ in range(2):
        stream.closed = False
        call = ScriptCall(60_000)
        stream.join(call, 0.0)
        call.send(publisher._pipe)
        publisher._pipe.receive()
    assert sums(client)["acme", "m"][0]["requests"] == 1


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (result(3, finish_reason="cancelled", stop_reason=None), (7, 3, "cancelled")),
        (ended("revoked"), (9, 2, "cancelled")),
        (ended("expired"), (9, 2, "expired")),
        (ended("revoked", result(3)), (7, 3, "cancelled")),
        (failed(WorkersLost(3, "a")), (9, 2, "error")),
    ],
)
def test_what_has_no_result_counts_what_was_made(
    publisher: Publisher, client: redis.Redis, outcome: Outcome, expected: tuple[int, int, str]
) -> None:
    stream, _ = attempt(publisher, client, account=ACCOUNT)
    stream.prepare(PREPARED)
    stream.push(Delta(0, (1, 2), "a"))
    publisher.flush([stream])
    again, _ = attempt(publisher, client, account=ACCOUNT)  # another worker, which has not counted the prompt
    again.finish(outcome)
    publisher.flush([again])
    [entry] = entries(client).values()
    assert (entry["prompt"], entry["output"], entry["end"]) == expected
    assert entry["attempt"] == 2


def test_a_task_that_nobody_ran_is_entered_without_tokens(client: redis.Redis) -> None:
    for _ in range(2):
        error = {"type": "InvalidRequest"}
        end_stream(client, TASK, 60_000, error, sign=Sign(own=True), account=Account("acme"))
    [entry] = entries(client).values()
    assert (entry["tenant"], entry["prompt"], entry["output"], entry["end"]) == ("acme", 0, 0, "error")
    assert sums(client)["acme", ""][1] == {"error": 1}


def test_a_task_that_celery_sends_again_has_an_entry_for_each_end(
    publisher: Publisher, client: redis.Redis
) -> None:
    stream, _ = attempt(publisher, client, account=ACCOUNT)
    stream.finish(result(1))
    publisher.flush([stream])
    begin(client, retries=1)
    again, _ = attempt(publisher, client, account=ACCOUNT)
    client.hdel(f"petiole:{{{TASK}}}:state", "done")
    again, _ = attempt(publisher, client, account=ACCOUNT)
    again.finish(result(1))
    publisher.flush([again])
    assert sums(client)["acme", "m"][0]["requests"] == 2
    assert len([*usage.entries(2, client=client)]) == 2


def test_a_damaged_ledger_holds_no_stream(publisher: Publisher, client: redis.Redis) -> None:
    for day in usage.days(2):
        client.rpush(usage_keys(day)[0], "not a hash")
    client.hset(f"petiole:{{{TASK}}}:state", "prepared", "not json")
    stream, heard = attempt(publisher, client, account=ACCOUNT)
    stream.finish(failed(ValueError("x")))
    publisher.flush([stream])
    assert heard.words == ["finished"]


@pytest.mark.parametrize("held", [("key", 50, 60), ("key", 3, 1)])
def test_what_limits_hold_is_corrected_at_the_end(
    publisher: Publisher, client: redis.Redis, held: tuple[str, int, int]
) -> None:
    """In the minute that began with the task, it has used what its usage says."""
    slot = int(client.time()[0] * 1000 // SLOT_MS)
    for used, running in (account_keys("acme"), account_keys("acme", "key")):
        client.hset(used, mapping={f"input:{slot}": held[1] + 100, f"output:{slot}": held[2] + 100})
        client.zadd(running, {TASK: 1, "another": 1})
    stream, _ = attempt(publisher, client, account=Account("acme", (*held, slot), "m"))
    stream.finish(result(2))
    publisher.flush([stream])
    for used, running in (account_keys("acme"), account_keys("acme", "key")):
        counted = {name.decode(): int(value) for name, value in client.hgetall(used).items()}
        for kind, made in (("input", 7), ("output", 2)):
            assert sum(value for name, value in counted.items() if name.startswith(kind)) == 100 + made
        assert client.zrange(running, 0, -1) == [b"another"]


def test_a_slot_that_is_forgotten_gets_nothing_back(publisher: Publisher, client: redis.Redis) -> None:
    used, _ = account_keys("acme")
    client.hset(used, "input:9", 5)
    stream, _ = attempt(publisher, client, account=ACCOUNT)
    stream.finish(result(2))
    publisher.flush([stream])
    assert client.hgetall(used) == {b"input:9": b"5"}


@pytest.mark.parametrize(
    ("message", "tenant", "held"),
    [
        ({}, "", None),
        ({"tenant": "acme"}, "acme", None),
        ({"tenant": ["acme"], "petiole-held": "x"}, "", None),
        ({"tenant": "a", "petiole-held": ["k", 1, 2, 3]}, "a", ("k", 1, 2, 3)),
        ({"tenant": "a", "petiole-held": ["k", "1", 2, 3]}, "a", None),
    ],
)
def test_whose_task_it_is_stands_in_the_message(message: dict[str, Any], tenant: str, held: Any) -> None:
    account = Account.of(message)
    assert (account.tenant, account.held) == (tenant, held)


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4), st.integers(0, 9)), max_size=6),
)
def test_the_sums_are_those_of_the_entries(
    publisher: Publisher, client: redis.Redis, tasks: list[tuple[str, str, int]]
) -> None:
    """Whatever tenants and models are called."""
    client.flushall()
    for tenant, model, output in tasks:
        client.delete(f"petiole:{{{TASK}}}:state", f"petiole:{{{TASK}}}:log")
        stream, _ = attempt(publisher, client, account=Account(tenant, None, model))
        stream.finish(result(output))
        publisher.flush([stream])
    expected: dict[tuple[str, str], int] = {}
    for tenant, model, output in tasks:
        expected[tenant, model] = expected.get((tenant, model), 0) + output
    assert {whose: counted["output"] for whose, (counted, _) in sums(client).items()} == expected

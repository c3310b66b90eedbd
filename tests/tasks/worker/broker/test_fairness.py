"""Tenants get their shares, whatever the others do."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from petiole.tasks.errors import InvalidSettings
from petiole.tasks.settings import Settings, settings
from petiole.tasks.worker.broker.fairness import FairShares, tenant_queues

weights_of = st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.25, 0.5, 1, 2, 3, 10]), min_size=2)


def shares(weights: dict[str, float]) -> FairShares:
    shares = FairShares(weights)
    shares.update(weights)
    return shares


def serve(shares: FairShares, waiting: Counter[str]) -> str | None:
    """One message of the first queue that has any, as the transport takes it."""
    for queue in shares.consume(100):
        if waiting[queue]:
            waiting[queue] -= 1
            return shares.rotate(queue)
    return None


def test_two_to_one() -> None:
    ours = shares({"a": 2, "b": 1})
    waiting = Counter(a=100, b=100)
    served = Counter(serve(ours, waiting) for _ in range(30))
    assert served == {"a": 20, "b": 10}


def test_a_latecomer_waits_for_nobodys_backlog_and_has_saved_nothing_up() -> None:
    ours = shares({"flood": 1, "late": 1})
    waiting = Counter(flood=10_000)
    for _ in range(5000):
        serve(ours, waiting)
    waiting["late"] = 100
    first = [serve(ours, waiting) for _ in range(10)]
    assert "late" in first[:2]
    assert Counter(first) == {"flood": 5, "late": 5}


@given(
    weights=weights_of,
    events=st.lists(st.sampled_from("abcde") | st.none(), max_size=400),
)
def test_who_always_has_messages_gets_his_share(weights: dict[str, float], events: list[str | None]) -> None:
    """`events` are arrivals, and None where a message is served; two tenants never run dry."""
    ours, waiting = shares(weights), Counter[str]()
    busy = sorted(weights)[:2]
    served: Counter[str] = Counter()
    for event in events:
        if event in weights and event is not None:
            waiting[event] += 1
        elif event is None:
            for queue in busy:
                waiting[queue] = max(waiting[queue], 1)
            queue = serve(ours, waiting)
            assert queue is not None
            served[queue] += 1
            one, other = busy
            apart = abs(served[one] / weights[one] - served[other] / weights[other])
            assert apart <= 1 / weights[one] + 1 / weights[other] + 1e-9


@pytest.mark.parametrize("text", ["a", "a=", "=1", "a=0", "a=-1", "a=inf", "a b=1", "a=1;b=2", "a=1e3"])
def test_weights_that_cannot_be_read_are_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_TENANT_WEIGHTS", text)
    settings.cache_clear()
    with pytest.raises(InvalidSettings, match="PETIOLE_TENANT_WEIGHTS"):
        settings()
    settings.cache_clear()


def test_on_rabbitmq_there_are_no_shares() -> None:
    assert Settings(broker_url="redis://", tenant_weights="a=2, b=0.5").weights == {"a": 2, "b": 0.5}
    assert Settings(broker_url="amqp://", tenant_weights="a=2").weights == {}


def test_a_worker_serves_the_default_queue_and_one_for_each_tenant() -> None:
    assert tenant_queues("petiole", {"a": 2}) == {"petiole": 1, "petiole.a": 2}

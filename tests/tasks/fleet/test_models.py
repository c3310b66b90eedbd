"""A name leads to the queue of workers that serve it, whatever else shares the queue or was there before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import given, strategies as st

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet import models
from petiole.tasks.fleet.models import KEPT_S, ModelFacts, ModelRoute, find, served
from petiole.tasks.fleet.reports import LOST_AFTER_S
from petiole.tasks.servers.connections import connect
from petiole.tasks.wire.keys import MODELS_KEY, own_queue
from tests.support.site import RedisServer

GONE = LOST_AFTER_S + 1


def facts(*names: str, of: str = "", queues: str = "q", age_s: float = 0.0, **more: Any) -> ModelFacts:
    given = {
        "fingerprint": of or names[0],
        "names": [*names],
        "queues": queues.split(","),
        "worker": of or names[0],
    }
    return ModelFacts.model_validate({**given, "age_s": age_s, **more})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis.Redis]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield connect(server.url)
    server.kill()


# ---------------------------------------------------------------- from a name to a queue


def test_a_name_leads_to_its_queue() -> None:
    known = [facts("a", "org/a", queues="qa"), facts("b", queues="qb")]
    assert find(known, "org/a", "petiole") == ModelRoute("qa", None)
    assert find(known, "b", "petiole") == ModelRoute("qb", None)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    known = [facts("a", queues="qa", adapters={"sql": "org/sql"}), facts("b", queues="qb", age_s=GONE)]
    with pytest.raises(InvalidRequest, match=r"^model: must be a model: a, b, sql, got c$"):
        find(known, "c", "petiole")
    with pytest.raises(InvalidRequest, match=r"^model: no worker has served a model yet, got c$"):
        find([], "c", "petiole")
    with pytest.raises(InvalidRequest, match=r"^model: must be a model of queue 'qb': b, got a$"):
        find(known, "a", "petiole", "qb")


@pytest.mark.parametrize("name", [None, 5, ["a"], {"a": 1}])
def test_what_is_no_name_is_no_model(name: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^model: must be a model: a, got "):
        find([facts("a")], name, "petiole")


def test_an_adapters_name_leads_to_queue_and_adapter() -> None:
    known = [facts("a", adapters={"sql": "org/sql"})]
    assert find(known, "sql", "petiole") == ModelRoute("q", "org/sql")
    assert find(known, "a", "petiole") == ModelRoute("q", None)


@pytest.mark.parametrize("queue", ["q", "other"])
def test_a_models_name_is_no_adapters(queue: str) -> None:
    """Wherever the model is, and although the adapter's queue is the asker's own."""
    named = facts("chat", queues="q", age_s=1.0)
    changed = facts(
        "base", of="2", queues=queue, adapters={"chat": "org/other"}, own_queues=[own_queue(queue, "base")]
    )
    if queue == "q":
        with pytest.raises(InvalidRequest, match="queue 'q' has base, too"):
            find([changed, named], "chat", "q")
    else:
        assert find([changed, named], "chat", "other") == ModelRoute("q", None)
        gone = facts("chat", queues="q", age_s=GONE)
        assert find([changed, gone], "chat", "other") == ModelRoute("other", "org/other"), "the model has left"


def test_two_models_on_one_queue_are_found_by_common_names_only() -> None:
    known = [facts("a", "chat"), facts("b", "chat")]
    assert find(known, "chat", "petiole").queue == "q"
    with pytest.raises(InvalidRequest, match=r"must be a name of all models of its queue; queue 'q' has b, too"):
        find(known, "a", "petiole")


def test_each_of_two_models_on_one_queue_has_a_queue_beside_it() -> None:
    beside = {name: own_queue("q", name) for name in ("a", "org/b")}
    known = [facts(name, "chat", own_queues=[queue]) for name, queue in beside.items()]
    assert find(known, "chat", "petiole").queue == "q"
    assert {name: find(known, name, "petiole").queue for name in beside} == beside
    assert find(known, "a", "petiole", "q").queue == beside["a"], "the only queue of a tenant has it beside it"
    assert find(known[:1], "a", "petiole").queue == "q", "alone, it is asked for on the common one"
    assert all(queue.startswith("q.model.") and "/" not in queue for queue in beside.values())


def test_models_of_one_short_name_answer_to_it_together() -> None:
    """As while a folder of one version replaces that of another: no task waits for one of them alone."""
    paths = ("/m/2026-10/support", "/m/2026-11/support")
    known = [facts("support", path, of=path, own_queues=[own_queue("q", "support")]) for path in paths]
    assert find(known, "support", "petiole").queue == "q"
    with pytest.raises(InvalidRequest, match=f"queue 'q' has {paths[0]}, too"):
        find(known, paths[1], "petiole")
    third = facts("chat", own_queues=[own_queue("q", "chat")])
    assert find([*known, third], "support", "petiole").queue == own_queue("q", "support"), "both take from it"
    assert find([known[1], third], paths[1], "petiole").queue == own_queue("q", "support")


def test_a_queue_that_another_model_takes_from_is_no_models_own() -> None:
    """As of a worker that has loaded another model, and still takes what waits for the one before."""
    beside = [own_queue("q", "m1")]
    known = [facts("m2", own_queues=beside), facts("m1", own_queues=beside)]
    for name in ("m1", "m2"):
        with pytest.raises(InvalidRequest, match="must be a name of all models of its queue"):
            find(known, name, "petiole")


def test_an_adapter_of_one_of_two_models_is_found() -> None:
    known = [facts("a", own_queues=[own_queue("q", "a")], adapters={"sql": "org/sql"}), facts("b")]
    assert find(known, "sql", "petiole") == ModelRoute(own_queue("q", "a"), "org/sql")
    with pytest.raises(InvalidRequest, match="queue 'q' has a, too"):
        find(known, "b", "petiole")


def test_a_queue_of_its_own_is_better_than_a_shared_one() -> None:
    known = [facts("a", queues="shared,own"), facts("b", queues="shared")]
    assert find(known, "a", "shared").queue == "own"


def test_one_model_on_several_queues_is_asked_for_where_a_worker_lives() -> None:
    gone, live, other = (
        facts("a", of="1", queues="q1", age_s=GONE),
        facts("a", of="2", queues="q2"),
        facts("a", of="3", queues="q3"),
    )
    assert find([gone, live, other], "a", "q1").queue == "q2"
    assert find([gone, live, other], "a", "q3").queue == "q3", "the producer's own first"
    assert find([gone, live, other], "a", "q1", "q1").queue == "q1", "the caller names it"
    assert find([gone], "a", "petiole").queue == "q1", "scaled to zero"


def test_what_a_deploy_has_replaced_is_not_found() -> None:
    old, new = facts("old", age_s=GONE), facts("new")
    assert find([old, new], "new", "petiole").queue == "q"
    with pytest.raises(InvalidRequest, match="must be a model: new, got old"):
        find([old, new], "old", "petiole")
    gone = facts("new", age_s=2 * GONE)
    assert served([facts("old", age_s=3 * GONE), gone], "q") == [gone], "both have left"


def test_what_a_reload_has_replaced_is_not_found_from_then_on() -> None:
    old, new = facts("old", worker="w", age_s=1.0), facts("new", worker="w", age_s=0.0)
    assert find([old, new], "new", "petiole").queue == "q"
    assert find([old, new, facts("new", "old", of="x", queues="x")], "old", "petiole").queue == "x"


QUEUES = st.lists(st.sampled_from(["petiole", "x", "y"]), min_size=1, unique=True)
NAMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, unique=True)
KNOWN = st.lists(st.tuples(NAMES, QUEUES, st.sampled_from([0.0, 1.0, GONE, 2 * GONE])), max_size=5)


@given(KNOWN, st.sampled_from(["a", "b", "c"]))
def test_whoever_is_found_answers_to_the_name(
    entries: list[tuple[list[str], list[str], float]], name: str
) -> None:
    """Whichever worker of the queue takes the task. And what is not found has no such queue."""
    known = [
        facts(*names, of=str(at), queues=",".join(queues), age_s=age_s)
        for at, (names, queues, age_s) in enumerate(entries)
    ]

    def good(queue: str) -> bool:
        here = [model for model in known if queue in model.queues]
        live = [model for model in here if model.live]
        first = min((model.age_s for model in here), default=None)
        newest = [model for model in here if model.age_s == first][:1]
        return bool(here) and all(name in model.names for model in live or newest)

    queues = {"petiole", "x", "y"}
    try:
        found = find(known, name, "petiole")
    except InvalidRequest:
        assert not any(map(good, queues))
    else:
        assert good(found.queue)


# ---------------------------------------------------------------- what stands in Redis


def test_facts_stay_for_days_and_know_their_first_time(client: redis.Redis) -> None:
    client.flushall()
    models.publish(client, facts("a", response_template={"fields": {"content": {}}}, special_tokens={"2": "</s>"}))
    (first,) = models.models(client)
    models.publish(client, facts("a", "chat"))
    (second,) = models.models(client)
    assert (first.response_template, first.special_tokens) == ({"fields": {"content": {}}}, {"2": "</s>"})
    assert (second.since, second.names, second.live) == (first.since, ["a", "chat"], True)
    assert first.since == pytest.approx(time.time(), abs=3600)
    assert KEPT_S - 60 < client.ttl(MODELS_KEY) <= KEPT_S


def test_the_same_model_on_other_queues_is_another_entry(client: redis.Redis) -> None:
    client.flushall()
    models.publish(client, facts("a", queues="x"))
    models.publish(client, facts("a", queues="y,z"))
    assert [model.queues for model in models.models(client)] == [["x"], ["y", "z"]]


def test_old_and_unreadable_entries_are_left_out(client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    client.flushall()
    old = time.time() - KEPT_S - 3600
    client.hset(MODELS_KEY, "old q", f"{old:.6f} {old:.6f} {facts('old').model_dump_json()}")
    client.hset(MODELS_KEY, "later q", f"{time.time():.6f} {time.time():.6f} another form")
    client.hset(MODELS_KEY, "worse q", "?")
    models.publish(client, facts("a", later="a field of a later version"))
    assert [model.names for model in models.models(client)] == [["a"]]
    assert caplog.text.count("cannot be read") == 2
    models.forget_old(client)
    assert set(client.hkeys(MODELS_KEY)) == {b"later q", b"worse q", b"a q"}


def test_a_process_reads_again_for_a_name_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ModelFacts] = []
    calls = []

    def reading() -> list[ModelFacts]:
        calls.append(None)
        return list(read)

    monkeypatch.setattr(models, "models", reading)
    monkeypatch.setattr(models, "UNKNOWN_FOR_S", 0.0)
    directory = models.Directory()
    with pytest.raises(InvalidRequest):
        directory.find("a", "petiole")
    read.append(facts("a"))
    assert [directory.find("a", "petiole").queue for _ in range(100)] == ["q"] * 100
    assert len(calls) == 3, "once, again for the unknown name, and for the next one"

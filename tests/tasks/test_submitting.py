"""What a caller hears at once: what is wrong with a request, and that the broker is away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery import chain
from hypothesis import given, strategies as st
from kombu.exceptions import OperationalError

from petiole.contract.requests import bounds
from petiole.contract.requests.bounds import check_values
from petiole.tasks import InvalidRequest, Unavailable, chat, generate
from petiole.tasks.app.application import make_app
from petiole.tasks.app.backend import RedisBackend
from petiole.tasks.app.configuration import PUBLISH_RETRY_POLICY
from petiole.tasks.errors import GenerationFailed
from petiole.tasks.settings import settings
from petiole.tasks.submission.options import parse
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.wire.keys import AFFINITY_HEADER, SENT_HEADER
from petiole.tasks.worker.broker.gate import bodies
from tests.support.fake_engine import expected
from tests.support.site import Site

BAD = {"prompt": "hello", "max_tokens": 0}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were sent, to nobody."""
    names: list[str] = []
    monkeypatch.setattr(type(generate.app), "send_task", lambda self, name, *_, **__: names.append(name))
    return names


@pytest.mark.parametrize(
    "submit",
    [
        lambda: generate.delay(**BAD),
        lambda: generate.apply_async(kwargs=BAD, priority=3),
        lambda: generate.apply_async((), BAD),
        lambda: generate.s(**BAD).apply_async(),
        lambda: chain(generate.s(**BAD), generate.s()).apply_async(),
        lambda: generate.stream(**BAD),
        lambda: chat.delay(messages=[{"role": "user", "content": "hello"}], max_tokens=0),
    ],
)
def test_a_bad_option_is_refused_where_it_is_given(submit: Callable[[], object], sent: list[str]) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens: must be at least 1, got 0$"):
        submit()
    assert sent == []


def test_a_task_that_is_called_says_how_it_is_submitted() -> None:
    with pytest.raises(GenerationFailed, match=r"^tasks\.generate runs in a worker's engine: submit it"):
        generate(prompt="hello")


@pytest.mark.parametrize("many", ["map", "starmap", "chunks"])
def test_many_calls_in_one_other_task_are_refused_where_they_are_made(many: str, sent: list[str]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"use group\(generate\.s\(\.\.\.\) for \.\.\. in \.\.\.\), got tasks\.generate$"
    ):
        getattr(generate, many)([{"prompt": "x"}], *([10] if many == "chunks" else []))
    assert sent == []


def test_a_good_request_is_sent(sent: list[str]) -> None:
    generate.delay(prompt="hello", max_tokens=1)
    assert sent == ["tasks.generate"]


def test_the_next_link_of_a_chain_fails_by_itself(sent: list[str]) -> None:
    """A worker that sends it on must not fail the task that is done."""
    generate.apply_async(("text",), {"max_tokens": 0}, parent_id="t")
    assert sent == ["tasks.generate"]


def test_a_message_says_where_its_task_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = []
    monkeypatch.setattr(type(generate.app), "send_task", lambda *_, **options: headers.append(options["headers"]))
    question = [{"role": "user", "content": "hello"}]
    chat.delay(messages=question)
    chat.apply_async(kwargs={"messages": question}, headers={"trace": "5"})
    chat.s(messages=[*question, {"role": "assistant", "content": "hi"}, *question]).apply_async()
    chat.apply_async(kwargs={"messages": question}, headers={AFFINITY_HEADER: "mine"})
    key = headers[0][AFFINITY_HEADER]
    assert [found[AFFINITY_HEADER] for found in headers] == [key, key, key, "mine"]
    assert headers[1]["trace"] == "5"


def test_a_message_says_when_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anew each time: a retry passes on the headers of the message that it is a retry of."""
    headers = []
    monkeypatch.setattr(type(generate.app), "send_task", lambda *_, **options: headers.append(options["headers"]))
    before = round(time.time(), 3)
    generate.delay(prompt="text")
    generate.apply_async(kwargs={"prompt": "text"}, headers={SENT_HEADER: 5.0})
    generate.apply_async(kwargs={"prompt": ""}, parent_id="t")
    assert all(before <= found[SENT_HEADER] <= time.time() + 0.001 for found in headers)


# ---------------------------------------------------------------- Redis is away


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path) as site:
        yield site


@pytest.fixture
def task(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`generate` of a producer that waits no longer than the test needs to."""
    monkeypatch.setitem(PUBLISH_RETRY_POLICY, "max_retries", 1)
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
    settings.cache_clear()
    app = make_app()

    def body(*given: object, **request: object) -> None:
        """The body is the worker's."""

    yield app.task(body, base=GenerationTask, name=generate.name, shared=False)
    app.close()
    settings.cache_clear()


@pytest.mark.e2e
def test_every_call_hears_the_same_while_redis_is_away(site: Site, task: Any) -> None:
    task.delay(prompt="hello")
    site.server.kill()
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"^redis\+socket://.* is not available: .*\S$") as raised:
            task.delay(prompt="hello")
        assert isinstance(raised.value, OperationalError)


@pytest.mark.e2e
def test_a_result_that_was_waited_for_in_vain_can_be_waited_for_again(site: Site, task: Any) -> None:
    site.worker()
    submitted = task.delay(prompt="hello", max_tokens=3, seed=1)
    assert submitted.get(timeout=60)["token_ids"] == expected("hello", 1, 3)
    later = task.delay(prompt="long", max_tokens=1000, seed=2)
    site.streaming(later)
    site.workers[0].signal(signal.SIGSTOP)  # so that it ends after all that follows
    site.server.kill()
    for _ in range(2):
        with pytest.raises(Unavailable):
            later.get(timeout=60)
    site.server.start()
    site.workers[0].signal(signal.SIGCONT)
    assert later.get(timeout=60)["token_ids"] == expected("long", 2, 1000)


@pytest.mark.e2e
def test_a_forked_child_does_not_hear_for_its_parent(
    site: Site, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = task.app.backend.result_consumer
    consumer.consume_from("before")
    parents, process = consumer._pubsub, os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    consumer.consume_from("after")
    assert consumer._pubsub is not parents
    assert set(parents.channels) == {b"celery-task-meta-before"}
    assert set(consumer._pubsub.channels) == {b"celery-task-meta-before", b"celery-task-meta-after"}


def test_no_password_is_shown(task: Any) -> None:
    task.app.conf.broker_url = "redis://:secret@127.0.0.1:1/0"
    with pytest.raises(Unavailable) as raised:
        task.delay(prompt="hello")
    assert str(raised.value).startswith("redis://:***@127.0.0.1:1/0 is not available: ")
    assert "secret" not in repr(raised.value)


def test_tls_has_the_same_manners() -> None:
    def backend(url: str) -> type:
        app = make_app()
        app.conf.update(result_backend=url, broker_url="memory://")
        return type(app.backend)

    assert backend("rediss://host/0?ssl_cert_reqs=required") is backend("redis://host/0") is RedisBackend


def test_callers_do_not_wait_for_long() -> None:
    policy = PUBLISH_RETRY_POLICY
    pauses = [min(n * policy["interval_step"], policy["interval_max"]) for n in range(int(policy["max_retries"]))]
    assert 2 <= sum(pauses) <= 4


@pytest.mark.parametrize(
    ("options", "field", "limit"),
    [
        ({"task_id": "\ud800"}, "task_id", "must be text of 1 to 255 bytes as UTF-8"),
        ({"task_id": "x" * 10_000}, "task_id", "must be text of 1 to 255 bytes as UTF-8"),
        ({"task_id": 5}, "task_id", "must be text of 1 to 255 bytes as UTF-8"),
        ({"headers": {"_children": 5}}, "headers._children", "must have another name: this one is Celery's own"),
        ({"headers": {"delivery_info": {"a": 1}}}, "headers.delivery_info", "must have another name"),
        ({"headers": {"id": "mine"}}, "headers.id", "must have another name"),
        ({"headers": {"compression": "gzip"}}, "headers.compression", "must have another name"),
        ({"headers": {"expires": 60}}, "headers.expires", "must be a time in ISO 8601"),
        ({"headers": {"\ud800": 60}}, "headers", "must have names of text"),
        ({"headers": 5}, "headers", "must be an object"),
        ({"compression": "nope"}, "compression", "must be a compression that this installation has"),
        ({"compression": 5}, "compression", "must be a compression that this installation has"),
        ({"serializer": "pickle"}, "serializer", "must be one of json"),
        ({"expires": "soon"}, "expires", "must be a time, or seconds from now"),
        ({"expires": float("nan")}, "expires", "must be a time, or seconds from now"),
        ({"expires": 1e300}, "expires", "must be a time, or seconds from now"),
        ({"countdown": "soon"}, "countdown", "must be at most 10000000000 s"),
        ({"eta": 5}, "eta", "must be a time in ISO 8601"),
        ({"priority": "high"}, "priority", "must be a whole number"),
        ({"time_limit": -1}, "time_limit", "must be a number of seconds from 0 to 1000000000, or null"),
        ({"soft_time_limit": "5"}, "soft_time_limit", "must be a number of seconds"),
    ],
)
def test_what_no_worker_takes_is_refused_where_it_is_given(
    options: dict[str, Any], field: str, limit: str, sent: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate.apply_async(kwargs={"prompt": "hello"}, **options)
    assert caught.value.field == field
    assert caught.value.limit.startswith(limit)
    assert caught.value.value
    assert sent == []


@pytest.mark.parametrize(
    "options",
    [
        {"task_id": "x" * 255},
        {"expires": 60, "countdown": 0.5},
        {"expires": -1},
        {"expires": datetime(2030, 1, 1, tzinfo=UTC), "eta": "2029-01-01T00:00:00"},
        {"headers": {"mine": {"a": 1}, "headers": {"a": 1}, "shadow": "name"}},
        {"compression": "gzip", "serializer": "json", "priority": 3},
        {"time_limit": 5, "soft_time_limit": 2.5, "link": generate.s(), "queue": "other"},
    ],
)
def test_what_celery_takes_is_sent(options: dict[str, Any], sent: list[str]) -> None:
    generate.apply_async(kwargs={"prompt": "hello"}, **options)
    assert sent == ["tasks.generate"]


def test_a_worker_that_sends_the_next_link_on_leaves_its_options_to_the_worker_that_gets_it(
    sent: list[str],
) -> None:
    generate.apply_async(kwargs={"prompt": "hello"}, parent_id="t", task_id="x" * 300)
    generate.apply_async(kwargs={"prompt": "hello", "self": 1}, parent_id="t")
    assert sent == ["tasks.generate"] * 2


@pytest.mark.parametrize(("name", "field"), [("self", "self"), ("\ud800", "\\ud800"), ("ä", "ä")])
@pytest.mark.parametrize(
    "submit",
    [
        lambda options: generate.delay(**options),
        lambda options: generate.apply_async(kwargs=options),
        lambda options: generate.stream(**options),
        lambda options: parse("tasks.generate", (), options),
    ],
)
def test_an_unknown_option_of_any_name_is_named(
    submit: Callable[[dict[str, Any]], object], name: str, field: str, sent: list[str]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        submit({"prompt": "hello", name: 5})
    refused = caught.value
    assert (refused.field, refused.limit, refused.value) == (field, "is not an option of this task", "5")
    str(refused).encode()
    assert sent == []


LARGE: list[dict[str, Any]] = [
    {"prompt": [1] * 500_000, "stop": ["a"] * 60},
    {"prompt": [1] * 400_000, "allowed_token_ids": [1] * 119_000},
    {"prompt": "a," * 500_000, "logit_bias": {str(k): 1.0 for k in range(9_000)}},
    {"prompt": "x", "json_schema": {"enum": list(range(200_000)), "description": "[" * 100_000}},
    {"prompt": "{" * 500_000},
]


@pytest.mark.parametrize("options", LARGE, ids=range(len(LARGE)))
def test_what_a_producer_accepts_passes_the_workers_gate(options: dict[str, Any], sent: list[str]) -> None:
    """The largest requests."""
    check_values(options)
    body = json.dumps([[], options, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    bodies.check_size("body", body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet="a,[{é\ud800"),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet="a,[{"), inner),
)


@given(st.dictionaries(st.text(alphabet="ab"), JSON))
def test_what_is_short_has_no_more_values_than_bytes(options: dict[str, Any]) -> None:
    """So short requests are not counted."""
    counted = 3 * len(options) + sum(map(bounds._values_of, options.values()))
    assert counted <= bounds._marshalled(options)
    assert bounds._marshalled({**options, "odd": object()}) > bounds.MOST_VALUES_OF_A_REQUEST


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": "a," * 600_000}, "prompt"),
        ({"prompt": [1] * 490_000, "allowed_token_ids": [1] * 100_000}, "prompt"),
        ({"prompt": "x", "json_schema": {"enum": [[]] * 300_000}}, "json_schema"),
        ({"prompt": "[" * 600_000}, "prompt"),
    ],
)
def test_what_the_workers_gate_does_not_take_is_refused_by_the_producer(
    options: dict[str, Any], field: str, sent: list[str]
) -> None:
    with pytest.raises(bodies.RefusedError):
        bodies.check_size("body", json.dumps(options))
    limit = "with the rest must have at most 520192 lists, objects, commas and colons"
    for submit in (lambda: generate.delay(**options), lambda: asyncio.run(generate.adelay(**options))):
        with pytest.raises(InvalidRequest, match=f"^{field}: {limit}, got [0-9]{{6}}"):
            submit()
    assert sent == []

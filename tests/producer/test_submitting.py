"""What a caller hears at once: what is wrong with a request, and that the broker is away."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chain
from kombu.exceptions import OperationalError
from support.fake_engine import expected
from support.site import Site

from tasks import InvalidRequest, Unavailable, affinity, chat, generate
from tasks.app import CALLERS_PATIENCE, make_app
from tasks.backend import RedisBackend
from tasks.definitions import GenerationTask
from tasks.errors import GenerationFailed
from tasks.schemas import SENT
from tasks.settings import settings

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
    with pytest.raises(GenerationFailed, match=r"^tasks\.generate runs in a worker: submit it with delay, "):
        generate(prompt="hello")


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
    chat.apply_async(kwargs={"messages": question}, headers={affinity.HEADER: "mine"})
    key = headers[0][affinity.HEADER]
    assert [found[affinity.HEADER] for found in headers] == [key, key, key, "mine"]
    assert headers[1]["trace"] == "5"


def test_a_message_says_when_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anew each time: a retry passes on the headers of the message that it is a retry of."""
    headers = []
    monkeypatch.setattr(type(generate.app), "send_task", lambda *_, **options: headers.append(options["headers"]))
    before = round(time.time(), 3)
    generate.delay(prompt="text")
    generate.apply_async(kwargs={"prompt": "text"}, headers={SENT: 5.0})
    generate.apply_async(kwargs={"prompt": ""}, parent_id="t")
    assert all(before <= found[SENT] <= time.time() + 0.001 for found in headers)


# ---------------------------------------------------------------- Redis is away


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path) as site:
        yield site


@pytest.fixture
def task(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`generate` of a producer that waits no longer than the test needs to."""
    monkeypatch.setitem(CALLERS_PATIENCE, "max_retries", 1)
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
    settings.cache_clear()
    app = make_app()

    def hand_over(*given: object, **request: object) -> None:
        """The body is the worker's."""

    yield app.task(hand_over, base=GenerationTask, name=generate.name, shared=False)
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
    policy = CALLERS_PATIENCE
    pauses = [min(n * policy["interval_step"], policy["interval_max"]) for n in range(int(policy["max_retries"]))]
    assert 2 <= sum(pauses) <= 4

"""Celery's consumer behind the gate."""

from __future__ import annotations

import bz2
import gc
import select
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from petiole.tasks.worker.broker import quarantine
from petiole.tasks.worker.broker.consumer import Consumer, Prefetch, StockConsumer
from petiole.tasks.worker.broker.gate import bodies
from petiole.tasks.worker.delivery.mailbox import Mailbox
from tests.support.hostile import Received

GOOD = {"task": "tasks.generate", "id": "an-id"}


def message(headers: Any, body: bytes = b"[[], {}, {}]") -> Received:
    return Received(
        body=body,
        headers=headers,
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, Any]]:
    """Reason, task id and error of what was put aside."""
    given: list[tuple[str, str | None, Any]] = []

    def put_aside(
        item: bytes, queue: str, reason: str, task_id: str | None, *, error: Any, **options: Any
    ) -> None:
        given.append((reason, task_id, error))

    monkeypatch.setattr(quarantine, "put_aside", put_aside)
    return given


def handler(monkeypatch: pytest.MonkeyPatch, takes: Any) -> Any:
    consumer = object.__new__(Consumer)
    consumer.make_room = lambda: None
    monkeypatch.setattr(StockConsumer, "create_task_handler", lambda self: takes)
    return consumer.create_task_handler()


def test_what_the_gate_refuses_is_put_aside_before_celery_sees_it(
    monkeypatch: pytest.MonkeyPatch, aside: list[Any]
) -> None:
    handler(monkeypatch, pytest.fail)(message({**GOOD, "expires": 60}))
    ((reason, task_id, _),) = aside
    assert reason.startswith("headers.expires must be a time in ISO 8601")
    assert task_id == "an-id"


def test_what_celery_cannot_handle_all_the_same_is_put_aside(
    monkeypatch: pytest.MonkeyPatch, aside: list[Any]
) -> None:
    def takes(message: Received) -> None:
        raise AttributeError("nobody thought of this")

    handler(monkeypatch, takes)(message(GOOD))
    assert aside == [("the message cannot be handled: AttributeError", "an-id", None)]


def test_a_lost_redis_is_no_fault_of_the_message(monkeypatch: pytest.MonkeyPatch, aside: list[Any]) -> None:
    def takes(message: Received) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        handler(monkeypatch, takes)(message(GOOD))
    assert aside == []


def test_celery_gets_no_reserved_header(monkeypatch: pytest.MonkeyPatch, aside: list[Any]) -> None:
    seen: list[Received] = []
    handler(monkeypatch, seen.append)(message({**GOOD, "_children": 5, "mine": 1}))
    assert seen[0].headers == {**GOOD, "mine": 1}


@pytest.mark.parametrize(
    ("compression", "says"),
    [
        ("nope", "headers.compression must be"),
        (5, "headers.compression must be"),
        ("gzip", "body cannot be decoded"),
    ],
)
def test_a_body_that_kombu_cannot_decompress_is_put_aside(aside: list[Any], compression: Any, says: str) -> None:
    """Stock Celery acknowledges it without a result."""
    damaged = message({**GOOD, "compression": compression})
    assert damaged.errors
    consumer = object.__new__(Consumer)
    consumer.task_consumer = None
    consumer.on_decode_error(damaged, damaged.errors[0][1])
    ((reason, task_id, _),) = aside
    assert reason.startswith(says)
    assert task_id == "an-id"


def test_an_unknown_task_fails_without_a_wait_for_the_backend(aside: list[Any]) -> None:
    consumer = object.__new__(Consumer)
    consumer.event_dispatcher = None
    consumer.on_unknown_task(None, message({**GOOD, "task": "tasks.nothing"}), KeyError("tasks.nothing"))
    ((reason, task_id, error),) = aside
    assert "tasks.nothing" in reason
    assert (task_id, type(error).__name__) == ("an-id", "NotRegistered")


@pytest.mark.parametrize("raised", [True, False])
def test_a_task_that_makes_room_for_another_wakes_the_event_loop(
    raised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery applies the new prefetch in the loop's next turn."""
    consumer = object.__new__(Consumer)
    consumer.pool = SimpleNamespace(mailbox=Mailbox())
    consumer.qos = Prefetch(lambda prefetch_count: None, 5)
    consumer.qos.update()
    takes = (lambda _: consumer.qos.increment_eventually()) if raised else (lambda _: None)
    monkeypatch.setattr(StockConsumer, "create_task_handler", lambda self: takes)
    consumer.create_task_handler()(message(GOOD))
    assert bool(select.select([consumer.pool.mailbox._reader], [], [], 0)[0]) == raised


@pytest.mark.parametrize(
    "given",
    [
        ({**GOOD, "compression": "bzip2"}, bz2.compress(bytes(2 * bodies.SMALL_BYTES))),
        (GOOD, b"[" * 100_000),
        (GOOD, b"[1, 2"),
        (GOOD, b"5"),
    ],
    ids=["inflates", "deep", "cut off", "wrong"],
)
def test_a_refused_message_keeps_nothing_alive(
    given: tuple[dict[str, Any], bytes], monkeypatch: pytest.MonkeyPatch, aside: list[Any]
) -> None:
    """kombu keeps the traceback of an error, and with it all that was inflated."""
    bodies.install()
    handle = handler(monkeypatch, pytest.fail)
    consumer = object.__new__(Consumer)
    consumer.task_consumer = None
    gc.collect()
    gc.disable()
    try:
        refused = message(*given)
        alive = weakref.ref(refused)
        if refused.errors:
            refused._reraise_error(consumer.on_decode_error)
        else:
            handle(refused)
        assert len(aside) == 1
        del refused
        assert alive() is None
    finally:
        gc.enable()

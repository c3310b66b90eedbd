"""What is a message, and what is none."""

from __future__ import annotations

import json
import select
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.message import Message

from tasks.worker.consumer import Consumer, StockConsumer, malformed
from tasks.worker.mailbox import Mailbox
from tasks.worker.prefetch import Prefetch

GOOD = {"task": "tasks.generate", "id": "an-id"}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def message(headers: Any, body: Any = ((), {}, {}), content_type: str = "application/json") -> Message:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Message(
        body=raw, headers=headers, content_type=content_type, content_encoding="utf-8", accept={"application/json"}
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"timelimit": [None, None]},
        {"timelimit": [10, 2.5]},
        {"timelimit": [0, None]},
        {"eta": "2030-01-01T00:00:00+00:00"},
        {"expires": None},
        {"group": "g", "retries": 3, "stamps": {}, "stamped_headers": []},
    ],
)
def test_what_celery_sends_is_taken(changes: dict[str, Any]) -> None:
    assert malformed(message({**GOOD, **changes})) is None


def test_the_older_protocol_is_taken() -> None:
    assert malformed(message({}, {"task": "tasks.generate", "id": "an-id", "args": [], "kwargs": {}})) is None


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        (GOOD, b"not json", "cannot be decoded"),
        (GOOD, 5, "must be [args, kwargs, embed]"),
        (GOOD, [[], [], {}], "must be [args, kwargs, embed]"),
        ({**GOOD, "timelimit": 5}, [[], {}, {}], "headers.timelimit"),
        ({**GOOD, "timelimit": [-1, None]}, [[], {}, {}], "headers.timelimit"),
        ({**GOOD, "retries": True}, [[], {}, {}], "headers.retries"),
        ({**GOOD, "eta": "soon"}, [[], {}, {}], "headers.eta"),
        ({**GOOD, "id": ""}, [[], {}, {}], "headers.id"),
        ({}, [[], {}, {}], "must name a task"),
    ],
)
def test_the_reason_names_what_is_wrong(headers: Any, body: Any, says: str) -> None:
    reason = malformed(message(headers, body))
    assert reason is not None
    assert says in reason


def test_headers_must_be_an_object() -> None:
    odd = message(GOOD)
    odd.headers = [1]
    assert malformed(odd) == "headers must be an object"


@given(
    headers=st.dictionaries(
        st.sampled_from(["task", "id", "timelimit", "eta", "expires", "group", "stamps", "retries"]), json_values
    ),
    body=json_values | st.binary(max_size=10),
)
def test_nothing_makes_the_guard_itself_fail(headers: dict[str, Any], body: Any) -> None:
    assert isinstance(malformed(message(headers, body)), str | None)


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
    consumer.pool.mailbox.close()

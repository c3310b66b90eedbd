"""What passes of control commands, events and replies. `tests/fuzz` tries what nobody thought of."""

from __future__ import annotations

import copy
import json
import signal
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from hypothesis import given, strategies as st

from petiole.tasks.worker.broker import gate
from petiole.tasks.worker.broker.gate import broadcasts
from tests.support.hostile import JUNK, Received
from tests.support.hostile_broadcasts import COMMANDS

COMMAND = {
    "method": "revoke",
    "arguments": {"task_id": "a-task", "terminate": True, "signal": "TERM"},
    "destination": ["celery@host"],
    "pattern": None,
    "matcher": None,
    "ticket": "a-ticket",
    "reply_to": {"exchange": "reply.celery.pidbox", "routing_key": "a-caller"},
}
EVENT = {
    "type": "worker-heartbeat",
    "hostname": "celery@host",
    "pid": 5,
    "clock": 7,
    "timestamp": 1.7e9,
    "utcoffset": 0,
    "freq": 2.0,
    "active": 0,
    "processed": 3,
    "loadavg": [0.5, 0.25, 0.25],
    "sw_ident": "py-celery",
    "sw_ver": "5.7.0",
    "sw_sys": "Linux",
}


def message(body: Any, headers: Any = None, routing_key: str = "") -> Received:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Received(
        body=raw,
        headers=headers or {},
        delivery_info={"exchange": "", "routing_key": routing_key},
        content_type="application/json",
        content_encoding="utf-8",
        accept={"application/json"},
    )


def reason(answer: gate.RefusedMessage | None) -> str:
    assert isinstance(answer, gate.RefusedMessage)
    answer.reason.encode()
    return answer.reason


# ---------------------------------------------------------------- control commands


def test_a_command_passes_without_what_celery_does_not_read() -> None:
    given = message({**COMMAND, "self": 5, "odd": 1}, {"clock": 3})
    assert broadcasts.control(given) is None
    assert given.payload == {name: value for name, value in COMMAND.items() if value is not None}
    assert given.headers == {"clock": 3}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": None}, "method must be text"),
        ({"method": ["revoke"]}, "method must be text"),
        ({"method": "\ud800"}, "method must be text"),
        ({"arguments": [1]}, "arguments must be an object, got [1]"),
        ({"arguments": {"\ud800": 1}}, "arguments must be an object"),
        ({"destination": "celery@host"}, "destination must be a list of names"),
        ({"destination": [{}]}, "destination must be a list of names"),
        ({"pattern": "(a+)+#", "matcher": "pcre"}, "matcher must be glob"),
        ({"reply_to": "somebody"}, "reply_to must be an object"),
        ({"reply_to": {"exchange": "x"}}, "reply_to must be an object"),
        ({"ticket": {}}, "ticket must be text"),
    ],
)
def test_a_command_of_another_form_is_refused(changes: dict[str, Any], says: str) -> None:
    assert reason(broadcasts.control(message({**COMMAND, **changes}))).startswith(says)


@pytest.mark.parametrize("body", [5, None, [COMMAND], "x", b"[" * 100_000, b"{broken", b"\xff", b""], ids=repr)
def test_what_is_no_command_is_refused(body: Any) -> None:
    assert reason(broadcasts.control(message(body))).startswith("the command")


@pytest.mark.parametrize("clock", ["x", -1, 0.5, float("inf"), 10**400, 2**53 + 1, [], True])
def test_a_clock_that_would_reach_all_workers_is_left_out(clock: Any) -> None:
    given = message(COMMAND, {"clock": clock})
    assert broadcasts.control(given) is None
    assert "clock" not in given.headers
    heard = message({**EVENT, "clock": clock})
    assert broadcasts.event(heard) is None
    assert "clock" not in heard.payload
    assert broadcasts.hello({"celery@a": {"clock": clock}}) == {"celery@a": {}}


@pytest.mark.parametrize(
    ("method", "arguments", "says"),
    [
        ("revoke", {"task_id": 5}, "revoke: task_id must be the id of a task, or a list of at most 10000, got 5"),
        ("revoke", {"task_id": ["a"] * 10_001}, "revoke: task_id"),
        ("revoke", {"task_id": "a", "terminate": "yes"}, "revoke: terminate must be true or false"),
        ("query_task", {"ids": [{}]}, "query_task: ids"),
        ("rate_limit", {"task_name": "a", "rate_limit": "nan/s"}, "rate_limit: rate_limit must be a rate"),
        ("rate_limit", {"task_name": "a", "rate_limit": -1}, "rate_limit: rate_limit"),
        ("rate_limit", {"task_name": "a", "rate_limit": [1]}, "rate_limit: rate_limit"),
        ("time_limit", {"task_name": "a", "hard": "x"}, "time_limit: hard must be a number of seconds"),
        ("pool_grow", {"n": 10**400}, "pool_grow: n must be a whole number"),
        ("add_consumer", {"queue": "\ud800"}, "add_consumer: queue must be text"),
        ("add_consumer", {"queue": "a", "exchange": 5}, "add_consumer: exchange"),
        ("hello", {"from_node": "a", "revoked": [5]}, "hello: revoked must be a list of names"),
        ("revoke_by_stamped_headers", {"headers": {"a": 5}}, "revoke_by_stamped_headers: headers"),
        ("revoke_by_stamped_headers", {"headers": ["a"]}, "revoke_by_stamped_headers: headers"),
    ],
)
def test_an_argument_that_would_stay_in_the_worker_is_refused(
    method: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(gate.RefusedError) as caught:
        broadcasts.arguments(method, json.loads(json.dumps(arguments)))
    assert str(caught.value).startswith(says)


def test_what_celery_itself_sends_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: dict[str, Any] = {"hello": {"from_node": "celery@host", "revoked": ["a"]}}
    control = Celery("sender", set_as_current=False).control
    monkeypatch.setattr(control, "broadcast", lambda name, *_, arguments, **__: sent.update({name: arguments}))
    control.revoke(["a", "b"], terminate=True, signal=signal.SIGKILL)
    control.revoke_by_stamped_headers({"tenant": ["a"], "b": "c"})
    control.rate_limit("shop.count", "10/m")
    control.time_limit("tasks.generate", soft=1, hard=2.5)
    control.add_consumer("other", routing_key="other")
    control.cancel_consumer("other")
    control.pool_grow(2)
    control.pool_shrink(1)
    control.autoscale(3, 1)
    control.election("an-id", "task", {"task": "a"})
    assert len(sent) == 11
    for method, arguments in sent.items():
        broadcasts.arguments(method, json.loads(json.dumps(arguments)))
    for method in COMMANDS:
        broadcasts.arguments(method, {})


@given(
    body=st.dictionaries(st.sampled_from([*COMMAND, "self"]), st.sampled_from(JUNK)), clock=st.sampled_from(JUNK)
)
def test_nothing_makes_the_gate_for_commands_fail(body: dict[str, Any], clock: Any) -> None:
    given = message(b"{}", {"clock": clock})
    given._decoded_cache = {**COMMAND, **copy.deepcopy(body)}
    assert isinstance(broadcasts.control(given), gate.RefusedMessage | None)


# ---------------------------------------------------------------- events


def test_an_event_passes_without_what_celery_would_make_attributes_of() -> None:
    heard = message({**EVENT, "heartbeats": 5, "event": 5, "__class__": 5})
    assert broadcasts.event(heard) is None
    assert heard.payload == EVENT


@pytest.mark.parametrize(
    ("changes", "routing_key", "says"),
    [
        ({"type": 5}, "worker.heartbeat", "type must be an event of a worker"),
        ({"type": "task-received"}, "worker.heartbeat", "type must be an event of a worker"),
        ({"hostname": None}, "worker.heartbeat", "hostname must be in this event"),
        ({"freq": "often"}, "worker.heartbeat", "freq must be a number"),
        ({"timestamp": 1e300}, "worker.heartbeat", "timestamp must be a time"),
        ({"loadavg": [[]]}, "worker.heartbeat", "loadavg must be a list of numbers"),
        ({}, "worker.elect", "id must be in this event"),
        ({}, "worker.elect.ack", "id must be in this event"),
        ({"id": []}, "worker.elect.ack", "id must be text"),
    ],
)
def test_an_event_of_another_form_is_refused(changes: dict[str, Any], routing_key: str, says: str) -> None:
    assert reason(broadcasts.event(message({**EVENT, **changes}, routing_key=routing_key))).startswith(says)


def test_events_of_tasks_are_not_read() -> None:
    for routing_key, reads in (("worker.online", True), ("task.sent", False), ("", False)):
        assert broadcasts.is_of_a_worker(message(b"", routing_key=routing_key)) == reads
    assert not broadcasts.is_of_a_worker(SimpleNamespace(delivery_info=[], headers={}, payload=None))


@given(body=st.dictionaries(st.sampled_from([*EVENT, "id", "odd"]), st.sampled_from(JUNK)))
def test_nothing_makes_the_gate_for_events_fail(body: dict[str, Any]) -> None:
    given = message(b"{}", routing_key="worker.elect")
    given._decoded_cache = {**EVENT, **copy.deepcopy(body)}
    assert isinstance(broadcasts.event(given), gate.RefusedMessage | None)


# ---------------------------------------------------------------- replies


@pytest.mark.parametrize("replies", [None, 5, [], {"a": 5}, {5: {}}, {"\ud800": {}}, {"": {"clock": 1}}])
def test_replies_of_another_form_say_nothing(replies: Any) -> None:
    assert not any(broadcasts.hello(replies).values())


def test_a_valid_reply_passes_and_the_rest_of_it_does_not() -> None:
    replies = {"celery@a": {"clock": 7, "revoked": ["x"], "odd": 1}, "celery@b": {"clock": 1, "revoked": [5]}}
    assert broadcasts.hello(replies) == {"celery@a": {"clock": 7, "revoked": ["x"]}, "celery@b": {"clock": 1}}


# ---------------------------------------------------------------- on Redis


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"[" * 100_000, "the message cannot be read: RecursionError"),
        (b"x" * (broadcasts.LARGEST_BYTES + 1), f"the message must have at most {broadcasts.LARGEST_BYTES} bytes"),
        (b'{"body": "", "properties": {}}', "properties.delivery_tag must be text, got None"),
        (b'{"body": "", "properties": {"delivery_tag": "1", "body_encoding": "x"}}', "properties.body_encoding"),
    ],
    ids=["deep", "large", "no tag", "encoding"],
)
def test_an_envelope_of_another_form_is_refused(raw: bytes, says: str) -> None:
    assert reason(broadcasts.envelope(raw)).startswith(says)

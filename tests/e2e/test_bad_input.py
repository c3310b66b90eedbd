"""Nothing that arrives in the queue ends the worker, and whatever has an id gets an answer."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery.exceptions import NotRegistered

from petiole import plain
from petiole.contract.requests.count import queue_of
from petiole.contract.tasks import COUNT
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.servers.connections import connect
from tests.support.fake_engine import expected
from tests.support.hostile import FORGED
from tests.support.site import RedisServer, Site, Worker, eventually

pytestmark = pytest.mark.usefixtures("worker")


def envelope(**changes: Any) -> dict[str, Any]:
    """What a producer puts into the queue, with `changes` to its headers."""
    task_id = changes.pop("task_id", str(uuid4()))
    body = changes.pop("body", [[], {"prompt": "hello", "max_tokens": 2}, {}])
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return {
        "body": base64.b64encode(raw).decode(),
        "content-encoding": "utf-8",
        "content-type": changes.pop("content_type", "application/json"),
        "headers": {"lang": "py", "task": "tasks.generate", "id": task_id, "retries": 0, **changes},
        "properties": {
            "correlation_id": task_id,
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "petiole"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid4()),
        },
    }


def put(site: Site, message: Any) -> None:
    raw = message if isinstance(message, bytes) else json.dumps(message).encode()
    site.redis.lpush(str(site.app.conf.task_default_queue), raw)


def quarantined(site: Site) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in site.redis.lrange("petiole:quarantine", 0, -1)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "p", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "p", "max_tokens": 10**6}, "prompt"),
        ({"prompt": "p", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "p", "temperature": -1}, "temperature"),
        ({"prompt": "p", "temperatur": 0}, "temperatur"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "word " * 2_000_000}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "p", "self": 5}, "self"),
        ({"prompt": "p", "\ud800": 5}, "\\ud800"),
    ],
)
def test_a_bad_option_is_named_in_the_result(site: Site, options: dict[str, Any], field: str) -> None:
    result = site.app.send_task("tasks.generate", kwargs=options)
    with pytest.raises(InvalidRequest) as caught:
        site.get(result)
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000
    last = site.log(result)[-1]
    assert (last["finish_reason"], last["error"]["type"]) == ("error", "InvalidRequest")


def test_other_streams_do_not_notice_ten_megabytes(site: Site) -> None:
    running = site.generate("steady", max_tokens=300, seed=1)
    site.streaming(running)
    with pytest.raises(InvalidRequest):
        site.get(site.generate("x" * 10_000_000))
    assert site.get(running)["token_ids"] == expected("steady", 1, 300)


def test_a_refused_message_ends_nobody_elses_task(site: Site) -> None:
    """One bears the id of a task that runs, another the id of one that has failed."""
    with pytest.raises(InvalidRequest, match="max_tokens"):
        site.get(failed := site.generate("p", max_tokens=0))
    running = site.generate("steady", max_tokens=300, seed=1)
    site.streaming(running)
    marks = [f"mark-{uuid4()}" for _ in range(2)]
    for task_id, mark in zip((running.id, failed.id), marks, strict=True):
        put(site, envelope(task_id=task_id, retries=mark))
    eventually(lambda: sum(mark in str(quarantined(site)) for mark in marks) == 2, "both are put aside")
    assert site.get(running)["token_ids"] == site.tokens(running) == expected("steady", 1, 300)
    eventually(lambda: site.held() == 0, "both are acknowledged")
    with pytest.raises(InvalidRequest, match="max_tokens"):
        site.get(site.app.AsyncResult(failed.id))


@pytest.mark.slow
def test_a_result_backend_that_is_away_does_not_silence_a_worker(tmp_path: Path) -> None:
    (folder := tmp_path / "results").mkdir()
    results = RedisServer(folder)
    with Site(tmp_path, PETIOLE_RESULT_BACKEND=results.url) as site:
        site.worker()
        results.kill()
        messages = [envelope(expires=60), envelope(task="tasks.nothing")]
        for message in messages:
            put(site, message)
        eventually(lambda: quarantined(site), "quarantined")
        for _ in range(3):
            assert site.app.control.ping(timeout=5, limit=1), "the event loop turns"
        assert site.held() == len(messages), "they are not acknowledged before their tasks have failed"
        results.start()
        stored = connect(results.url)
        for message in messages:
            key = f"celery-task-meta-{message['headers']['id']}"
            eventually(lambda key=key: stored.get(key), "the task has failed")
            assert json.loads(stored.get(key))["status"] == "FAILURE"
        eventually(lambda: site.held() == 0, "acknowledged")
        results.kill()


def test_an_unknown_task_fails(site: Site) -> None:
    with pytest.raises(NotRegistered):
        site.get(site.app.send_task("tasks.nothing"))


@pytest.mark.parametrize(
    "changes",
    [
        {"body": 5},
        {"body": None},
        {"body": [1, 2]},
        {"body": [[], [], {}]},
        {"body": ["args", {}, {}]},
        {"body": {"prompt": "protocol?"}},
        {"body": b"not json"},
        {"body": b"\xff\xfe"},
        {"body": b"\x80\x04N.", "content_type": "application/x-python-serialize"},
        {"timelimit": 5},
        {"timelimit": ["a", "b"]},
        {"task": ["tasks.generate"]},
        {"task": {"a": 1}},
        {"retries": "many"},
        {"eta": 5},
        {"eta": "tomorrow"},
        {"expires": "never"},
        {"expires": {}},
        {"expires": 60},
        {"compression": "nope"},
        {"compression": 5},
        {"compression": "gzip"},
        {"retries": 10**400},
        {"body": [[], {}, {"_children": 5}]},
        {"body": [[], {}, {"callbacks": [5]}]},
        {"body": b"[" * 100_000},
        {"group": 7},
        {"stamps": 7, "stamped_headers": ["stamps"]},
        {"shadow": 7},
        {"ignore_result": "yes"},
        {"mine": [{"deep": "\ud800"}]},
        {"\ud800": 1},
        {"mine": "x" * 300_000},
        {"body": [[], {"prompt": "p"}, {"mine": "\ud800"}]},
    ],
    ids=lambda changes: ascii(changes)[:60],
)
def test_a_message_that_celery_cannot_take_is_put_aside_and_answered(
    site: Site, worker: Worker, changes: dict[str, Any]
) -> None:
    message = envelope(**changes)
    task_id = message["headers"]["id"]
    put(site, message)
    with pytest.raises(InvalidRequest):
        site.get(site.app.AsyncResult(task_id))
    assert worker.alive()
    eventually(lambda: site.held() == 0, "acknowledged")


@pytest.mark.parametrize(
    "raw", [b"", b"5", b"null", b"[1,2]", b"{}", b"{broken", b"\xff", b'{"headers": 1}'], ids=repr
)
def test_garbage_in_the_queue_is_put_aside(site: Site, worker: Worker, raw: bytes) -> None:
    before = len(quarantined(site))
    put(site, raw)
    eventually(lambda: len(quarantined(site)) == before + 1, "quarantined")
    assert worker.alive()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("body_encoding", "rot13"),
        ("delivery_info", "x"),
        ("delivery_info", [1]),
        ("correlation_id", {}),
        ("priority", 10**400),
    ],
)
def test_properties_that_kombu_cannot_take_are_answered(
    site: Site, worker: Worker, name: str, value: object
) -> None:
    message = envelope()
    message["properties"][name] = value
    put(site, message)
    with pytest.raises(InvalidRequest, match=f"properties.{name} must be"):
        site.get(site.app.AsyncResult(message["headers"]["id"]))
    assert worker.alive()


@pytest.mark.parametrize("task_id", ["\ud800", "x" * 10_000, "", 5], ids=ascii)
def test_a_task_without_a_usable_id_is_put_aside(site: Site, worker: Worker, task_id: Any) -> None:
    before = len(quarantined(site))
    message = envelope(task_id=task_id)
    put(site, message)
    eventually(lambda: len(quarantined(site)) == before + 1, "quarantined")
    assert quarantined(site)[0]["task_id"] is None
    assert "correlation_id" in quarantined(site)[0]["reason"] or "headers.id" in quarantined(site)[0]["reason"]
    assert worker.alive()


OWN_AND_WRONG: tuple[dict[str, Any], ...] = (
    {"petiole-sent": 10**400},
    {"petiole-affinity": "x" * 10_000},
    {"petiole-held": ["key", 10**400, -1, 0.5]},
    {"petiole-held": 5},
    {"petiole-held": ["\ud800", 1, 2, 3]},
    {"tenant": "\ud800"},
    {"tenant": 5},
    {"tenant": "x" * 10_000},
)


def test_headers_that_would_replace_celerys_own_do_no_harm(site: Site) -> None:
    """Three of them took the three threads that complete tasks."""
    odd: list[dict[str, Any]] = [{"_children": 5}] * 3
    for headers in (*odd, {"get": 5}, {"is_eager": True}, {"delivery_info": {"a": 1}}, *OWN_AND_WRONG):
        message = envelope(**headers)
        put(site, message)
        assert site.get(site.app.AsyncResult(message["headers"]["id"]))["finish_reason"] == "length"


def test_a_name_in_a_message_begins_no_line_of_the_log(site: Site, worker: Worker) -> None:
    """An id, a task, a shadow, a queue: the worker logs each."""
    message = envelope(task_id=f"an id {FORGED}", shadow=FORGED, argsrepr=FORGED, origin=FORGED, tenant=FORGED)
    unknown = envelope(task=FORGED)
    for one in (message, unknown):
        put(site, one)
    site.app.control.revoke(f"another {FORGED}", terminate=True, reply=True, timeout=10)
    assert site.get(site.app.AsyncResult(message["headers"]["id"]))["finish_reason"] == "length"
    with pytest.raises(NotRegistered):
        site.get(site.app.AsyncResult(unknown["headers"]["id"]))
    eventually(lambda: r"an id a\n[2026" in worker.output, "logged")
    assert all(plain.is_plain(line) and not line.startswith("[2026-01-01") for line in worker.output.split("\n"))


def test_a_count_that_cannot_be_inflated_keeps_no_other_waiting(site: Site) -> None:
    bad, good = envelope(task=COUNT, compression="gzip"), envelope(task=COUNT, body=[[], {"texts": ["a"]}, {}])
    for one in (bad, good):
        site.redis.lpush(queue_of("petiole"), json.dumps(one))
    with pytest.raises(InvalidRequest):
        site.get(site.app.AsyncResult(bad["headers"]["id"]))
    assert site.get(site.app.AsyncResult(good["headers"]["id"]))


def test_garbage_with_an_id_is_answered(site: Site) -> None:
    message = envelope(task_id="garbled")
    del message["properties"]["delivery_info"]
    message["headers"] = ["id", "garbled"]
    put(site, message)
    with pytest.raises(InvalidRequest):
        site.get(site.app.AsyncResult("garbled"))


def test_a_bad_control_message_does_no_harm(site: Site, worker: Worker) -> None:
    for raw in (b"5", b"null", b'{"body": 1}', b"{broken"):
        site.redis.publish("/0.celery.pidbox", raw)
    assert site.get(site.generate("still here", max_tokens=1))
    assert worker.alive()


def test_a_control_command_that_makes_no_sense_does_no_harm(site: Site, worker: Worker) -> None:
    control = site.app.control
    for command, arguments in (
        ("add_consumer", {"queue": 5}),
        ("cancel_consumer", {"queue": []}),
        ("time_limit", {"task_name": "tasks.generate", "hard": "x", "soft": []}),
        ("revoke", {"task_id": "\ud800", "terminate": True}),
    ):
        control.broadcast(command, arguments=arguments, reply=True, timeout=10, limit=1)
    assert site.get(site.generate("still here", max_tokens=1))
    control.broadcast("time_limit", arguments={"task_name": "tasks.generate"}, reply=True, timeout=10, limit=1)
    assert worker.alive()


def test_the_worker_lives(site: Site, worker: Worker) -> None:
    assert site.get(site.generate("alive", max_tokens=3, seed=1))["token_ids"] == expected("alive", 1, 3)
    assert worker.alive()
    eventually(lambda: site.without_ttl() <= {"petiole:owners"}, "all messages are acknowledged")

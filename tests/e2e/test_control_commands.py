"""Who may command a worker, and where its answers go."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from petiole.tasks.app.configuration import configuration
from petiole.tasks.settings import Settings
from petiole.tasks.worker.pool.commands import PRODUCERS
from tests.support.hostile_broadcasts import COMMANDS
from tests.support.site import Site, Worker, eventually

REPLIES = "reply.celery.pidbox"
HARMLESS = {"method": "ping", "arguments": {}}


def send(site: Site, exchange: str = "celery", **command: Any) -> None:
    """Publish a control command, as anybody may who can publish on the channel."""
    message = {
        "body": json.dumps({**HARMLESS, **command}),
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {},
        "properties": {
            "delivery_tag": "1",
            "delivery_info": {"exchange": f"{exchange}.pidbox", "routing_key": ""},
        },
    }
    assert site.redis.publish(f"/0.{exchange}.pidbox", json.dumps(message))


def answered(site: Site, exchange: str = "celery") -> str:
    """Wait for an answer that nobody collects. So all earlier commands are carried out. Returns its key."""
    caller = str(uuid.uuid4())
    send(site, exchange, reply_to={"exchange": f"reply.{exchange}.pidbox", "routing_key": caller}, ticket="t")
    key = f"{caller}.reply.{exchange}.pidbox"
    eventually(lambda: site.redis.llen(key), "the worker answers")
    return key


CALLER = "6b2f1f0e-1111-2222-3333-444455556666"


@pytest.mark.parametrize(
    "reply_to",
    [
        {"exchange": "", "routing_key": "stolen"},
        {"exchange": None, "routing_key": "stolen"},
        {"exchange": "stolen", "routing_key": "stolen"},
        {"exchange": "stolen", "routing_key": CALLER},
        {"exchange": REPLIES, "routing_key": "stolen"},
        {"exchange": REPLIES, "routing_key": ""},
        {"exchange": REPLIES, "routing_key": None},
        {"exchange": REPLIES, "routing_key": [CALLER]},
        {"exchange": REPLIES, "routing_key": f"{CALLER}\n"},
        {"exchange": REPLIES, "routing_key": f"stolen.{CALLER}"},
        {"exchange": REPLIES, "routing_key": CALLER, "more": 1},
        {"exchange": REPLIES},
        {},
        [],
        ["exchange"],
        "stolen",
        5,
    ],
    ids=str,
)
def test_an_answer_goes_only_to_a_queue_of_celerys_form(site: Site, worker: Worker, reply_to: Any) -> None:
    site.redis.sadd("_kombu.binding.stolen", "stolen\x06\x16\x06\x16stolen", f"{CALLER}\x06\x16\x06\x16stolen")
    before = {key for key in site.redis.keys("*") if b"pidbox" in key}
    send(site, method="active", reply_to=reply_to)
    seen = answered(site).encode()
    assert not site.redis.exists("stolen", CALLER)
    assert {key for key in site.redis.keys("*") if b"pidbox" in key} <= before | {seen}
    assert worker.alive()


def test_a_forged_binding_gets_no_answer_and_an_answer_expires(site: Site, worker: Worker) -> None:
    caller = str(uuid.uuid4())
    site.redis.sadd(f"_kombu.binding.{REPLIES}", f"{caller}\x06\x16\x06\x16stolen")
    send(site, reply_to={"exchange": REPLIES, "routing_key": caller})
    key = f"{caller}.{REPLIES}"
    eventually(lambda: site.redis.llen(key), "the worker answers")
    assert not site.redis.exists("stolen")
    assert 0 < site.redis.ttl(key) <= 60


@pytest.fixture
def two_exchanges(tmp_path: Path) -> Iterator[tuple[Site, Worker, Celery]]:
    """A site whose workers have an exchange for operators, and an operator's app."""
    with Site(tmp_path, PETIOLE_DRAIN_SECONDS=0) as site:
        worker = site.worker("-n", "w0@test", PETIOLE_CONTROL_EXCHANGE="operators")
        operators = Celery("petiole", set_as_current=False)
        operators.conf.update(configuration(Settings(broker_url=site.url, control_exchange="operators")))
        yield site, worker, operators
        operators.close()


def test_producers_may_cancel_but_not_command(two_exchanges: tuple[Site, Worker, Celery]) -> None:
    site, worker, operators = two_exchanges
    arguments: dict[str, dict[str, Any]] = {
        "rate_limit": {"task_name": "tasks.generate", "rate_limit": "1/h"},
        "time_limit": {"task_name": "tasks.generate", "hard": 1e-9},
        "cancel_consumer": {"queue": "petiole"},
        "add_consumer": {"queue": "others"},
        "pool_shrink": {"n": 8},
        "reload_engine": {"model": "elsewhere"},
        "revoke_by_stamped_headers": {"headers": {"a": "b"}, "terminate": True},
        "terminate": {"signal": "KILL", "task_id": "x"},
        "hello": {"from_node": "other", "revoked": {"x": 1}},
    }
    for method in (*COMMANDS, "no_such_thing", None, 5, [], {}):
        if method not in ("revoke", "ping"):
            caller = {"exchange": REPLIES, "routing_key": CALLER}
            send(site, method=method, arguments=arguments.get(str(method), {}), reply_to=caller)
    answered(site)
    assert not site.redis.exists(f"{CALLER}.{REPLIES}")
    assert site.get(site.generate("still served", max_tokens=2))["finish_reason"] == "length"
    assert worker.output.count("a control command on celery.pidbox was refused") == 1, worker.output

    long = site.generate("long", max_tokens=4000)
    site.streaming(long)
    site.app.control.revoke(long.id, terminate=True)
    eventually(lambda: site.app.AsyncResult(long.id).state == "REVOKED", "cancelled")

    assert operators.control.ping(timeout=30, destination=[worker.node]) == [{worker.node: {"ok": "pong"}}]
    (active,) = operators.control.inspect(timeout=30, destination=[worker.node]).active_queues().values()
    assert {queue["name"] for queue in active} == {"petiole", "petiole.model.petiole-tiny"}
    operators.control.shutdown(destination=[worker.node])
    assert worker.ended() == 0


def test_what_producers_may_send_exists() -> None:
    assert COMMANDS.keys() >= PRODUCERS

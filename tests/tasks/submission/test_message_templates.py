"""A message from an envelope is the message that Celery makes."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from celery import signals

from petiole.tasks import InvalidRequest
from petiole.tasks.app.application import make_app
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import settings
from petiole.tasks.submission import message_templates
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.wire.keys import SENT_HEADER
from tests.support.site import RedisServer

Options = dict[str, Any]
PROMPT = {"prompt": 'It\'s "x" \\ é', "stop": ["a", "b"], "seed": 3, "logit_bias": {5: -1.5}}
TALK = {"messages": [{"role": "user", "content": 'It\'s "x" \\ é ' + "long " * 300}], "max_tokens": "rest"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def tasks(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, Any]]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setenv("PETIOLE_TENANT_WEIGHTS", "acme=2")
    settings.cache_clear()
    app = make_app()

    def hand_over(*given: object, **request: object) -> None:
        """The body is the worker's."""

    yield {
        name: app.task(hand_over, base=GenerationTask, name=name, shared=False)
        for name in ("tasks.generate", "tasks.chat")
    }
    app.close()
    settings.cache_clear()


async def letter(task: Any, kwargs: Options, submission: Options) -> message_templates.PreparedMessage | None:
    found = await message_templates.templates().of(task, kwargs, submission)
    return None if found is None else await found.message("mine", kwargs, submission.get("headers", {}))


def as_said(raw: bytes) -> Options:
    """A message without what differs from message to message."""
    message: Options = json.loads(raw)
    message["body"] = json.loads(base64.b64decode(message["body"]))
    for name in (SENT_HEADER, "origin"):
        assert message["headers"].pop(name)
    for name in ("delivery_tag", "reply_to"):
        assert message["properties"].pop(name)
    return message


@pytest.mark.parametrize("large", [False, True], ids=["", "large"])
@pytest.mark.parametrize(
    ("submission", "queue"),
    [
        ({}, "petiole"),
        ({"priority": 3}, "petiole\x06\x163"),
        ({"queue": "other"}, "other"),
        ({"headers": {"tenant": "acme", "mine": ["é"]}}, "petiole.acme"),
        ({"headers": {"tenant": "globex"}, "priority": 9, "queue": "other"}, "other\x06\x169"),
    ],
)
@pytest.mark.parametrize(
    ("name", "kwargs"), [("tasks.generate", PROMPT), ("tasks.chat", TALK)], ids=["generate", "chat"]
)
def test_a_message_is_what_celery_makes(
    server: RedisServer, tasks: Mapping[str, Any], name: str, kwargs: Options, submission: Options, queue: str,
    large: bool, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if large:
        monkeypatch.setattr(message_templates, "LARGE", 10)
    client, task = connect(server.url), tasks[name]

    async def both() -> tuple[message_templates.PreparedMessage | None, message_templates.PreparedMessage | None]:
        return await letter(task, {**kwargs, "max_tokens": 1}, submission), await letter(task, kwargs, submission)

    first, second = asyncio.run(both())
    assert not client.llen(queue), "an envelope submits nothing"
    assert first is not None
    assert second is not None
    task.delay(**kwargs, **submission, task_id="mine")
    [theirs] = client.lrange(queue, 0, -1)
    client.delete(queue)
    client.execute_command(*second.command())
    [ours] = client.lrange(queue, 0, -1)
    assert as_said(ours) == as_said(theirs)
    *before, behind = second.with_last("held", ["k", 1])
    more = json.loads(before[-1] + "7" + behind)
    assert more["headers"].pop("held") == ["k", 1, 7]
    assert as_said(json.dumps(more).encode()) == as_said(theirs)
    tags = {json.loads(str(one.command()[2]))["properties"]["delivery_tag"] for one in (first, second)}
    assert len(tags) == 2


def test_what_is_wrong_is_refused(tasks: Mapping[str, Any]) -> None:
    async def ask() -> None:
        assert await letter(tasks["tasks.generate"], {"prompt": "x"}, {}) is not None
        for kwargs in ({"prompt": "x", "temprature": 1}, {"prompt": 5}):
            with pytest.raises(InvalidRequest):
                await letter(tasks["tasks.generate"], kwargs, {})

    asyncio.run(ask())
    with pytest.raises(InvalidRequest):
        asyncio.run(letter(tasks["tasks.generate"], {"prompt": 5}, {}))


def test_where_celery_does_more_it_submits(tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    task = tasks["tasks.generate"]

    def has_one(**submission: Any) -> bool:
        return asyncio.run(letter(task, {"prompt": "x"}, submission)) is not None

    def heard(**_: object) -> None:
        pass

    assert has_one()
    assert not has_one(expires=5)
    for signal in (signals.before_task_publish, signals.after_task_publish, signals.task_sent):
        signal.connect(heard)
        assert not has_one()
        signal.disconnect(heard)
    for name, value in {"task_send_sent_event": True, "task_routes": {"*": "elsewhere"}}.items():
        monkeypatch.setitem(task.app.conf, name, value)
        assert not has_one()
        monkeypatch.undo()
    assert has_one()


@pytest.mark.parametrize(
    "known",
    [{"PETIOLE_CONFIRM_REPLICAS": "1"}, {"PETIOLE_REDIS_URL": "redis://another:1"}],
    ids=["confirmed", "elsewhere"],
)
def test_where_the_settings_ask_for_more_celery_submits(
    tasks: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, known: dict[str, str]
) -> None:
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    settings.cache_clear()
    assert asyncio.run(letter(tasks["tasks.generate"], {"prompt": "x"}, {})) is None


def test_without_the_broker_there_is_none_for_now(server: RedisServer, tasks: Mapping[str, Any]) -> None:
    server.kill()

    async def ask() -> None:
        assert await letter(tasks["tasks.generate"], {"prompt": "x"}, {}) is None
        server.restart()
        assert await letter(tasks["tasks.generate"], {"prompt": "x"}, {}) is not None

    asyncio.run(ask())

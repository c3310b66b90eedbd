"""A request that cannot begin leaves nothing, however its steps overlap."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from petiole.gateway.core.caller import ANYBODY, ClientRequest, as_caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.serving import generations, records
from petiole.gateway.serving.auth import idempotency
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.streams.callback_reader import CallbackStream
from tests.support.site import RedisServer


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    settings.cache_clear()
    yield server
    settings.cache_clear()
    server.kill()


@pytest.mark.parametrize("by_celery", [False, True])
def test_a_subscription_that_is_refused_leaves_no_request(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, by_celery: bool
) -> None:
    """by_celery: the gateway cannot write this app's messages itself."""

    async def no_messages(_: Plan) -> None:
        return None

    if by_celery:
        monkeypatch.setattr(generations, "_messages", no_messages)

    async def refused(_: CallbackStream) -> None:
        raise redis.exceptions.NoPermissionError("SUBSCRIBE")

    monkeypatch.setattr(CallbackStream, "open", refused)
    record = RequestRecord(
        id="cmpl-1", kind="text_completion", created=0, model="m", tasks=["cmpl-1"], queue="petiole"
    )

    async def ask() -> None:
        with as_caller(ANYBODY, ClientRequest("/v1/completions", idempotency_key="mine")):
            with pytest.raises(Failure, match="NOPERM"):
                await generations.begin(Plan(record, [TaskCall("generate", {"prompt": "x"})]))
            # A round trip on the same connection: whatever was on its way has been carried out.
            await connections.async_streams().ping()
            with pytest.raises(Failure) as missing:
                await records.get("cmpl-1", "text_completion")
            assert missing.value.status == 404
            assert await idempotency.earlier("cmpl-2", "text_completion") is None

    asyncio.run(ask())


def test_a_redis_that_has_no_memory_left_is_a_503_that_names_it(server: RedisServer) -> None:
    record = RequestRecord(
        id="cmpl-1", kind="text_completion", created=0, model="m", tasks=["cmpl-1"], queue="petiole"
    )

    async def ask() -> None:
        with as_caller(ANYBODY, ClientRequest("/v1/completions")):
            await connections.async_streams().config_set("maxmemory", "1")
            with pytest.raises(Failure, match="maxmemory") as failed:
                await generations.begin(Plan(record, [TaskCall("generate", {"prompt": "x"})]))
            assert failed.value.status == 503

    asyncio.run(ask())

"""Of what is made at once as much stays as the tenant may have: neither more nor less."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.gateway.batches import files, jobs
from petiole.gateway.batches.files import File, FileExpiry
from petiole.gateway.core.caller import Caller, Limits, Tenant, as_caller
from petiole.gateway.core.failures import Failure
from petiole.tasks.fleet.usage import days
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.durable import records
from petiole.tasks.wire.keys import usage_keys
from tests.support.site import RedisServer

MOST, ASKED = 3, 8
UMBRELLA = Caller("umbrella", tenant=Tenant(limits=Limits(files=MOST, batches=MOST)))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setenv("PETIOLE_GATEWAY_FILES", str(tmp_path / "files"))
    settings.cache_clear()
    yield server
    server.kill()
    settings.cache_clear()


async def all_of(*made: Awaitable[Any]) -> list[str]:
    """The names of what was made; each of the others has met the limit."""
    done = await asyncio.gather(*made, return_exceptions=True)
    refused = [one for one in done if isinstance(one, BaseException)]
    assert all(isinstance(one, Failure) and one.code == "quota_exceeded" for one in refused), refused
    return [one.id for one in done if not isinstance(one, BaseException)]


def a_file() -> Awaitable[File]:
    return files.create(io.BytesIO(b"{}\n"), "in.jsonl", "batch", FileExpiry())


def test_of_files_and_batches_made_at_once_so_many_stay(server: RedisServer) -> None:
    async def at_once() -> None:
        made = await all_of(*(a_file() for _ in range(ASKED)))
        assert len(made) == MOST
        assert sorted(one.id for one in await files.listed()) == sorted(made)
        body = jobs.CreateBatch(input_file_id=made[0], endpoint="/v1/chat/completions", completion_window="24h")
        begun = await all_of(*(jobs.create(body) for _ in range(ASKED)))
        assert len(begun) == MOST
        assert [one.id for one in records.listed("umbrella")] == [one.id for one in reversed(await jobs.listed())]
        assert {one.id for one in await jobs.listed()} == {*begun}

    with as_caller(UMBRELLA):
        asyncio.run(at_once())


def test_no_batch_is_made_when_a_budget_is_used_up(server: RedisServer) -> None:
    async def refused() -> None:
        made = await a_file()
        body = jobs.CreateBatch(input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h")
        connections.streams().hset(usage_keys(days(1)[0])[1], '["initrode", "m"] output', 5)
        with pytest.raises(Failure, match="day_tokens: the tenant's budget must be at most 5 tokens, got 5"):
            await jobs.create(body)
        assert await jobs.listed() == []

    with as_caller(Caller("initrode", tenant=Tenant(limits=Limits(day_tokens=5)))):
        asyncio.run(refused())

"""A real redis-server that tests may kill and restart, and a writer that follows docs/streams.md to the letter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks import errors
from petiole.tasks.app.application import make_app
from petiole.tasks.servers import embedded
from petiole.tasks.settings import settings
from petiole.tasks.streams import protocol, readers
from petiole.tasks.streams.callback_reader import CallbackStream
from petiole.tasks.wire.keys import stream_keys
from tests.support.site import RedisServer


class Server(RedisServer):
    """One that keeps all it has answered for, however it ends; with a URL as redis-py has it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "--appendfsync", "always", binary=embedded.server_binary())

    @property
    def url(self) -> str:
        return f"unix://{self.socket}?db=0"


class Writer:
    """One attempt at a task, as a worker writes it."""

    def __init__(self, client: redis.Redis, task_id: str, attempt: int = 1, index: int = 0) -> None:
        self.client, self.task_id, self.attempt, self.index = client, task_id, attempt, index
        self.keys = stream_keys(task_id)

    def write(self, *token_ids: int, log: bool = True, publish: bool = True, **more: Any) -> str:
        message = json.dumps(
            {
                "task_id": self.task_id,
                "attempt": self.attempt,
                "index": self.index,
                "token_ids": token_ids,
                "text": "".join(f"<{token}>" for token in token_ids),
                "finish_reason": None,
                **more,
            }
        )
        self.index += len(token_ids)
        with self.client.pipeline(transaction=True) as pipe:
            if log:
                pipe.rpush(self.keys.log, message)
                pipe.expire(self.keys.log, 60)
            if publish:
                pipe.publish(self.keys.channel, message)
            pipe.execute()
        return message

    def finish(self, *token_ids: int, **more: Any) -> None:
        self.write(*token_ids, **{"finish_reason": "stop", **more})


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


@pytest.fixture
def server(session_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """The server that the settings name, empty and running."""
    if session_server.process.poll() is not None:
        session_server.start()
    monkeypatch.setenv("PETIOLE_BROKER_URL", f"redis+socket://{session_server.socket}")
    monkeypatch.delenv("PETIOLE_REDIS_URL", raising=False)
    monkeypatch.delenv("PETIOLE_RESULT_BACKEND", raising=False)
    settings.cache_clear()
    redis.Redis.from_url(session_server.url).flushall()
    yield session_server
    settings.cache_clear()


@pytest.fixture
def client(server: Server) -> redis.Redis:
    return redis.Redis.from_url(server.url)


@pytest.fixture
def app(server: Server) -> Celery:
    return make_app()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of silence passes at once."""
    monkeypatch.setattr(protocol, "SILENCE_S", 0.01)


Read = Callable[..., list[StreamDelta]]


@pytest.fixture(params=["stream", "astream", "handing"])
def read(request: pytest.FixtureRequest, app: Celery) -> Read:
    """Read a whole stream in each way. `during` is called when the reader has subscribed, and `between` after
    each delta."""

    def in_sync(
        task_id: str,
        during: Callable[[], None] = lambda: None,
        between: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> list[StreamDelta]:
        deltas = []
        with readers.Stream(task_id, app=app, **options) as reader:
            reader.open()
            during()
            for delta in reader:
                deltas.append(delta)
                between()
        return deltas

    async def in_asyncio(
        task_id: str,
        during: Callable[[], None] = lambda: None,
        between: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> list[StreamDelta]:
        reader, deltas = readers.AsyncStream(task_id, app=app, **options), []
        await reader.open()
        during()
        async for delta in reader:
            deltas.append(delta)
            between()
        return deltas

    async def handed(
        task_id: str,
        during: Callable[[], None] = lambda: None,
        between: Callable[[], None] = lambda: None,
        **options: Any,
    ) -> list[StreamDelta]:
        deltas: list[StreamDelta] = []

        def take(delta: StreamDelta) -> None:
            deltas.append(delta)
            between()

        reader = CallbackStream(task_id, take, app=app, **options)
        await reader.open()
        during()
        await reader.run()
        if (error := deltas[-1].error) is not None:  # other readers raise it
            outcome = app.AsyncResult(task_id).result
            raise outcome if isinstance(outcome, Exception) else errors.rebuild(error)
        return deltas

    if request.param == "stream":
        return in_sync
    in_a_loop = in_asyncio if request.param == "astream" else handed
    return lambda *arguments, **options: asyncio.run(in_a_loop(*arguments, **options))


def token_ids(deltas: list[StreamDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text(deltas: list[StreamDelta]) -> str:
    return "".join(delta.text for delta in deltas)

"""What Redis refuses is an answer in the form of the interface, and a line for the operator."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis
from websockets.sync.client import ClientConnection, connect

from petiole.gateway.core.caller import ANYBODY, ClientRequest, as_caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.gateway.http.application import app
from petiole.gateway.serving import generations, records, retry
from petiole.gateway.serving.auth import api_keys
from petiole.tasks.settings import settings
from petiole.tasks.submission.message_templates import PreparedMessage
from tests.support.gateway import Gateway
from tests.support.site import RedisServer, Site, eventually

SECRET = "s3cret-word"
MODEL = {"model": "petiole-tiny"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 2}
STREAMED = {**CHAT, "stream": True}
TEXT = {**MODEL, "input": "Hi.", "max_output_tokens": 2}
LINES = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
BATCH = {"input_file_id": f"file-{'a' * 24}", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
ASKED: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/chat/completions", {"json": CHAT}),
    ("POST", "/v1/chat/completions", {"json": STREAMED}),
    ("POST", "/v1/completions", {"json": {**MODEL, "prompt": "Hi.", "max_tokens": 2}}),
    ("POST", "/v1/messages", {"json": CHAT}),
    ("POST", "/v1/messages", {"json": STREAMED}),
    ("POST", "/v1/messages/count_tokens", {"json": {**MODEL, "messages": CHAT["messages"]}}),
    ("POST", "/v1/responses", {"json": TEXT}),
    ("POST", "/v1/responses", {"json": {**TEXT, "background": True}}),
    ("POST", "/v1/conversations", {"json": {}}),
    ("POST", "/tokenize", {"json": {**MODEL, "prompt": "Hi."}}),
    ("POST", "/v1/files", LINES),
    ("GET", "/v1/files", {}),
    ("GET", f"/v1/files/file-{'a' * 24}", {}),
    ("POST", "/v1/batches", {"json": BATCH}),
    ("GET", "/v1/batches", {}),
    ("POST", f"/v1/batches/batch_{'a' * 24}/cancel", {}),
    ("GET", "/v1/chat/completions/chatcmpl-1", {}),
    ("DELETE", "/v1/chat/completions/chatcmpl-1", {}),
    ("GET", "/v1/responses/resp_1", {}),
    ("GET", "/v1/models", {}),
    ("GET", "/v1/usage", {}),
    ("GET", "/v1/fleet", {}),
]
COMMANDS = (
    *("set", "get", "mget", "del", "exists", "hget", "hgetall", "hset", "lpush", "rpush", "lrange", "llen"),
    *("subscribe", "evalsha", "expire", "zadd", "zrange", "smembers", "scan"),
)


@pytest.fixture(scope="module")
def limited(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a user of its own, who may do all until a test takes something away."""
    allow(site.redis)
    known = {
        "PETIOLE_BROKER_URL": site.url.replace("redis+socket://", f"redis+socket://limited:{SECRET}@"),
        "PETIOLE_GATEWAY_FILES": tmp_path_factory.mktemp("files"),
    }
    with Gateway(tmp_path_factory.mktemp("limited"), **known) as gateway:
        assert gateway.url
        yield gateway
    site.redis.execute_command("ACL", "DELUSER", "limited")


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    """One for all requests: each client reads the certificates of all authorities."""
    with httpx2.Client(timeout=30) as client:
        yield client


def allow(client: redis.Redis, *rules: str) -> None:
    client.execute_command(
        "ACL", "SETUSER", "limited", "reset", "on", f">{SECRET}", "~*", "&*", "+@all", "-acl", *rules
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_the_gateway_may_not_run_is_no_raw_error_on_any_path(
    site: Site, limited: Gateway, http: httpx2.Client, command: str
) -> None:
    refused = 0
    for method, path, asked in ASKED:
        allow(site.redis, f"-{command}")
        try:
            headers = {"anthropic-version": "2023-06-01"} if "messages" in path else {}
            answer = http.request(method, f"{limited.root}{path}", headers=headers, **asked)
        finally:
            allow(site.redis)
        where = f"{method} {path} without {command}: {answer.status_code} {answer.text[:300]}"
        assert answer.status_code != 500, where
        if answer.status_code < 400:
            continue
        told = answer.json()["error"]
        if "messages" in path:
            assert answer.json()["type"] == "error", where
            assert told.keys() >= {"type", "message"}, where
        else:
            assert told.keys() == {"message", "type", "param", "code"}, where
        if answer.status_code == 503:
            refused += 1
            assert SECRET not in answer.text
            assert "petiole:" not in answer.text, where
    if command in ("set", "get", "lpush", "subscribe", "hgetall"):
        assert refused, "no path needs it"
        assert "NOPERM" in limited.output
    assert SECRET not in limited.output


@pytest.mark.parametrize("command", ["set", "lpush", "subscribe", "evalsha", "get"])
def test_a_websocket_says_it_and_serves_the_next_request(site: Site, limited: Gateway, command: str) -> None:
    frame = json.dumps({"type": "response.create", **TEXT})
    with connect(limited.url.replace("http", "ws") + "/responses", max_size=None) as socket:
        allow(site.redis, f"-{command}")
        try:
            socket.send(frame)
            told = until_the_end(socket)
        finally:
            allow(site.redis)
        if told["type"] == "error":
            assert told["status"] == 503, told
            assert SECRET not in json.dumps(told)
        socket.send(frame)
        assert until_the_end(socket)["type"] == "response.incomplete", "its tokens are few"


def until_the_end(socket: ClientConnection) -> dict[str, Any]:
    while True:
        told: dict[str, Any] = json.loads(socket.recv(timeout=30))
        if told["type"] in ("error", "response.completed", "response.failed", "response.incomplete"):
            return told


# ---------------------------------------------------------------- in this process


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setattr(retry, "WAIT_S", 0.3)
    monkeypatch.setattr(generations, "_messages", messages)  # Celery's app may be another server's in this process
    retry._told_at.clear()
    settings.cache_clear()
    yield server
    settings.cache_clear()
    server.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield client


async def messages(plan: Plan) -> list[PreparedMessage]:
    return [PreparedMessage("petiole", f'{{"headers": {{"id": "{task}"', "}}") for task in plan.record.tasks]


def begun() -> Failure:
    """How a request fails. Nothing of it is left."""
    name = "cmpl-1"
    record = RequestRecord(id=name, kind="text_completion", created=0, model="m", tasks=[name], queue="petiole")

    async def ask() -> Failure:
        with as_caller(ANYBODY, ClientRequest("/v1/completions")), pytest.raises(Failure) as failed:
            await generations.begin(Plan(record, [TaskCall("generate", {"prompt": "x"})]))
        return failed.value

    return asyncio.run(ask())


def got(path: str, **headers: str) -> tuple[int, Any]:
    """What the application answers."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({**scope, "headers": raw, "client": None}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_queue_that_is_no_list_is_a_503_and_leaves_nothing(server: RedisServer, client: redis.Redis) -> None:
    client.set("petiole", "somebody else's")
    failure = begun()
    assert (failure.status, failure.code, failure.retry_after_s) == (503, "redis_refused", None), failure.message
    assert "WRONGTYPE" in failure.message
    assert not client.exists("petiole:gateway:cmpl-1")


@pytest.mark.parametrize("anthropic", [False, True])
def test_keys_that_are_no_hash_are_a_503_before_any_path(
    server: RedisServer, client: redis.Redis, anthropic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client.set(api_keys.KEYS, "somebody else's")
    key = "ptl-" + "k" * 43
    with caplog.at_level(logging.ERROR, "petiole.gateway"):
        for _ in range(3):
            told = {"anthropic_version": "2023-06-01"} if anthropic else {}
            status, answer = got("/v1/models", x_api_key=key, **told)
            assert status == 503
            assert "WRONGTYPE" in answer["error"]["message"]
            assert ("code" in answer["error"]) != anthropic
    lines = [one.getMessage() for one in caplog.records if "WRONGTYPE" in one.getMessage()]
    assert len(lines) == 1, "once in a while for each word"
    assert key not in caplog.text


def test_a_replica_is_waited_for_and_named(server: RedisServer, client: redis.Redis) -> None:
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    failure = begun()
    assert (failure.status, failure.code) == (503, "unavailable"), failure.message
    assert failure.retry_after_s


def test_a_redis_that_lacks_replicas_is_named(server: RedisServer, client: redis.Redis) -> None:
    client.config_set("min-replicas-to-write", 1)
    failure = begun()
    assert (failure.status, failure.code) == (503, "unavailable")
    assert "NOREPLICAS" in failure.message
    client.config_set("min-replicas-to-write", 0)


def test_a_redis_that_runs_a_long_script_is_waited_for(server: RedisServer, client: redis.Redis) -> None:
    client.config_set("lua-time-limit", 5)

    def script() -> None:
        with redis.Redis(unix_socket_path=str(server.socket)) as own, pytest.raises(redis.RedisError):
            own.eval("while true do end", 0)

    running = threading.Thread(target=script)
    running.start()
    eventually(lambda: busy(client), "Redis is busy")
    failure = begun()
    assert failure.status == 503
    assert failure.retry_after_s
    client.script_kill()
    running.join()


def busy(client: redis.Redis) -> bool:
    try:
        client.get("x")
    except redis.ResponseError:
        return True
    return False


def test_a_redis_that_knows_no_such_user_is_named(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.url.replace("redis+socket://", f"redis+socket://nobody:{SECRET}@")
    monkeypatch.setenv("PETIOLE_BROKER_URL", url)
    settings.cache_clear()

    async def ask() -> Failure:
        with pytest.raises(Failure) as failed:
            await records.get("cmpl-1", "text_completion")
        return failed.value

    failure = asyncio.run(ask())
    assert (failure.status, failure.code) == (503, "redis_refused"), failure.message
    assert "NOAUTH" in failure.message


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (redis.exceptions.NoPermissionError("this user has no permissions to run the 'set' command"), "NOPERM"),
        (
            redis.ResponseError("ACL failure in script: User x has no permissions to run the 'get' command"),
            "NOPERM",
        ),
        (
            redis.ResponseError(
                "Error running script (call to f_1): @user_script:7: The user executing the script can't run this "
                "command or subcommand"
            ),
            "NOPERM",
        ),
        (redis.ResponseError("@user_script:1: WRONGTYPE Operation against a key"), "WRONGTYPE"),
        (redis.ResponseError("value is not an integer or out of range"), "WRONGTYPE"),
        (redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "MISCONF"),
        (redis.ResponseError("@user_script:1: -OOM command not allowed"), "OOM"),
        (redis.exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "OOM"),
        (redis.exceptions.ReadOnlyError("You can't write against a read only replica."), "READONLY"),
        (redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "LOADING"),
        (redis.ResponseError("BUSY Redis is busy running a script."), "BUSY"),
        (redis.exceptions.NoScriptError("No matching script."), "NOSCRIPT"),
        (redis.ResponseError("CLUSTERDOWN The cluster is down"), "CLUSTERDOWN"),
        (redis.exceptions.AuthenticationError("invalid username-password pair"), "NOAUTH"),
        (redis.ResponseError("unknown command 'evalsha', with args beginning with: 'a' 'secret'"), "ERR"),
    ],
)
def test_a_refusal_has_redis_s_own_word(
    error: redis.RedisError, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    retry._told_at.clear()
    with caplog.at_level(logging.ERROR, "petiole.gateway"):
        failure = retry.refused(error)
    assert failure.status == 503
    assert failure.message.count(f"({word})") == 1
    assert word in caplog.text
    assert "secret" not in caplog.text

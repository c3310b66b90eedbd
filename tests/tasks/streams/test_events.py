"""A stream as server-sent events: whole wherever a client was cut off, in each framework."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import given, strategies as st

from petiole.tasks import InvalidRequest, StreamDelta, Unavailable, UnknownTask, asse, sse
from petiole.tasks.servers import connections
from petiole.tasks.streams import protocol
from petiole.tasks.streams.events import ALIVE, END, Events
from petiole.tasks.wire.keys import stream_keys
from tests.support.site import eventually
from tests.tasks.streams.conftest import Server, Writer

Ask = Callable[..., list[bytes]]


@pytest.fixture(params=["sse", "asse"])
def ask(request: pytest.FixtureRequest) -> Ask:
    async def in_asyncio(*arguments: Any, **options: Any) -> list[bytes]:
        return [event async for event in await asse(*arguments, **options)]

    if request.param == "sse":
        return lambda *arguments, **options: list(sse(*arguments, **options))
    return lambda *arguments, **options: asyncio.run(in_asyncio(*arguments, **options))


@pytest.fixture
def writer(client: redis.Redis) -> Writer:
    client.hset(stream_keys("t").state, "attempt", 1)
    return Writer(client, "t")


def parsed(events: list[bytes]) -> list[dict[str, str]]:
    """As a browser reads them, without comments."""
    found = []
    for event in b"".join(events).decode().split("\n\n"):
        lines = [line.split(": ", 1) for line in event.split("\n") if line and not line.startswith(":")]
        if lines:
            found.append(dict(lines))
    return found


def test_an_event_is_a_delta_and_its_id_the_tokens_so_far(ask: Ask, writer: Writer) -> None:
    writer.write(7, 8)
    writer.finish(9)
    first, last, end = parsed(ask("t"))
    assert (first["id"], last["id"]) == ("2", "3.end")
    assert json.loads(first["data"]) == {"attempt": 1, "index": 0, "token_ids": [7, 8], "text": "<7><8>"}
    assert json.loads(last["data"])["finish_reason"] == "stop"
    assert end == {"event": "end", "data": "{}"}


def test_a_client_that_comes_back_gets_each_delta_once(ask: Ask, writer: Writer) -> None:
    for token in range(5):
        writer.write(token, token)
    writer.finish(text="held back")
    whole = parsed(ask("t"))
    for n, event in enumerate(whole[:-1]):
        assert parsed(ask("t", event["id"])) == whole[n + 1 :]


def test_a_parsed_stream_goes_on_after_the_last_event_too(ask: Ask, writer: Writer, client: redis.Redis) -> None:
    for token in range(5):
        writer.write(token)
    writer.finish(5)
    whole = parsed(ask("t", parsed=True))
    assert "".join(json.loads(event["data"]).get("content", "") for event in whole) == "<0><1><2><3><4><5>"
    for n, event in enumerate(whole[:-1]):
        assert parsed(ask("t", event["id"], parsed=True)) == whole[n + 1 :]


def test_an_unknown_task_is_refused_before_the_first_event(ask: Ask, server: Any) -> None:
    with pytest.raises(UnknownTask, match="task nobody's: Redis has nothing of it"):
        ask("nobody's")


def test_without_redis_it_is_unavailable_before_the_first_event(ask: Ask, server: Server) -> None:
    server.kill()
    for task in ("t", "nobody's"):
        with pytest.raises(Unavailable, match=re.escape(server.socket.name)) as raised:
            ask(task)
        assert isinstance(raised.value.__cause__, connections.LOST)


@pytest.mark.parametrize("last_event_id", ["x", "-1", "1.5", "end", ".end", "٣", "9" * 16, "0" * 20 + "9" * 5000])
def test_an_id_of_no_event_is_refused_by_name(ask: Ask, last_event_id: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID: must be the id of an event of this stream, got"):
        ask("t", last_event_id)


def test_a_failed_task_is_an_event(ask: Ask, writer: Writer, app: Any) -> None:
    writer.write(1)
    error = {"type": "GenerationFailed", "message": "no more paper", "args": ["no more paper"]}
    writer.finish(finish_reason="error", error=error)
    *_, failed, end = parsed(ask("t"))
    assert (failed["event"], end["event"]) == ("failed", "end")
    assert json.loads(failed["data"]) == {"error": "no more paper", "type": "GenerationFailed"}


def test_if_only_the_reader_fails_the_client_may_ask_again(
    ask: Ask, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SILENCE_S", 0.01)
    writer.write(1)
    events = ask("t", timeout_s=0.05, heartbeat_s=0.01)
    assert [event["id"] for event in parsed(events)] == ["1"]
    assert ALIVE in events
    assert END not in events
    assert b"" not in events


def test_the_reader_is_closed_when_its_client_leaves(writer: Writer, client: redis.Redis) -> None:
    writer.write(1)
    events = sse("t")
    next(events)
    assert client.pubsub_numsub(stream_keys("t").channel)[0][1] == 1
    events.close()  # type: ignore[attr-defined]
    eventually(lambda: client.pubsub_numsub(stream_keys("t").channel)[0][1] == 0)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_events_after_any_event_are_the_rest(sizes: list[int], data: st.DataObject) -> None:
    deltas, index = [], 0
    for size in sizes:
        deltas.append(StreamDelta(task_id="t", attempt=1, index=index, token_ids=[1] * size, text="x"))
        index += size
    whole = [Events(None, parsed=True).of(delta) for delta in deltas]
    cut = data.draw(st.integers(0, len(deltas) - 1))
    again = Events(str(deltas[cut].end), parsed=True)
    assert [out for delta in deltas if (out := again.of(delta))] == whole[cut + 1 :]

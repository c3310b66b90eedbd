"""A reader begins at a token, whatever the log's deltas are. It gets what announces the task before its tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from hypothesis import given, strategies as st

from petiole.contract.results.outputs import Prepared
from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.errors import StreamExpired
from petiole.tasks.streams.protocol import PROBES, StreamProtocol
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record import codec
from tests.tasks.streams.conftest import Read, Writer, text, token_ids

KEYS = stream_keys("t")


def announce(client: redis.Redis, attempt: int = 1, model: str = "m", publish: bool = True) -> None:
    """As `publish.lua` does."""
    delta = codec.announced(codec.opening("t", attempt), Prepared(model, "f", 5, "<think>\n"))
    client.hset(KEYS.state, "prepared", delta)
    if publish:
        client.publish(KEYS.channel, delta)


# ------------------------------------------------------------ from a token on


@pytest.mark.parametrize("start", range(7))
def test_a_reader_begins_at_a_token(read: Read, client: redis.Redis, start: int) -> None:
    writer = Writer(client, "t")
    writer.write(0, 1)
    writer.write(2)
    writer.write(3, 4, 5)
    writer.finish()
    deltas = read("t", start=start)
    assert token_ids(deltas) == list(range(start, 6))
    assert deltas[-1].finish_reason == "stop"
    begins = max(first for first in (0, 2, 3, 6) if first <= start)  # the text of a delta is not cut
    if start != 1 and start < 6:
        assert text(deltas) == "".join(f"<{token}>" for token in range(begins, 6))


@pytest.mark.parametrize("start", [2, 5])
def test_a_reader_waits_for_its_first_token(read: Read, client: redis.Redis, start: int) -> None:
    writer = Writer(client, "t")
    writer.write(0, 1)

    def write() -> None:
        for token in range(2, 8):
            writer.write(token)
        writer.finish(8)

    deltas = read("t", during=write, start=start)
    assert token_ids(deltas) == list(range(start, 9))
    assert text(deltas) == "".join(f"<{token}>" for token in range(start, 9))


def test_a_reader_that_begins_behind_the_end_gets_the_end(read: Read, client: redis.Redis) -> None:
    Writer(client, "t").finish(0, 1)
    deltas = read("t", start=50)
    assert [(delta.token_ids, delta.text, delta.finish_reason) for delta in deltas] == [([], "", "stop")]


def test_a_log_that_is_begun_anew_is_read_from_where_the_reader_was(
    read: Read, client: redis.Redis, impatient: None
) -> None:
    writer = Writer(client, "t")
    for token in range(6):
        writer.write(token)

    def restart() -> None:
        if writer.index == 6:
            client.delete(KEYS.log)
            again = Writer(client, "t", attempt=2)
            again.write(0, 1, 2, publish=False)
            again.write(3, 4, publish=False)
            again.write(5, publish=False)
            again.finish(6)
            writer.index = 7

    assert token_ids(read("t", start=4, between=restart)) == [4, 5, 6]


@given(st.lists(st.integers(1, 3), max_size=300), st.integers(0, 1000))
def test_the_entry_of_a_token_is_found_without_reading_the_log(lengths: list[int], token: int) -> None:
    log: list[StreamDelta] = []
    for n in lengths:
        index = log[-1].end if log else 0
        log.append(StreamDelta(task_id="t", attempt=1, index=index, token_ids=[7] * n, text="x"))
    following, asked = StreamProtocol("t", None, start=token), 0
    seeking = following.seek(token)
    reply: Any = None
    try:
        while True:
            name, places = seeking.send(reply)
            assert name == "read_entries"
            asked += len(places)
            reply = [*([log[place].model_dump_json().encode()] for place in places), len(log)]
    except StopIteration:
        pass
    position = following.assembler.position
    assert position.entries == max((k for k, delta in enumerate(log) if delta.index <= token), default=0)
    assert position.index == (log[position.entries].index if log else 0)
    assert asked <= 4 * PROBES
    assert following.begun


def test_what_is_before_a_number_cannot_be_read(client: redis.Redis) -> None:
    with pytest.raises(ValueError, match="start: must be at least 0, got -1"):
        StreamProtocol("t", None, start=-1)


def test_a_result_has_no_text_of_a_token(client: redis.Redis) -> None:
    usage = {"prompt_tokens": 1, "cached_prompt_tokens": 0, "completion_tokens": 3}
    timing = {"queue_ms": 0, "prefill_ms": 0, "ttft_ms": None, "total_ms": 0}
    end = {"finish_reason": "stop", "stop_reason": "eos", "usage": usage, "timing": timing, "model": "m"}
    result = {"text": "abc", "token_ids": [1, 2, 3], "attempt": 1, **end}
    [last] = StreamProtocol("t", None, start=3).end_as("SUCCESS", result)
    assert (last.token_ids, last.text, last.usage.completion_tokens) == ([], "", 3)
    with pytest.raises(StreamExpired, match="before token 1"):
        next(StreamProtocol("t", None, start=1).end_as("SUCCESS", result))


# ------------------------------------------------------------ what announces a task


def events(deltas: list[StreamDelta]) -> list[tuple[int, str | list[int]]]:
    return [(delta.attempt, delta.prepared.model if delta.prepared else delta.token_ids) for delta in deltas]


def test_a_task_is_announced_before_its_first_token(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")

    def write() -> None:
        announce(client)
        writer.write(1)
        writer.finish(2)

    deltas = read("t", during=write, prepared=True)
    assert events(deltas) == [(1, "m"), (1, [1]), (1, [2])]
    assert deltas[0].prepared == Prepared("m", "f", 5, "<think>\n")
    assert (deltas[0].index, deltas[0].text, deltas[0].is_heartbeat) == (0, "", False)


@pytest.mark.parametrize("start", [0, 1])
def test_a_late_reader_gets_the_announcement_from_the_state(read: Read, client: redis.Redis, start: int) -> None:
    announce(client)
    writer = Writer(client, "t")
    writer.write(1)
    writer.finish(2)
    assert events(read("t", prepared=True, start=start))[0] == (1, "m")


def test_an_announcement_that_was_missed_comes_before_the_first_token(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")

    def write() -> None:
        announce(client, publish=False)
        writer.write(1)
        writer.finish(2)

    assert events(read("t", during=write, prepared=True)) == [(1, "m"), (1, [1]), (1, [2])]


def test_a_later_attempt_announces_the_task_anew(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t", attempt=2)
    announce(client)

    def write() -> None:
        if not writer.index:
            announce(client, attempt=2, model="another")
            writer.write(1)
            writer.finish(2)

    assert events(read("t", between=write, prepared=True)) == [(1, "m"), (2, "another"), (2, [1]), (2, [2])]


def test_what_announced_another_attempt_is_not_that_of_these_tokens(read: Read, client: redis.Redis) -> None:
    announce(client)
    Writer(client, "t", attempt=2).finish(1)
    assert events(read("t", prepared=True)) == [(2, [1])]


def test_a_refusal_comes_instead_of_the_announcement(read: Read, client: redis.Redis) -> None:
    error = {"type": "GenerationFailed", "message": "no", "args": ["no"]}
    Writer(client, "t").finish(finish_reason="error", error=error)
    deltas: list[StreamDelta] = []
    with pytest.raises(Exception, match="no"):
        read("t", prepared=True, between=lambda: deltas.append)
    assert deltas == []


def test_a_reader_that_does_not_ask_gets_no_announcement(read: Read, client: redis.Redis) -> None:
    writer = Writer(client, "t")

    def write() -> None:
        announce(client)
        writer.write(1)
        announce(client)
        writer.finish(2)

    assert events(read("t", during=write)) == [(1, [1]), (1, [2])]
    assert json.loads(client.hget(KEYS.state, "prepared"))["index"] == -1

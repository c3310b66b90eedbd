"""Streams on their way to Redis: every token once, in order, by one attempt at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st

from petiole.contract.results.outputs import Prepared
from petiole.contract.results.task_result import StreamDelta
from petiole.gpu_worker.request import Delta, FinishReason, TokenLogprobs
from petiole.tasks.wire.headers import Account
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker.output import publisher as module
from petiole.tasks.worker.output.publisher import Outbox, Publisher
from tests.support.publishing import END, KEYS, TASK, Flaky, Heard, attempt, begin, log, written


def test_a_connection_that_was_closed_while_it_was_idle_is_made_anew_without_a_word(
    publisher: Publisher, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    stream, _ = attempt(publisher, client)
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    client.client_kill_filter(_type="normal", skipme=True)  # as a server's `timeout` or a proxy does
    stream.push(Delta(1, (2,), "b"))
    publisher.flush([stream])
    assert (written(client), publisher.behind_s, caplog.records) == ([1, 2], 0.0, [])


def test_a_delta_has_the_fields_of_the_wire_format(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.push(Delta(0, (5,), 'é"\n'))
    publisher.flush([stream])
    assert log(client) == [
        {"task_id": TASK, "attempt": 1, "index": 0, "token_ids": [5], "text": 'é"\n', "finish_reason": None}
    ]


def test_pieces_between_two_flushes_become_one_delta(publisher: Publisher, client: redis.Redis) -> None:
    stream, heard = attempt(publisher, client)
    for i in range(5):
        stream.push(Delta(i, (i,), f"{i} "))
    stream.finish(END)
    publisher.flush([stream])
    (delta,) = log(client)
    assert (delta["token_ids"], delta["text"]) == ([0, 1, 2, 3, 4], "0 1 2 3 4 ")
    assert (delta["finish_reason"], delta["stop_reason"]) == ("length", "max_tokens")
    assert heard.words == ["finished"]


def test_logprobs_and_values_travel_with_their_tokens(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.push(Delta(0, (1,), "a", None, (TokenLogprobs(1, -0.5, ((7, -1.0),)),), ((0.25,),)))
    stream.push(Delta(1, (2,), "b", None, (TokenLogprobs(2, -1.5, []),)))
    publisher.flush([stream])
    (delta,) = log(client)
    assert [entry["token_id"] for entry in delta["logprobs"]] == [1, 2]
    assert delta["logprobs"][0]["top"] == [[7, -1.0]]
    assert delta["values"] == [[0.25], None]


def test_bins_are_read_back_from_the_log(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.push(Delta(0, (5, 1), "", None, None, ((0.25,), ()), ((256,), ())))
    publisher.flush([stream])
    stream.push(Delta(2, (6,), "", None, None, ((0.5, 0.5),), ((921, 921),)))
    stream.push(Delta(3, (7,), "b"))
    publisher.flush([stream])
    entries = client.lrange(KEYS.log, 0, -1)
    assert [json.loads(entry)["bins"] for entry in entries] == [[[256], None], [[921, 921], None]]
    assert LoggedOutput.of(entries).entries("bins") == [[256], None, [921, 921], None]


def test_a_log_of_text_has_no_bins(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.push(Delta(0, (5, 1), "ab"))
    publisher.flush([stream])
    entries = client.lrange(KEYS.log, 0, -1)
    assert "bins" not in json.loads(entries[0])
    assert LoggedOutput.of(entries).entries("bins") == []


def test_an_older_attempt_cannot_write_and_is_told(publisher: Publisher, client: redis.Redis) -> None:
    old, old_heard = attempt(publisher, client)
    old.push(Delta(0, (1,), "a"))
    publisher.flush([old])
    new, new_heard = attempt(publisher, client)
    old.push(Delta(1, (2,), "zombie"))
    old.finish(END)
    new.push(Delta(1, (2,), "b"))
    new.finish(END)
    publisher.flush([old, new])
    assert (old_heard.words, new_heard.words) == (["stale"], ["finished"])
    assert [delta["text"] for delta in log(client)] == ["a", "b"]


def test_an_error_after_a_call_fails_its_task_but_ends_the_worker_if_the_end_is_written(
    publisher: Publisher, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In between, the task would neither run nor be completed for as long as this worker lives."""

    def broken(*_: object) -> None:
        raise OSError("not one of Redis'")

    stream, heard = attempt(publisher, client)
    stream.push(Delta(0, (1,), "a"))
    with monkeypatch.context() as patched:
        patched.setattr(publisher, "_done", broken)
        publisher.flush([stream])
    assert heard.words == ["OSError"]
    stream, heard = attempt(publisher, client)
    monkeypatch.setattr(heard, "on_finished", broken)
    stream.finish(END)
    with pytest.raises(RuntimeError, match="its job does not know its end"):
        publisher.flush([stream])


def test_a_call_whose_reply_was_lost_is_repeated_without_harm(publisher: Publisher, client: redis.Redis) -> None:
    stream, heard = attempt(publisher, client)
    lost = Flaky(publisher._pipe, ["after"])
    publisher._pipe = lost  # type: ignore[assignment]
    stream.push(Delta(0, (1, 2), "ab"))
    publisher.flush([stream])
    stream.push(Delta(2, (3,), "c"))
    publisher.flush([stream])
    publisher.flush([stream])
    assert written(client) == [1, 2, 3]
    lost.faults.append("after")
    stream.finish(END)
    publisher.flush([stream])
    assert heard.words == []
    publisher.flush([stream])
    assert heard.words == ["finished"]
    assert len([delta for delta in log(client) if delta["finish_reason"]]) == 1


def test_what_redis_has_forgotten_is_sent_again(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    client.flushall()
    stream.push(Delta(1, (2,), "b"))
    publisher.flush([stream])
    publisher.flush([stream])
    assert written(client) == [1, 2]
    assert client.ttl(KEYS.log) > 0
    assert client.ttl(KEYS.state) > 0


def test_what_earlier_attempts_wrote_is_sent_again_too(publisher: Publisher, client: redis.Redis) -> None:
    first, _ = attempt(publisher, client)
    first.push(Delta(0, (1, 2), "ab"))
    publisher.flush([first])
    second, _ = attempt(publisher, client)
    client.flushall()
    second.push(Delta(2, (3,), "c"))
    publisher.flush([second])
    publisher.flush([second])
    assert written(client) == [1, 2, 3]


def test_a_failover_may_cost_the_log_the_end_of_an_earlier_attempt(
    publisher: Publisher, client: redis.Redis
) -> None:
    first, _ = attempt(publisher, client)
    for start in (0, 2):
        first.push(Delta(start, (start, start + 1), "ab"))
        publisher.flush([first])
    second, heard = attempt(publisher, client)
    client.rpop(KEYS.log)
    second.push(Delta(4, (4,), "c"))
    second.finish(END)
    publisher.flush([second])
    publisher.flush([second])
    assert heard.words == ["finished"]
    assert written(client) == [0, 1, 2, 3, 4]


def test_the_cancel_flag_reaches_the_listener(publisher: Publisher, client: redis.Redis) -> None:
    stream, heard = attempt(publisher, client)
    client.hset(KEYS.asked, "cancel", 1)
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    assert heard.words == ["flagged"]
    assert begin(client).cancel


def test_a_stream_that_nobody_reads_is_cancelled_after_a_grace(
    publisher: Publisher, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTEREST_TTL_S", 0)
    monkeypatch.setattr(module, "LOOK_S", 0)
    stream, heard = attempt(publisher, client, needs_reader=True)
    client.set(KEYS.interest, 1)
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    assert heard.words == []
    client.delete(KEYS.interest)
    stream.push(Delta(1, (2,), "b"))
    publisher.flush([stream])
    assert heard.words == ["unread"]


@pytest.fixture
def running(client: redis.Redis) -> Iterator[Publisher]:
    publisher = Publisher(client, ttl_s=60)
    publisher.start()
    yield publisher
    publisher.close()


def test_what_comes_is_flushed_at_once_and_the_last_piece_with_the_end(
    running: Publisher, client: redis.Redis
) -> None:
    listening = client.pubsub(ignore_subscribe_messages=True)
    listening.subscribe(KEYS.channel)
    listening.get_message(timeout=1)
    stream, heard = attempt(running, client)
    stream.push(Delta(0, (1,), "first"))
    message = listening.get_message(timeout=10)
    assert message is not None
    assert json.loads(message["data"])["text"] == "first"
    stream.push(Delta(1, (2,), "last", FinishReason.LENGTH))
    assert running._dirty == {}
    stream.finish(END)
    assert heard.any.wait(10)
    ends = [(delta["text"], delta["finish_reason"]) for delta in log(client)]
    assert ends == [("first", None), ("last", "length")]


def test_closing_flushes_what_is_there(client: redis.Redis) -> None:
    publisher = Publisher(client, ttl_s=60)
    publisher.start()
    stream, _ = attempt(publisher, client)
    for i in range(3):
        stream.push(Delta(i, (i,), "x"))
    publisher.close()
    assert written(client) == [0, 1, 2]


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.lists(st.integers(1, 4), max_size=4),
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=12),
    flush_after=st.sets(st.integers(0, 11)),
    take_over_after=st.sets(st.integers(0, 11), max_size=3),
    faults=st.lists(st.sampled_from(["", "before", "after"]), max_size=12),
    forget_after=st.sets(st.integers(0, 11), max_size=1),
)
def test_the_log_is_the_output_whatever_fails(
    client: redis.Redis,
    prompt: list[int],
    lengths: list[int],
    flush_after: set[int],
    take_over_after: set[int],
    faults: list[str],
    forget_after: set[int],
) -> None:
    """Calls fail before or after they happen, Redis forgets, workers take over: no token twice, none missing."""
    client.flushall()
    publisher = Publisher(client, ttl_s=60)
    publisher._pipe = Flaky(publisher._pipe, faults)  # type: ignore[assignment]
    stream, heard = attempt(publisher, client)
    begin = total = -sum(prompt)
    for step, length in enumerate([*prompt, *lengths]):
        text = "" if total < 0 else "x" * length
        length = min(length, -total) if total < 0 else length
        stream.push(Delta(total, tuple(range(total, total + length)), text))
        total += length
        if step in flush_after:
            publisher.flush([stream])
        if step in forget_after and step not in take_over_after:
            client.flushall()
        if step in take_over_after:
            stream, heard = attempt(publisher, client)
            total = stream.end if stream.pieces else begin
    stream.finish(END)
    for _ in range(len(faults) + len(prompt) + 4):
        publisher.flush([stream])
    publisher._pipe.close()
    assert heard.words == ["finished"]
    assert [token for delta in log(client) for token in delta["token_ids"]] == list(range(begin, total))
    assert "".join(delta["text"] for delta in log(client)) == "x" * max(0, total)
    of_prompt = [delta for delta in log(client) if delta["index"] < 0]
    assert all(
        len(delta["token_ids"]) <= 4 and delta["finish_reason"] is None for delta in of_prompt if total >= 0
    )
    assert [delta["index"] for delta in log(client) if "after_prompt" in delta] == [0] * (begin < 0 <= total)


def test_a_log_that_ends_inside_a_piece_is_left_for_a_new_attempt(
    publisher: Publisher, client: redis.Redis
) -> None:
    stream, heard = attempt(publisher, client)
    stream.push(Delta(0, (1, 2, 3), "abc"))
    publisher.flush([stream])
    client.delete(KEYS.log)
    client.rpush(KEYS.log, json.dumps({"index": 0, "token_ids": [1, 2]}))
    client.rpush(KEYS.log, json.dumps({"index": 1, "token_ids": [2]}))
    stream.push(Delta(3, (4,), "d"))
    publisher.flush([stream])
    assert heard.words == ["given up"]


# ------------------------------------------------------------ what announces a task


def prepared(client: redis.Redis) -> tuple[int, str] | None:
    announced = client.hget(KEYS.state, "prepared")
    if announced is None:
        return None
    delta = StreamDelta.model_validate_json(announced)
    assert delta.prepared is not None
    return delta.attempt, delta.prepared.model


def test_a_task_is_announced_without_an_entry_in_its_log(publisher: Publisher, client: redis.Redis) -> None:
    stream, heard = attempt(publisher, client)
    with client.pubsub() as channel:
        channel.subscribe(KEYS.channel)
        stream.prepare(Prepared("m", "f", 5, "end"))
        publisher.flush([stream])
        stream.push(Delta(0, (1,), "a"))
        publisher.flush([stream])
        stream.push(Delta(1, (2,), "b"))
        publisher.flush([stream])
        published = [json.loads(message["data"]) for message in received(channel, 3)]
    assert [(delta["index"], delta["token_ids"]) for delta in published] == [(-1, []), (0, [1]), (1, [2])]
    assert (written(client), prepared(client), heard.words) == ([1, 2], (1, "m"), [])
    assert client.ttl(KEYS.state) > 0


def received(channel: Any, n: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < n:
        message = channel.get_message(ignore_subscribe_messages=True, timeout=5)
        found += [message] if message else []
    return found


def test_with_the_first_token_in_one_call_it_is_announced_first(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.prepare(Prepared("m", "f", 5, "end"))
    stream.admit("an adapter")
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    assert (written(client), prepared(client)) == ([1], (1, "m"))
    assert client.hget(KEYS.state, "adapter") == b"an adapter"


def test_an_attempt_replaces_the_announcement_while_the_log_is_empty(
    publisher: Publisher, client: redis.Redis
) -> None:
    for number, model in enumerate(("a", "b"), 1):
        stream, _ = attempt(publisher, client)
        stream.prepare(Prepared(model, model, 5, "end"))
        publisher.flush([stream])
        assert prepared(client) == (number, model)
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    later, _ = attempt(publisher, client)
    later.entries = 0  # it does not know of the log: the script does
    later.prepare(Prepared("c", "c", 5, "end"))
    publisher.flush([later])
    assert prepared(client) == (2, "b")


def test_an_older_attempt_announces_nothing(publisher: Publisher, client: redis.Redis) -> None:
    old, heard = attempt(publisher, client)
    attempt(publisher, client)
    old.prepare(Prepared("old", "old", 5, "end"))
    publisher.flush([old])
    assert (prepared(client), heard.words) == (None, ["stale"])


def test_if_redis_loses_log_and_state_the_task_is_announced_again(
    publisher: Publisher, client: redis.Redis
) -> None:
    stream, _ = attempt(publisher, client)
    stream.prepare(Prepared("m", "f", 5, "end"))
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    client.flushall()
    stream.push(Delta(1, (2,), "b"))
    publisher.flush([stream])
    publisher.flush([stream])
    assert (written(client), prepared(client)) == ([1, 2], (1, "m"))


def test_a_retry_of_celery_forgets_the_announcement(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.prepare(Prepared("m", "f", 5, "end"))
    publisher.flush([stream])
    begin(client, retries=1)
    assert prepared(client) is None


def test_output_that_cannot_be_encoded_fails_its_own_task(publisher: Publisher, client: redis.Redis) -> None:
    """The gate lets no such tenant through. It ended the publisher, and so the worker."""
    good, heard_good = attempt(publisher, client)
    bad, heard_bad = (
        Outbox(publisher, "other", 1, LoggedOutput.of([]), heard := Heard(), account=Account("\ud800")),
        heard,
    )
    for stream in (bad, good):
        stream.push(Delta(0, (1,), "a"))
        stream.finish(END)
    publisher.flush([bad, good, bad])
    assert heard_good.words == ["finished"]
    assert heard_bad.words == ["UnicodeEncodeError"]
    assert written(client) == [1]


def test_a_call_that_redis_refuses_for_one_task_fails_that_one(
    publisher: Publisher, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, heard_good = attempt(publisher, client)
    bad, heard_bad = Outbox(publisher, "other", 1, LoggedOutput.of([]), heard := Heard()), heard
    monkeypatch.setattr(publisher, "_pipe", Refusing(publisher._pipe))
    for stream in (bad, good):
        stream.push(Delta(0, (1,), "a"))
        stream.finish(END)
    publisher.flush([bad, good])
    assert (heard_good.words, heard_bad.words) == (["finished"], ["ResponseError"])
    assert (written(client), publisher.behind_s) == ([1], 0.0)


class Refusing:
    """A pipe whose server refuses every call with this key."""

    def __init__(self, pipe: Any) -> None:
        self.pipe = pipe

    def send(self, keys: Any, args: Any) -> None:
        if any(b"other" in key for key in keys):
            raise redis.ResponseError("ERR user_script:1: bad argument script: x, on @user_script:1.")
        self.pipe.send(keys, args)

    def receive(self) -> Any:
        return self.pipe.receive()

    def close(self) -> None:
        self.pipe.close()

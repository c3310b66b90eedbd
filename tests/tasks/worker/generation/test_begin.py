"""What a delivery finds of earlier ones: the script that begins attempts, after others have published."""

from __future__ import annotations

import pytest
import redis

from petiole.gpu_worker.request import Delta
from petiole.tasks.errors import ModelChanged
from petiole.tasks.servers.failover import caused_by_call
from petiole.tasks.worker.broker.quarantine import Sign, end_stream
from petiole.tasks.worker.output.publisher import Publisher
from tests.support.publishing import END, KEYS, TASK, attempt, begin, log
from tests.support.site import RedisServer


def test_a_finished_task_stays_finished(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.finish(END)
    publisher.flush([stream])
    again = begin(client)
    assert again.attempt == 0
    assert again.record == END.record


def test_a_running_task_that_is_begun_again_counts_a_death(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.admit("")
    publisher.flush([stream])
    assert begin(client).deaths == 1


def test_a_task_that_runs_at_once_is_marked_before_the_engine_sees_it(client: redis.Redis) -> None:
    assert begin(client, at_once=1).deaths == 0
    assert begin(client, at_once=1).deaths == 1


def test_a_message_that_nobody_had_before_counts_no_death(client: redis.Redis) -> None:
    begin(client, at_once=1)
    begun = begin(client, at_once=1, message="another")
    assert (begun.attempt, begun.deaths) == (2, 0)


def test_two_messages_of_one_poison_do_not_hide_its_deaths(client: redis.Redis) -> None:
    for message in ("one", "two"):
        assert begin(client, at_once=1, message=message).deaths == 0
    assert [begin(client, at_once=1, message=message).deaths for message in ("one", "two", "one")] == [1, 2, 3]


def test_a_call_that_is_repeated_after_a_lost_reply_counts_no_death(client: redis.Redis) -> None:
    assert begin(client, at_once=1, call="first").deaths == 0
    assert begin(client, at_once=1, call="first").deaths == 0
    assert begin(client, at_once=1, call="second").deaths == 1
    assert begin(client, at_once=1, call="second").deaths == 1


def test_a_call_that_redis_never_got_is_repeated_and_counts_the_death_before_it(client: redis.Redis) -> None:
    """It finds the mark of an earlier worker, not its own."""
    begin(client, at_once=1, call="of a worker that dies")
    assert begin(client, at_once=1, call="repeated").deaths == 1


def test_what_the_version_before_has_begun_counts_as_it_did(client: redis.Redis) -> None:
    """It named no messages, and took the broker's word; so does RabbitMQ."""
    begin(client, at_once=1, message="")
    assert begin(client, at_once=1, message="").deaths == 0
    assert begin(client, at_once=1, message="", again=1).deaths == 1
    assert begin(client, at_once=1, again=1).deaths == 2


@pytest.mark.parametrize("admitted", [False, True])
def test_a_task_handed_back_or_never_admitted_counts_none(
    publisher: Publisher, client: redis.Redis, admitted: bool
) -> None:
    stream, heard = attempt(publisher, client)
    if admitted:
        stream.admit("")
        stream.push(Delta(0, (1,), "a"))
        publisher.flush([stream])
        stream.push(Delta(1, (2,), "b"))
        stream.release()
        publisher.flush([stream])
        publisher.flush([stream])
        assert heard.words == ["released"]
    begun = begin(client)
    assert (begun.attempt, begun.deaths) == (2, 0)
    assert begun.written.token_ids == ([1, 2] if admitted else [])


def test_a_retry_of_celerys_begins_a_new_stream(publisher: Publisher, client: redis.Redis) -> None:
    stream, _ = attempt(publisher, client)
    stream.push(Delta(0, (1,), "a"))
    stream.finish(END)
    publisher.flush([stream])
    client.set(KEYS.completion, "done")
    begun = begin(client, retries=1)
    assert (begun.attempt, begun.written.token_ids, begun.record) == (2, [], None)
    assert not client.exists(KEYS.completion)


def test_the_model_is_the_one_that_wrote_the_first_token(publisher: Publisher, client: redis.Redis) -> None:
    begin(client, model="first")
    assert begin(client, model="second").model == "first"
    stream, _ = attempt(publisher, client)
    assert client.hget(KEYS.state, "model") == b"m"
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    begun = begin(client, model="other")
    changed = begun.outcome(model="other", max_attempts=3)
    assert changed is not None
    assert isinstance(changed.error, ModelChanged)
    assert begun.outcome(model="m", max_attempts=3) is None


@pytest.mark.parametrize("marked", [False, True])
def test_the_adapter_is_the_one_that_made_the_first_token(
    publisher: Publisher, client: redis.Redis, marked: bool
) -> None:
    stream, _ = attempt(publisher, client, marked=marked)
    stream.admit("first")
    publisher.flush([stream])
    assert begin(client).adapter == ""
    stream, _ = attempt(publisher, client, marked=marked)
    stream.admit("second")
    stream.push(Delta(0, (1,), "a"))
    publisher.flush([stream])
    assert begin(client).adapter == "second"
    stream, _ = attempt(publisher, client, marked=marked)
    stream.admit("third")
    stream.push(Delta(1, (2,), "b"))
    publisher.flush([stream])
    assert begin(client).adapter == "second"
    assert begin(client, retries=1).adapter == ""


def test_a_task_that_nobody_ran_gets_a_last_delta(client: redis.Redis) -> None:
    error = {"type": "InvalidRequest", "message": "no request"}
    for _ in range(2):
        end_stream(client, TASK, 60_000, error, sign=Sign(own=True))
    (delta,) = log(client)
    assert (delta["attempt"], delta["index"], delta["finish_reason"]) == (1, 0, "error")
    assert delta["error"] == error
    assert begin(client).record == {"finish_reason": "error", "error": error}


def test_a_master_that_is_demoted_between_two_calls_fails_no_task(
    server: RedisServer, client: redis.Redis
) -> None:
    begin(client)
    with redis.Redis(unix_socket_path=str(server.socket)) as operator:
        operator.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(redis.RedisError) as refused:
                begin(client)
        finally:
            operator.replicaof("NO", "ONE")
    assert not caused_by_call(refused.value)

"""What a delivery is to do follows from what earlier ones left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from petiole.tasks import errors
from petiole.tasks.submission.task import take_result
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker.generation.attempts import BeginReply
from petiole.tasks.worker.generation.engine_requests import engine_request, seed_of
from petiole.tasks.worker.output.outcomes import Outcome, at_hand, recorded, within

DELTAS = [
    b'{"task_id": "t", "attempt": 1, "index": 0, "token_ids": [1, 2], "text": "ab"}',
    b'{"task_id": "t", "attempt": 1, "index": 2, "token_ids": [3], "text": "c"}',
]


def begun(**changes: Any) -> BeginReply:
    reply = {"attempt": 2, "deaths": 0, "cancel": b"", "model": b"m", "adapter": b"", "done": b"", "log": []}
    return BeginReply.parse(list({**reply, "before": b"", "died": 0, **changes}.values()))


@pytest.mark.parametrize(
    ("left", "error"),
    [
        ({}, None),
        ({"log": DELTAS}, None),
        ({"log": [*DELTAS, b"garbage"]}, errors.GenerationFailed),
        ({"log": [*DELTAS, b"garbage"], "deaths": 3}, errors.GenerationFailed),
        ({"deaths": 2}, None),
        ({"deaths": 3}, errors.WorkersLost),
        ({"model": b"other"}, None),
        ({"model": b"other", "log": DELTAS[:1]}, errors.ModelChanged),
        ({"model": b"\xff", "adapter": b"\xff", "log": DELTAS[:1]}, errors.ModelChanged),
    ],
)
def test_what_earlier_deliveries_left_may_fail_the_task(
    left: dict[str, Any], error: type[Exception] | None
) -> None:
    outcome = begun(**left).outcome(model="m", max_attempts=3)
    assert error is None if outcome is None else type(outcome.error) is error


@pytest.mark.parametrize("deaths", [0, 9])
def test_a_task_that_has_finished_ends_as_recorded(deaths: int) -> None:
    finished = begun(attempt=0, deaths=deaths, done=b'{"finish_reason": "stop"}')
    outcome = finished.outcome(model="other", max_attempts=3)
    assert outcome is not None
    assert (outcome.error, outcome.finish_reason) == (None, "stop")


def test_the_log_gives_back_what_was_written() -> None:
    written = begun(log=DELTAS).written
    assert (written.token_ids, written.text, written.unreadable) == ([1, 2, 3], "abc", 0)


@pytest.mark.parametrize(
    "damage",
    [b"garbage", b"5", b"{}", b"\xff", b"[" * 5000, DELTAS[0], DELTAS[1].replace(b"[3]", b'["x"]')],
)
def test_a_log_is_read_up_to_its_first_entry_that_is_no_delta(damage: bytes) -> None:
    written = begun(log=[DELTAS[0], damage, DELTAS[1]]).written
    assert (written.token_ids, written.text, written.unreadable) == ([1, 2], "ab", 2)


@pytest.mark.parametrize(
    "done",
    [
        b"",
        b"garbage",
        b"\xff",
        b"[" * 5000,
        b"5",
        b"{}",
        b'{"finish_reason": 5}',
        b'{"finish_reason": "error", "error": 5}',
    ],
)
def test_a_task_that_has_ended_somehow_has_failed(done: bytes) -> None:
    ended = begun(attempt=0, done=done)
    outcome = ended.outcome(model="m", max_attempts=3)
    assert outcome is not None
    error = outcome.error
    assert str(error) == "the record of its end in Redis cannot be read"
    assert isinstance(error, errors.GenerationFailed)


def test_a_recorded_result_is_the_result() -> None:
    result = {
        "text": "abc",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "stop_reason": "eos",
        "usage": {"prompt_tokens": 1, "cached_prompt_tokens": 0, "completion_tokens": 3},
        "timing": {},
        "model": "m",
        "attempt": 1,
    }
    record = json.loads(json.dumps(Outcome(result, None, "stop", "eos").record))
    assert not {"text", "token_ids"} & set(record)
    assert recorded(record, LoggedOutput.of(DELTAS)).result == result
    assert isinstance(recorded(record, LoggedOutput.of([*DELTAS, b"garbage"])).error, errors.GenerationFailed)


def test_a_recorded_failure_is_the_failure() -> None:
    error = errors.InvalidRequest("prompt", "must not be empty", "''")
    outcome = recorded(json.loads(json.dumps(Outcome(error=error).record)), LoggedOutput())
    assert isinstance(outcome.error, errors.InvalidRequest)
    assert outcome.error.args == error.args


@given(
    text=st.text(max_size=50).map(lambda part: part * 50),
    token_ids=st.lists(st.integers(0, 2**20), max_size=300),
    logprobs=st.none() | st.lists(st.just({"token_id": 1, "logprob": -3.4e38, "top": []}), max_size=300),
    limit=st.integers(1024, 40_000),
)
def test_a_result_fails_exactly_if_its_json_is_larger_than_the_limit(
    text: str, token_ids: list[int], logprobs: list[dict[str, Any]] | None, limit: int
) -> None:
    result = {"text": text, "token_ids": token_ids, "finish_reason": "stop"}
    if logprobs is not None:
        result["logprobs"] = logprobs
    outcome = within(limit, Outcome(result, None, "stop"))
    size = len(json.dumps(result))
    if size <= limit:
        assert outcome.result == result
    else:
        assert isinstance(outcome.error, errors.ResultTooLarge)
        assert (outcome.error.size, outcome.error.limit) == (size, limit)
        again = recorded(json.loads(json.dumps(outcome.record)), LoggedOutput())
        assert str(again.error) == str(outcome.error)


def test_the_body_of_a_task_finds_its_own_outcome_and_no_other() -> None:
    with at_hand("a", Outcome({"text": "x"}, None, "stop")):
        assert take_result("a") == {"text": "x"}
        with pytest.raises(errors.GenerationFailed):
            take_result("b")
    with pytest.raises(errors.GenerationFailed, match="does not run Petiole's app and pool"):
        take_result("a")


def test_a_request_is_the_same_on_every_worker() -> None:
    from petiole.contract.requests.generation import GenerateRequest

    asked = GenerateRequest(prompt="hello", choice=["a", "b"], salt="tenant")
    one, other = (engine_request("task", asked, priority=3) for _ in range(2))
    assert one == other
    assert one.sampling.seed == seed_of("task") != seed_of("another")
    assert 0 <= seed_of("task") < 2**63
    assert one.constraint is not None
    assert (one.constraint.kind, one.constraint.value, one.salt, one.priority) == (
        "choice",
        ["a", "b"],
        "tenant",
        3,
    )

"""What a task's end is recorded as, and whether the backend will take its result."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import redis
from celery import Celery

from petiole.contract.results.task_result import StreamDelta
from petiole.gpu_worker import exceptions as engine_errors
from petiole.gpu_worker.preparation.prompts import NO_SKILLS
from petiole.gpu_worker.request import Delta, FinishReason, Result, Timing, TokenLogprobs, Usage
from petiole.tasks.errors import InvalidRequest, ResultTooLarge
from petiole.tasks.wire.record.codec import merged, opening
from petiole.tasks.worker.output.outcomes import (
    LoggedOutput,
    Outcome,
    ended,
    largest,
    public,
    recorded,
    succeeded,
    within,
)
from tests.support.rights import SECRET, grant
from tests.support.site import RedisServer

RESULT = Result("r", "", (1, 2), FinishReason.LENGTH, None, Usage(1, 0, 2), Timing(0.0, 0.0, None, 0.0), "m")


def of(text: str, reason: FinishReason = FinishReason.LENGTH) -> Outcome:
    return succeeded(replace(RESULT, text=text, finish_reason=reason), 1, LoggedOutput())


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_log_probabilities_are_json(value: float) -> None:
    entry = TokenLogprobs(1, value, ((2, value),))
    whole = succeeded(replace(RESULT, logprobs=(entry, entry)), 1, LoggedOutput()).result
    assert whole is not None
    written = {"token_id": 1, "logprob": -3.4e38, "top": [[2, -3.4e38]]}
    assert json.loads(merged(opening("t", 1), 0, [Delta(0, (1,), "", None, (entry,))]))["logprobs"] == [written]
    assert whole["logprobs"] == [written] * 2


@pytest.mark.parametrize("ending", ["revoked", "expired"])
def test_a_revocation_is_told_from_its_record(ending: Any) -> None:
    assert recorded(ended(ending).record, LoggedOutput()).revoked


@pytest.mark.parametrize("ending", ["revoked", "expired"])
def test_what_a_revoked_task_has_used_is_in_its_end(ending: Any) -> None:
    made = of("so far", FinishReason.CANCELLED).result
    assert made is not None
    end = ended(ending, of("so far", FinishReason.CANCELLED)).record
    last = StreamDelta.model_validate_json(merged(opening("t", 1), 2, [], end))
    assert (last.finish_reason, last.stop_reason, last.model) == ("cancelled", ending, "m")
    assert last.usage == Usage(**made["usage"])
    assert end["timing"] == made["timing"]
    assert not {"text", "token_ids"} & end.keys()


def test_a_generation_that_nobody_read_is_cancelled_but_not_revoked() -> None:
    assert not recorded(of("unread", FinishReason.CANCELLED).record, LoggedOutput()).revoked


def test_what_the_backends_redis_does_not_take_is_too_large(server: RedisServer, client: redis.Redis) -> None:
    assert largest(Celery("test", backend="cache+memory://", set_as_current=False).backend) == sys.maxsize
    backend = Celery("test", backend=server.url, set_as_current=False).backend
    client.config_set("proto-max-bulk-len", 2**20)
    try:
        limit = largest(backend)
        assert within(limit, of("x" * 900_000)).error is None
        assert isinstance(within(limit, of("x" * 2**20)).error, ResultTooLarge)
        backend.store_result("just so", of("x" * (limit - 2000)).result, "SUCCESS")
    finally:
        client.config_set("proto-max-bulk-len", 512 * 2**20)


def test_a_worker_does_not_ask_what_its_user_may_not(server: RedisServer, client: redis.Redis) -> None:
    grant(client)
    url = f"redis+socket://petiole:{SECRET}@{server.socket}?virtual_host=0"
    backend = Celery("test", backend=url, set_as_current=False).backend
    backend.client.ping()
    assert largest(backend) > 500 * 2**20
    assert [entry["object"] for entry in client.acl_log() if entry["reason"] == "command"] == []


def test_who_asks_a_model_of_text_for_a_skill_is_told_of_the_queue() -> None:
    refused = public(engine_errors.InvalidRequest("skill", NO_SKILLS, "query"))
    assert "queue=" in str(refused)
    assert "queue=" not in str(public(engine_errors.InvalidRequest("skill", "must be another", "query")))


@pytest.mark.parametrize("field", ["json_schema", "choice[1]"])
def test_an_error_in_a_constraint_names_the_option_of_the_task(field: str) -> None:
    refused = public(engine_errors.InvalidRequest(f"constraint.{field}", "must be another", 1))
    assert isinstance(refused, InvalidRequest)
    assert refused.field == field


def test_a_ranking_counts_what_earlier_attempts_have_scored() -> None:
    entry = '{"task_id":"t","attempt":1,"index":0,"token_ids":[7,7],"text":"","scores":[[0.25],[0.75]]}'
    made = replace(RESULT, text="", token_ids=(7, 7, 7, 7), scores=((0.5,), (0.75,)), best=3)
    outcome = succeeded(made, 2, LoggedOutput.of([entry.encode()]))
    assert outcome.result is not None
    assert outcome.result["scores"] == [[0.25], [0.75], [0.5], [0.75]]
    ranking = [{"index": 1, "score": 0.75}, {"index": 3, "score": 0.75}, {"index": 2, "score": 0.5}]
    assert outcome.result["ranking"] == ranking == outcome.record["ranking"]

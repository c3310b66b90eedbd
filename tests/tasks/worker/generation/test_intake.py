"""The intake: one task that cannot be begun fails, and only that one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import redis

from petiole.gpu_worker import EngineConfig
from petiole.tasks.worker.generation.intake import Intake
from tests.support.site import eventually


class Job:
    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self.delivery = SimpleNamespace(
            message={"args": [], "kwargs": {"prompt": "p"}, "retries": 0},
            task_name="tasks.generate",
            redelivered=False,
            message_name="",
            priority_step=0,
        )
        self.outbox: Any = None
        self.outcome: Any = None
        self.error: Exception | None = None
        self.over = False

    def fail(self, error: Exception) -> None:
        self.error = error
        self.outcome = "failed"


@pytest.fixture
def intake(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Intake:
    pool = SimpleNamespace(
        publisher=SimpleNamespace(ttl_ms=60_000),
        engine=SimpleNamespace(limits=SimpleNamespace(fingerprint="model"), config=EngineConfig(max_num_seqs=8)),
        jobs={},
        fail=lambda error: pytest.fail(f"the worker ends: {error}"),
    )
    intake = Intake(pool, client)  # type: ignore[arg-type]
    monkeypatch.setattr(intake, "_start", lambda job, request, begun, *, marked: setattr(job, "outbox", begun))
    return intake


def test_a_task_whose_keys_cannot_be_named_fails_alone(intake: Intake) -> None:
    jobs = [Job("a"), Job("\ud800"), Job("b")]
    intake._take(jobs)  # type: ignore[arg-type]
    assert [job.outbox is not None for job in jobs] == [True, False, True]
    assert isinstance(jobs[1].error, UnicodeEncodeError)


def test_a_call_that_redis_refuses_for_one_task_fails_that_one(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = intake._begin

    def refusing(keys: Any, args: Any) -> Any:
        if any("bad" in key for key in keys):
            raise redis.ResponseError("ERR Error running script: @user_script:1: bad argument")
        return begin(keys, args)

    monkeypatch.setattr(intake, "_begin", refusing)
    jobs = [Job("bad"), Job("a"), Job("b")]
    intake._take(jobs)  # type: ignore[arg-type]
    assert [job.outbox is not None for job in jobs] == [False, True, True]
    assert isinstance(jobs[0].error, redis.ResponseError)


def test_an_error_of_the_intake_itself_fails_the_tasks_at_hand_and_not_the_worker(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> int:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(intake, "_room", broken)
    job = Job("a")
    intake.put(job)  # type: ignore[arg-type]
    intake.start()
    eventually(lambda: isinstance(job.error, RuntimeError), "the task fails")
    intake.close()

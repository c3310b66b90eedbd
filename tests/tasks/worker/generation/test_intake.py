"""The intake: one task that cannot be begun fails, and only that one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from petiole.tasks.worker.generation.attempts import BeginReply
from petiole.tasks.worker.generation.driver import JobDriver
from petiole.tasks.worker.generation.intake import Intake
from petiole.tasks.worker.output.publisher import Publisher
from tests.support.jobs import Delivered, services
from tests.support.site import eventually


class Recorder(JobDriver):
    """A job that only notes what the intake makes of it."""

    outcome: object = None

    def begin(self, begun: BeginReply, *_: Any, **__: Any) -> None:
        self.outcome = begun

    def fail(self, error: Exception) -> None:
        self.outcome = error


@pytest.fixture
def intake(client: redis.Redis, publisher: Publisher) -> Iterator[Intake]:
    intake = Intake(services(publisher), client)
    yield intake
    intake.close()


def jobs_of(intake: Intake, *task_ids: str) -> list[Recorder]:
    return [Recorder(intake._services, Delivered(task_id)) for task_id in task_ids]


def test_a_task_whose_keys_cannot_be_named_fails_alone(intake: Intake) -> None:
    jobs = jobs_of(intake, "a", "\ud800", "b")
    intake._take([*jobs])
    assert [type(job.outcome) for job in jobs] == [BeginReply, UnicodeEncodeError, BeginReply]


def test_a_call_that_redis_refuses_for_one_task_fails_that_one(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = intake._begin

    def refusing(keys: Any, args: Any) -> Any:
        if any("bad" in key for key in keys):
            raise redis.ResponseError("ERR Error running script: @user_script:1: bad argument")
        return begin(keys, args)

    monkeypatch.setattr(intake, "_begin", refusing)
    jobs = jobs_of(intake, "bad", "a", "b")
    intake._take([*jobs])
    assert [type(job.outcome) for job in jobs] == [redis.ResponseError, BeginReply, BeginReply]


def test_an_error_of_the_intake_itself_fails_the_tasks_at_hand_and_not_the_worker(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> int:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(intake, "_room", broken)
    (job,) = jobs_of(intake, "a")
    intake.put(job)
    intake.start()
    eventually(lambda: isinstance(job.outcome, RuntimeError), "the task fails")

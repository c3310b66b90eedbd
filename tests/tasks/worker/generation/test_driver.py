"""What a job decides is carried out, by the threads that may do so. They are turned by hand."""

from __future__ import annotations

import pytest
import redis

from petiole.gpu_worker.request import Request, SamplingParams
from petiole.tasks.worker.delivery.delivery import TimeLimits
from petiole.tasks.worker.generation.driver import JobDriver
from petiole.tasks.worker.generation.job import State
from petiole.tasks.worker.output.outcomes import ended
from petiole.tasks.worker.output.publisher import Publisher
from tests.support.jobs import Delivered, services, turn
from tests.support.publishing import TASK, begin, log, written
from tests.support.site import eventually

NO_LIMITS = TimeLimits(None, None, None)


def driver_of(publisher: Publisher, delivery: Delivered) -> JobDriver:
    shared = services(publisher)
    driver = shared.jobs[delivery.task_id] = JobDriver(shared, delivery)
    return driver


def generate(driver: JobDriver, client: redis.Redis, tokens: int = 3) -> None:
    request = Request(prompt="p", sampling=SamplingParams(max_tokens=tokens), request_id=TASK)
    driver.begin(begin(client), request, NO_LIMITS)
    turn(driver.services)


def publish(driver: JobDriver) -> None:
    assert driver.attempt is not None
    driver.services.publisher.flush([driver.attempt.outbox])
    turn(driver.services)


def test_a_generation_is_accepted_written_and_then_completed(publisher: Publisher, client: redis.Redis) -> None:
    delivery = Delivered(TASK)
    driver = driver_of(publisher, delivery)
    driver.services.engine.start()
    generate(driver, client)
    eventually(lambda: turn(driver.services) or driver.job.state is State.ENDED, "it ends")
    publish(driver)
    assert delivery.answers[:2] == ["begun", "accepted"]
    assert (len(written(client)), log(client)[-1]["finish_reason"]) == (3, "length")
    assert driver.job.outcome is not None
    assert driver.job.state is not State.ENDED


def test_a_revoked_task_ends_as_such_in_its_stream(publisher: Publisher, client: redis.Redis) -> None:
    driver = driver_of(publisher, Delivered(TASK))
    driver.stop("expired")
    generate(driver, client)
    assert (attempt := driver.attempt) is not None
    publish(driver)
    assert attempt.handle is None
    assert (log(client)[-1]["finish_reason"], driver.job.outcome) == ("cancelled", ended("expired"))


def test_what_is_handed_back_is_over_once_all_output_is_written(publisher: Publisher, client: redis.Redis) -> None:
    driver = driver_of(publisher, Delivered(TASK))
    driver.services.engine.start()
    generate(driver, client, tokens=4000)
    eventually(lambda: driver.attempt is not None and len(driver.attempt.outbox.pieces) > 3, "it generates")
    driver.hand_back()
    eventually(lambda: turn(driver.services) or driver.job.state is State.RELEASING, "the engine hands it back")
    assert (attempt := driver.attempt) is not None
    publish(driver)
    assert driver.job.state is State.HANDED_BACK
    assert driver.attempt is None
    assert len(written(client)) == len([token for piece in attempt.outbox.pieces for token in piece.token_ids])


def test_an_unexpected_error_gives_the_task_up_and_its_message_goes_back_later(
    publisher: Publisher, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = Delivered(TASK)
    driver = driver_of(publisher, delivery)
    monkeypatch.setattr("petiole.tasks.worker.output.publisher.Outbox.finish", None)
    driver.stop("expired")
    generate(driver, client)
    assert (driver.job.state, driver.services.jobs, delivery.answers) == (State.GIVEN_UP, {}, [])
    (requeue,) = driver.services.completions.later  # type: ignore[attr-defined]
    requeue()
    turn(driver.services)
    assert delivery.answers == ["requeued"]


def test_a_newer_attempt_takes_the_task_away(publisher: Publisher, client: redis.Redis) -> None:
    driver = driver_of(publisher, Delivered(TASK))
    generate(driver, client)
    begin(client)
    publish(driver)
    assert driver.job.state is State.STANDING_BY
    assert len(driver.services.completions.later) == 1, "it looks later"  # type: ignore[attr-defined]


@pytest.mark.parametrize("held_comes_first", [False, True])
def test_what_is_requeued_is_the_message_that_is_held(publisher: Publisher, held_comes_first: bool) -> None:
    """The other is a request that Celery has held until its `eta`, whose message was lost meanwhile."""
    held, lost = Delivered(), Delivered(held=False)
    first, second = (held, lost) if held_comes_first else (lost, held)
    driver = driver_of(publisher, first)
    driver.rebind(second)
    driver.give_up(RuntimeError())
    turn(driver.services)
    (requeue,) = driver.services.completions.later  # type: ignore[attr-defined]
    requeue()
    turn(driver.services)
    assert (held.answers, lost.answers) == (["requeued"], ["acknowledged"])


def test_a_message_that_comes_again_is_accepted_again(publisher: Publisher) -> None:
    first, second = Delivered(), Delivered()
    driver = driver_of(publisher, first)
    driver.messages.accept(1.0)
    driver.rebind(second)
    assert second.answers == ["accepted", "begun"]


def test_a_message_that_comes_again_revoked_stops_the_task(publisher: Publisher) -> None:
    driver, second = driver_of(publisher, Delivered()), Delivered()
    second.request.ending = "revoked"
    driver.rebind(second)
    driver.services.events.turn()  # type: ignore[attr-defined]
    assert driver.job.ending == "revoked"

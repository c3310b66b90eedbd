"""A message that comes again to the worker whose job it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from petiole.tasks.worker.generation.attempts import Begun
from petiole.tasks.worker.generation.job import Job
from petiole.tasks.worker.output.outcomes import Written


@dataclass
class Delivered:
    """A delivery that records how it was answered."""

    held: bool
    task_id: str = "a"
    request: Any = field(default_factory=lambda: SimpleNamespace(ending=None))
    answer: str = ""

    def acknowledge(self) -> None:
        self.answer = "acknowledged"

    def requeue(self) -> None:
        self.answer = "requeued"


def job_of(delivery: Delivered) -> Job:
    return Job(SimpleNamespace(forget=lambda job: None), delivery)  # type: ignore[arg-type]


@pytest.mark.parametrize("held_comes_first", [False, True])
def test_what_is_requeued_is_the_message_that_is_held(held_comes_first: bool) -> None:
    """The other is a request that Celery has held until its `eta`, whose message was lost meanwhile."""
    held, lost = Delivered(True), Delivered(False)
    first, second = (held, lost) if held_comes_first else (lost, held)
    job = job_of(first)
    job.rebind(second)  # type: ignore[arg-type]
    job.requeue()
    assert (held.answer, lost.answer) == ("requeued", "acknowledged")


class RevokedMeanwhile(Delivered):
    """A delivery whose task is revoked, on the consumer's thread, while another thread asks whether it was."""

    job: Job

    @property
    def ending(self) -> None:
        self.job.stop("revoked")


@pytest.mark.parametrize("step", ["begin", "admit"])
def test_a_revocation_is_not_lost_to_a_thread_that_asks_for_one(step: str) -> None:
    nothing = lambda *_: None  # noqa: E731
    delivery = RevokedMeanwhile(True)
    job = job_of(delivery)
    job.pool = SimpleNamespace(  # type: ignore[assignment]
        publisher=None, completions=SimpleNamespace(run=nothing), mailbox=SimpleNamespace(post=nothing)
    )
    delivery.job = job
    if step == "begin":
        begun = Begun(1, 0, False, "", "", None, Written.of([]))
        job.begin(begun, needs_reader=False, marked=True)
    else:
        job._on_admitted(SimpleNamespace(cancel=nothing))  # type: ignore[arg-type]
    assert job.ending == "revoked"

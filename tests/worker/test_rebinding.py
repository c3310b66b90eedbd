"""A message that comes again to the worker whose job it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.worker.job import Job


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

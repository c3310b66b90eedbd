"""What is linked to a task is sent once, although two workers find that the task has ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from celery import chord
from celery.result import AsyncResult

from tests.support.doomed import MET
from tests.support.site import Site, eventually

ENDINGS = ["success", "failure", "ignored"]


def submit(site: Site, ending: str) -> AsyncResult:
    """A task that ends in this way and has a link for it."""
    link = site.app.signature("tasks.generate", kwargs={"prompt": "linked", "max_tokens": 1}, immutable=True)
    submission: dict[str, Any] = {"link_error" if ending == "failure" else "link": link}
    if ending == "ignored":
        submission["ignore_result"] = True
    return site.generate("" if ending == "failure" else "first", max_tokens=3, submission=submission)


def sent(site: Site) -> int:
    """How many links were sent and have begun."""
    return len(site.redis.keys("petiole:{*}:log")) - 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_worker_that_completes_late_sends_nothing(own_site: Site, ending: str) -> None:
    """It wrote the end, but was stopped before it completed the task; another worker did that."""
    site = own_site
    first = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.late_completion:LateCompletionEngine")
    result = submit(site, ending)
    eventually(lambda: site.log(result) and site.log(result)[-1]["finish_reason"], "ended")
    first.signal(signal.SIGSTOP)
    site.worker()
    eventually(lambda: sent(site) == 1, "completed")
    first.signal(signal.SIGCONT)
    eventually(lambda: "completed late" in first.output, "it goes on")
    eventually(lambda: site.unfinished() == 0, "acknowledged")
    assert sent(site) == 1


def killed_and_delivered_again(site: Site, ending: str, step: str) -> None:
    worker = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.doomed:DoomedEngine", DOOM=f"{step} KILL")
    submit(site, ending)
    eventually(lambda: MET in worker.output, f"killed at: {step}")
    site.worker()
    eventually(lambda: site.unfinished() == 0, "acknowledged")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_task_that_was_completed_and_comes_again_sends_nothing(own_site: Site, ending: str) -> None:
    killed_and_delivered_again(own_site, ending, "completed")
    assert sent(own_site) == 1


def test_a_failure_that_was_stored_still_sends_what_is_linked_to_it(own_site: Site) -> None:
    killed_and_delivered_again(own_site, "failure", "errors to be linked")
    assert sent(own_site) == 1


def test_when_a_worker_dies_while_it_completes_another_does_the_rest(own_site: Site) -> None:
    """It had sent what is linked, but not stored the result. Its claim must expire first."""
    site = own_site
    worker = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.doomed:DoomedEngine", DOOM="to be stored KILL")
    result = submit(site, "success")
    eventually(lambda: MET in worker.output, "linked, but not stored")
    second = site.worker()
    assert site.get(result)["finish_reason"] == "length"
    eventually(lambda: site.unfinished() == 0, "acknowledged")
    assert sent(site) == 1
    assert "Traceback" not in second.output


def test_a_chord_whose_last_worker_dies_before_it_sends_the_body_is_finished(own_site: Site) -> None:
    """It had claimed to send it, for longer than a lease: its message comes again before the claim has expired."""
    site = own_site
    worker = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.doomed:DoomedEngine", DOOM="body to be sent KILL")
    header = [site.signature(prompt, max_tokens=2) for prompt in ("a", "b")]
    body = chord(header, app=site.app)(site.signature("body", max_tokens=1))
    eventually(lambda: MET in worker.output, "claimed, but not sent")
    second = site.worker()
    assert site.get(body)["finish_reason"] == "length"
    eventually(lambda: site.unfinished() == 0, "acknowledged")
    assert "Traceback" not in second.output

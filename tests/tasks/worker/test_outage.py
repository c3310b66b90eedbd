"""What fails for a while is said once, and so is its recovery."""

from __future__ import annotations

import logging

import pytest

from petiole.tasks.worker.outage import Outage

logger = logging.getLogger(__name__)


def test_the_first_failure_and_the_recovery_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(logger, "it fails: %s", "it works again")
    outage.ended()
    for _ in range(3):
        outage.began("no room")
    assert outage.lasts
    outage.ended()
    outage.ended()
    assert not outage.lasts
    assert outage.lasts_s == 0
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "it fails: no room",
        "it works again",
    ]


def test_a_second_outage_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage(logger, "it fails: %s", "it works again")
    for reason in ("first", "second"):
        outage.began(reason)
        outage.ended()
    assert [record.args for record in caplog.records if record.levelno == logging.ERROR] == [
        ("first",),
        ("second",),
    ]


def test_an_unexpected_failure_has_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    Outage(logger, "it fails: %s", "it works again").began("why", unexpected=ValueError("why"))
    assert "ValueError: why" in caplog.text

"""Who keeps its messages says so, and who does not, too."""

from __future__ import annotations

import itertools
import logging

import pytest
import redis

from petiole.tasks.worker.broker.leases import LeaseKeeper
from petiole.tasks.worker.broker.ledger import Ledger
from tests.support.site import eventually


def test_an_engine_that_hangs_is_an_error_and_one_that_goes_on_again_is_none(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    ages = iter([0.0, 9.0, 9.0, 0.0, 0.0])
    keeper = LeaseKeeper(
        ledgers=list, connect=lambda: client, heartbeat_age_s=lambda: next(ages), visibility_timeout_s=10
    )
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            keeper._renew(client)
    assert [(record.levelname, record.message.partition(",")[0]) for record in caplog.records] == [
        ("ERROR", "the engine hangs: its tasks go to others"),
        ("WARNING", "the engine goes on"),
    ]


def test_a_redis_that_refuses_is_said_once_and_so_is_its_return(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    tries = itertools.count()

    def connect() -> redis.Redis:
        if next(tries) < 3:
            raise redis.ResponseError("MISCONF the disk is full")
        return client

    keeper = LeaseKeeper(ledgers=list, connect=connect, heartbeat_age_s=lambda: 0.0, visibility_timeout_s=1)
    with caplog.at_level(logging.INFO):
        keeper.start()
        eventually(lambda: "again" in caplog.text, "it is renewed again")
        keeper.stop()
    assert [record.message.partition(",")[0] for record in caplog.records] == [
        "leases are not renewed: MISCONF the disk is full",
        "leases are renewed again",
    ]


def test_an_error_that_nobody_expected_does_not_end_the_renewal(
    client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as that of a set of channels that grows while it is read."""
    reads = itertools.count()

    def ledgers() -> list[Ledger]:
        if next(reads) == 1:
            raise RuntimeError("Set changed size during iteration")
        return []

    keeper = LeaseKeeper(
        ledgers=ledgers, connect=lambda: client, heartbeat_age_s=lambda: 0.0, visibility_timeout_s=1
    )
    keeper.start()
    eventually(lambda: next(reads) > 5, "it goes on", 10)
    keeper.stop()
    assert "leases are not renewed: Set changed size during iteration" in caplog.text
    assert "Traceback" in caplog.text

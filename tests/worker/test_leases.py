"""Who keeps its messages says so, and who does not, too."""

from __future__ import annotations

import logging

import pytest
import redis

from tasks.worker.leases import LeaseKeeper


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
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("ERROR", "the engine hangs: its tasks go to others"),
        ("WARNING", "the engine goes on"),
    ]

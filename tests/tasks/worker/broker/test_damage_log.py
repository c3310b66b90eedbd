"""What is remembered of damaged keys, so that each is named once a minute, does not grow with their number."""

from __future__ import annotations

import pytest

from petiole.tasks.worker.broker import corruption


def test_the_keys_that_were_named_are_remembered_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(corruption, "_reported_at", {})
    n_keys = corruption._REMEMBERED + 100
    for key in range(n_keys):
        corruption.report(f"key{key}", "a list")
    corruption.report(f"key{n_keys - 1}", "a list")
    assert len(corruption._reported_at) == corruption._REMEMBERED
    named = [record for record in caplog.records if record.name == corruption.__name__]
    assert len(named) == n_keys, "the last one is not named twice"

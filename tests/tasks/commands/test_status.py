"""`petiole status`: what a worker says of itself, in tables."""

from __future__ import annotations

from petiole.tasks.commands.status import TIER_COLUMNS, _tier_row
from petiole.tasks.fleet.reports import WorkerReport


def test_a_worker_with_files_of_kv_has_a_row_for_them() -> None:
    report = WorkerReport(
        worker="one",
        kv_tier_bytes=2_500_000_000,
        kv_tier_saved_bytes=10_000_000,
        kv_tier_restored_tokens=640,
        kv_tier_dropped_chunks=3,
        kv_tier_given_up=2,
        kv_tier_failed=1,
    )
    row = _tier_row(report)
    assert row == ("one", "2.50 GB", "640", "0.01 GB", "3", "2", "1")
    assert len(row) == len(TIER_COLUMNS)


def test_a_worker_without_them_has_none() -> None:
    assert _tier_row(WorkerReport(worker="one")) is None

"""What `petiole plan` says of a model is what its worker reports."""

from __future__ import annotations

from pathlib import Path

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.sizing import sizes_of
from petiole.tasks.fleet import reports
from tests.support.site import Site, eventually

ENGINE = {"PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine", "PETIOLE_DEVICE": "cpu"}


def test_a_worker_reports_what_was_planned(tmp_path: Path) -> None:
    planned = sizes_of(EngineConfig(device="cpu", max_num_seqs=3), 2**30)
    with Site(tmp_path, **ENGINE, PETIOLE_MAX_NUM_SEQS=3) as site:
        site.start_worker().ready()
        (worker,) = eventually(lambda: reports.workers(site.redis), "a report")
    assert worker.weight_bytes == planned.weight_bytes
    assert worker.weight_format == planned.weight_format
    assert worker.pages_total == planned.tokens

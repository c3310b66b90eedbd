"""The heartbeat file tells a supervisor's probe whether the worker's engine makes progress."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from petiole.tasks.worker.reports import heartbeat
from petiole.tasks.worker.reports.heartbeat import Heartbeat
from tests.support.site import Site, eventually


def age_s(path: Path) -> float:
    return time.time() - path.stat().st_mtime


def test_the_time_of_the_file_is_that_of_the_engines_last_progress(tmp_path: Path) -> None:
    path, age = tmp_path / "alive", 0.0
    beating = Heartbeat(path, lambda: age)
    beating.beat()
    assert age_s(path) < 60
    age = 3600.0
    beating.beat()
    assert 3600 <= age_s(path) < 3660


def test_a_file_that_cannot_be_written_later_is_said_once_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    asked: list[None] = []

    def age() -> float:
        asked.append(None)
        return 0.0

    beating = Heartbeat(folder / "alive", age)
    beating.start()
    (folder / "alive").unlink()
    folder.rename(tmp_path / "moved")
    seen = len(asked)
    eventually(lambda: len(asked) > seen + 5, "it tries again")
    (tmp_path / "moved").rename(folder)
    eventually((folder / "alive").exists, "it is there again")
    beating.stop()
    assert caplog.text.count("the heartbeat file cannot be written") == 1


@pytest.mark.e2e
@pytest.mark.slow
def test_a_worker_whose_engine_hangs_is_told_from_one_without_redis(tmp_path: Path) -> None:
    path = tmp_path / "alive"
    path.write_text("of an earlier worker")
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2) as site:
        worker = site.worker(PETIOLE_HEARTBEAT_FILE=path)
        assert path.read_text() == "", "the earlier one was removed"
        site.server.kill()
        before = path.stat().st_mtime
        eventually(lambda: path.stat().st_mtime > before + 2, "it beats without Redis")
        site.server.start()
        eventually(lambda: worker.output.count("Connected to") == 2, "Redis is back")
        site.generate("hang:1", max_tokens=5)
        eventually(lambda: "the engine hangs" in worker.output, "it hangs")
        stood = path.stat().st_mtime
        eventually(lambda: time.time() > stood + 3, "time passes")
        assert path.stat().st_mtime < stood + 1
        worker.kill()


@pytest.mark.e2e
def test_a_heartbeat_file_that_cannot_be_written_ends_the_worker_with_one_line(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        worker = site.start_worker(PETIOLE_HEARTBEAT_FILE=tmp_path / "no" / "alive")
        assert worker.ended() == 2
        assert "PETIOLE_HEARTBEAT_FILE: must be a file that can be written" in worker.output
        assert "Traceback" not in worker.output

"""Which disks a worker looks at, and how full they are."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest
from huggingface_hub.constants import HF_HUB_CACHE

from petiole.tasks.settings import Settings
from petiole.tasks.worker.reports import disks
from petiole.tasks.worker.reports.disks import Disk, Disks, disk_of, folders_of
from tests.support.site import eventually


def test_it_looks_at_what_it_needs_room_in() -> None:
    """A tier of KV fills its volume, and evicts."""
    assert folders_of(Settings()) == [HF_HUB_CACHE]
    settings = Settings(kv_tier="/kv", batch_files="/rows,s3://rows", gateway_files="/files")
    assert folders_of(settings) == ["/rows", "/files", HF_HUB_CACHE]


def test_a_disk_is_told_once_and_a_folder_that_is_not_there_not_at_all(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    looking = Disks(map(str, (tmp_path / "nowhere", *folders)))
    for thread in looking._threads:
        thread._work()
    [(folder, free)] = looking.report()["disks"].items()
    assert folder == str(folders[0])
    assert 0 <= free <= 1


def test_what_it_may_not_write_to_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a hub's cache that is mounted for reading: it is as full as its models make it."""
    assert disk_of(str(tmp_path)) is not None
    monkeypatch.setattr(disks.os, "access", lambda folder, mode: mode != disks.os.W_OK)
    assert disk_of(str(tmp_path)) is None


def test_a_folder_that_hangs_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, numbers = Event(), {"/nfs": 1, "/rows": 2}

    def look(folder: str) -> Disk:
        if folder == "/nfs":
            hung.wait()
        return Disk(numbers[folder], 0.5, disks.time.monotonic())

    monkeypatch.setattr(disks, "disk_of", look)
    looking = Disks(numbers)
    looking.start()
    try:
        eventually(lambda: looking.report() == {"disks": {"/rows": 0.5}}, "the other folder is seen")
        monkeypatch.setattr(disks, "KEPT_S", 0.0)
        assert looking.report() == {"disks": {}}, "an old figure says nothing of now"
    finally:
        hung.set()
        for thread in looking._threads:
            thread.stop()

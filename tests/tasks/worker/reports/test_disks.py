"""Which disks a worker looks at, and how full they are."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE

from petiole.tasks.settings import Settings
from petiole.tasks.worker.reports.disks import folders_of, free_shares


def test_it_looks_at_what_it_writes_to() -> None:
    assert folders_of(Settings()) == [HF_HUB_CACHE]
    settings = Settings(kv_tier="/kv", batch_files="/rows,s3://rows", gateway_files="/files")
    assert folders_of(settings) == ["/kv", "/rows", "/files", HF_HUB_CACHE]


def test_a_disk_is_told_once_and_a_folder_that_is_not_there_not_at_all(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    [(folder, free)] = free_shares(map(str, (tmp_path / "nowhere", *folders))).items()
    assert folder == str(folders[0])
    assert 0 <= free <= 1

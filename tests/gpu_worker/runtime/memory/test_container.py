"""Limits of control groups, as a container shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.memory import container
from petiole.gpu_worker.runtime.runtime import ModelRuntime

GIB = 2**30


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty mount of control groups; this process is in /pod/worker of version 2."""
    (tmp_path / "membership").write_text("0::/pod/worker\n")
    monkeypatch.setattr(container, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(container, "_MOUNT", tmp_path / "mount")
    return tmp_path / "mount"


def put(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_without_groups_there_is_no_limit(mount: Path) -> None:
    assert container.cpu_quota() is None
    assert container.memory_left() is None


def test_without_limits_there_is_none(mount: Path) -> None:
    put(mount / "pod/worker", cpu__max="max 100000", memory__max="max", memory__current="1000")
    assert container.cpu_quota() is None
    assert container.memory_left() is None


@pytest.mark.parametrize("page", [2**12, 2**14, 2**16])
def test_version_1_shows_a_number_where_there_is_no_limit(mount: Path, page: int) -> None:
    container._MEMBERSHIP.write_text("4:memory:/docker/x\n0::/\n")
    unlimited = str((2**63 - 1) // page * page)
    put(mount / "memory/docker/x", memory__limit_in_bytes=unlimited, memory__usage_in_bytes="1000")
    assert container.memory_left() is None


def test_the_least_limit_on_the_way_up_counts(mount: Path) -> None:
    put(mount / "pod/worker", cpu__max="400000 100000", memory__max=str(8 * GIB), memory__current=str(GIB))
    put(mount / "pod", cpu__max="150000 100000", memory__max=str(4 * GIB), memory__current=str(3 * GIB))
    assert container.cpu_quota() == 1.5
    assert container.memory_left() == GIB


def test_cached_files_are_free(mount: Path) -> None:
    put(
        mount,  # where a container sees its own group
        memory__max=str(4 * GIB),
        memory__current=str(3 * GIB),
        memory__stat=f"anon {GIB}\ninactive_file {2 * GIB}",
    )
    assert container.memory_left() == 3 * GIB


def test_version_1(mount: Path) -> None:
    container._MEMBERSHIP.write_text("5:memory:/docker/x\n4:cpu,cpuacct:/docker/x\n0::/\n")
    put(mount / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    put(mount / "cpu/docker/x", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    put(
        mount / "memory",
        memory__limit_in_bytes=str(2 * GIB),
        memory__usage_in_bytes=str(GIB),
        memory__stat="total_inactive_file 0",
    )
    assert container.cpu_quota() == 2.5
    assert container.memory_left() == GIB


def test_the_kv_cache_stays_within_the_containers_memory(mount: Path) -> None:
    put(mount, memory__max=str(2**20), memory__current="0")
    assert container.host_memory_left() == 2**20


def test_what_a_container_may_ever_take_does_not_depend_on_what_it_holds(mount: Path) -> None:
    put(mount, memory__max=str(2**20), memory__current=str(2**19), memory__stat="active_file 500000")
    assert container.host_memory() == 2**20


@pytest.mark.parametrize(("quota", "asked", "threads"), [("190000", 0, 1), ("50000", 0, 1), ("100000", 2, 2)])
def test_threads_follow_the_quota_unless_they_are_set(mount: Path, quota: str, asked: int, threads: int) -> None:
    put(mount, cpu__max=f"{quota} 100000")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        ModelRuntime(EngineConfig(num_threads=asked, device="cpu")).close()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)

"""How full the disks are that this worker needs room on: of batches' files, of downloaded models.

The tier of KV is not among them: it fills the volume that it has, and evicts.

A look at a disk of another machine's may hang. So each folder has a thread of its own that looks, and a report has
what they saw within the last minute."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from huggingface_hub.constants import HF_HUB_CACHE

from petiole.tasks.settings import Settings
from petiole.tasks.worker.periodic import Periodic

LOOK_S = 5.0
KEPT_S = 60.0
"""How long a report has a figure after the look. A folder whose looks hang is left out then."""


class Disk(NamedTuple):
    """`device`: the number by which the system knows it. `free`: the share of it that is free for this user.
    `at`: of the look, by the monotonic clock."""

    device: int
    free: float
    at: float


def folders_of(settings: Settings) -> list[str]:
    """Those that a worker with these settings needs room in."""
    return [*(root for root in settings.batch_roots if "://" not in root), HF_HUB_CACHE]


def disk_of(folder: str) -> Disk | None:
    """None if the folder is not there, or this user may not write to it."""
    try:
        device, space = os.stat(folder).st_dev, shutil.disk_usage(folder)
    except OSError:
        return None
    if not space.total or not os.access(folder, os.W_OK):
        return None
    return Disk(device, round(space.free / space.total, 4), time.monotonic())


class Disks:
    def __init__(self, folders: Iterable[str]) -> None:
        self._seen: dict[str, Disk | None] = dict.fromkeys(folders)
        self._threads = [Periodic("petiole-disk", partial(self._look, folder)) for folder in self._seen]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`. Of a disk's folders the first one stands for it."""
        free, devices, oldest = dict[str, float](), set[int](), time.monotonic() - KEPT_S
        for folder, disk in self._seen.items():
            if disk is not None and disk.at > oldest and disk.device not in devices:
                devices.add(disk.device)
                free[folder] = disk.free
        return {"disks": free}

    def _look(self, folder: str) -> float:
        self._seen[folder] = disk_of(folder)
        return LOOK_S

"""How full the disks are that this worker uses: of its tier of KV, of batches' files, of downloaded models.

A look at a disk of another machine's may hang. So a thread of its own looks, and a report has what it saw last."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE

from petiole.tasks.settings import Settings
from petiole.tasks.worker.periodic import Periodic

LOOK_S = 5.0


def folders_of(settings: Settings) -> list[str]:
    """Those that a worker with these settings writes to."""
    local = [root for root in settings.batch_roots if "://" not in root]
    return [*filter(None, [settings.kv_tier]), *local, HF_HUB_CACHE]


def free_shares(folders: Iterable[str]) -> dict[str, float]:
    """By folder, the share of its disk that is free for this user. Of a disk's folders the first one stands for
    it. Folders that are not there are left out."""
    found, seen = dict[str, float](), set[int]()
    for folder in folders:
        try:
            disk, space = os.stat(folder).st_dev, shutil.disk_usage(folder)
        except OSError:
            continue
        if space.total and disk not in seen:
            seen.add(disk)
            found[folder] = round(space.free / space.total, 4)
    return found


class Disks:
    def __init__(self, folders: Iterable[str]) -> None:
        self._folders = tuple(folders)
        self._free: dict[str, float] = {}
        self._thread = Periodic("petiole-disks", self._look)

    def start(self) -> None:
        self._thread.start()

    def report(self) -> dict[str, Any]:
        """Fields of a `WorkerReport`."""
        return {"disks": self._free}

    def _look(self) -> float:
        self._free = free_shares(self._folders)
        return LOOK_S

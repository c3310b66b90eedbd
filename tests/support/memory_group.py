"""Groups of processes that have a limit of memory, as containers have: the kernel kills who takes more.

They are control groups, version 1 or 2, of this machine. Most machines let only root make them."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_NAMES = (
    ("memory.max", "memory.current", "memory.events"),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "memory.oom_control",
    ),
)


class MemoryGroup:
    """Raises OSError if this machine lets nobody make one."""

    def __init__(self, name: str) -> None:
        version_1 = _MOUNT / "memory"
        self._folder = (version_1 if version_1.is_dir() else _MOUNT) / name
        self._folder.mkdir()
        names = next((names for names in _NAMES if (self._folder / names[0]).exists()), None)
        if names is None:
            self._folder.rmdir()
            raise OSError(f"{self._folder}: has no memory controller")
        self._limit, self._used, self._events = (self._folder / name for name in names)

    def add(self, pid: int) -> None:
        """What the process takes from now on counts."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def used(self) -> int:
        """Bytes."""
        return int(self._used.read_text())

    def limit(self, most: int) -> None:
        """Bytes. Nothing of it may be swapped out."""
        for swap in ("memory.swap.max", "memory.swappiness"):
            with suppress(OSError):
                (self._folder / swap).write_text("0")
        self._limit.write_text(str(most))

    @property
    def kills(self) -> int:
        """How many processes of it the kernel has killed for memory."""
        words = dict(line.split() for line in self._events.read_text().splitlines())
        return int(words["oom_kill"])

    def close(self) -> None:
        """Its processes have ended."""
        for _ in range(100):
            with suppress(OSError):  # the kernel has not let go of the last one
                self._folder.rmdir()
                return
            time.sleep(0.05)

"""The CPU and memory limits of the control groups of this process, which torch and /proc/meminfo do not report.

The limit of a group applies to all groups below it, so the smallest one on the path to the root counts. Versions 1
and 2 are read. A container may see its own group at the root of the mount, whatever path /proc/self/cgroup shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")

_UNLIMITED = 2**60
"""Version 1 has no word for "no limit": it shows the largest number of whole pages, which is below 2**63."""


def cpu_quota() -> float | None:
    """The CPU quota in processors; None without a limit."""
    quotas = []
    for group in _groups("cpu"):
        version_1 = f"{_text(group / 'cpu.cfs_quota_us')} {_text(group / 'cpu.cfs_period_us')}"
        words = (_text(group / "cpu.max") or version_1).split()
        if len(words) == 2 and all(map(str.isdecimal, words)):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_left() -> int | None:
    """Bytes left below the limit, counting inactive file cache as free; None without a limit."""
    left = [most - used + cache for most, used, cache in _memory()]
    return max(0, min(left)) if left else None


def _memory() -> Iterator[tuple[int, int, int]]:
    """Bytes of each group: its limit, what it uses, and what of that is inactive file cache."""
    for group in _groups("memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, used = _text(group / limit), _text(group / usage)
            if most.isdecimal() and used.isdecimal() and int(most) < _UNLIMITED:
                stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines())
                yield int(most), int(used), int(stat.get(cache, 0))


def _groups(controller: str) -> Iterator[Path]:
    """This process's group of a controller, and its ancestors."""
    for line in _text(_MEMBERSHIP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = _MOUNT / controller if controllers else _MOUNT
        parts = Path(path).parts[1:]
        for depth in range(len(parts) + 1 if ".." not in parts else 1):
            yield mount.joinpath(*parts[:depth])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def host_memory_left() -> int:
    """Bytes of the machine's memory that this process may still take."""
    limit, available = memory_left(), _of_machine("MemAvailable", 4 * 2**30)
    return available if limit is None else min(available, limit)


def host_memory() -> int:
    """Bytes of the machine's memory that this process may ever take."""
    return min([_of_machine("MemTotal", _UNLIMITED), *(most for most, _, _ in _memory())])


def _of_machine(name: str, otherwise: int) -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            line = next(line for line in lines if line.startswith(name))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return otherwise

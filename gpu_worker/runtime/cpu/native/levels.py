"""The levels of processors for which an image brings the CPU kernels, compiled ahead.

A machine with a compiler compiles for its own processor and needs no levels. An image is made on one machine and
runs on others, without a compiler: it brings one library for each level, and a worker loads the best that its
processor has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """Instructions that a library uses."""

    name: str
    flags: tuple[str, ...]
    """For gcc or clang, in the place of `-march=native`."""
    needs: frozenset[str]
    """The names of these instructions in /proc/cpuinfo."""
    tiles: bool = False
    """Whether a process needs Linux's permission for them."""


_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vbmi", "avx512_vnni"}
_BF16_FLAGS = ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")

LEVELS = {
    "x86_64": (
        Level("amx", (*_BF16_FLAGS, "-mamx-tile", "-mamx-bf16"), _BF16 | {"amx_bf16", "amx_tile"}, tiles=True),
        Level("avx512-bf16", _BF16_FLAGS, _BF16),
        Level("avx512", ("-march=x86-64-v4",), _V4),
        Level("avx2", ("-march=x86-64-v3",), _V3),
    ),
    "aarch64": (Level("armv8", ("-march=armv8-a",), frozenset()),),
}
"""By machine, the best first."""


def fitting(machine: str, processor: str, *, tiles: bool) -> Iterator[Level]:
    """The levels that a processor has, the best first. `processor`: its line of /proc/cpuinfo."""
    has = frozenset(processor.split())
    return (level for level in LEVELS.get(machine, ()) if level.needs <= has and (tiles or not level.tiles))

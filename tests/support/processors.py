"""The CPU kernels as compiled for processors with fewer instructions than this one, which it can run."""

from __future__ import annotations

import ctypes
import platform
from functools import cache

import pytest

from petiole.gpu_worker.runtime.cpu.native import build
from petiole.gpu_worker.runtime.cpu.native.build import Level, fitting

_TUNED = ("-mtune=znver3",)
"""For this processor gcc likes to round some products apart from their sums, and others not."""


def _levels() -> dict[str, Level]:
    if platform.machine() != "x86_64":
        return {}
    levels = list(fitting("x86_64", build._processor(), tiles=False))
    levels.append(Level("x86-64", ("-march=x86-64",), frozenset()))
    return {level.name: Level(level.name, (*level.flags, *_TUNED), level.needs) for level in levels}


THIS = "this processor"
_LEVELS = _levels()
FEWER = [pytest.param(name, marks=() if name == "avx2" else pytest.mark.slow) for name in _LEVELS]
"""To compile for each takes a minute, so one is in every run: the one whose instructions most machines have."""
PROCESSORS = [THIS, *FEWER]


@cache
def kernels_for(processor: str) -> ctypes.CDLL:
    """One of PROCESSORS -> its kernels, compiled once on this machine. Skips the test if there is no compiler."""
    with pytest.MonkeyPatch.context() as patch:
        if processor != THIS:
            patch.setattr(build, "_FLAGS", build._flags_ahead(_LEVELS[processor]))
        library = build.load_library() if processor == THIS else build.load_library.__wrapped__()
    if library is None:
        pytest.skip("no C compiler")
    return library

"""A fault at any call: the k-th function that a piece of the engine calls raises instead of running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

CALLERS = ("/petiole/gpu_worker/", "/petiole/cache/allocation.py")
"""Whose calls fail: the engine's, and those of the KV manager to the page table and the caches."""


class InjectedFaultError(Exception):
    """A defect of the host."""


class Interrupted:
    """Calls functions. The `left`-th call that the engine makes in all of them raises `InjectedFaultError`.
    `place`: where that was, or None."""

    def __init__(self, left: int = 0) -> None:
        self.left = left
        self.place: str | None = None

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.place is not None:
            return function(*args, **kwargs)
        outer = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function(*args, **kwargs)
        finally:
            sys.settrace(outer if self.place is None else None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> None:
        code, caller = frame.f_code, frame.f_back and frame.f_back.f_code
        if event != "call" or caller is None or "/petiole/" not in code.co_filename:
            return
        if not any(part in caller.co_filename for part in CALLERS):
            return
        self.left -= 1
        if self.left == 0:
            self.place = f"{code.co_qualname}, called by {caller.co_qualname}"
            raise InjectedFaultError(self.place)

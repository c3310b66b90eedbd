"""A fault at any call: a function that a piece of the engine calls raises instead of running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

CALLERS = ("/petiole/gpu_worker/", "/petiole/cache/")
"""Whose calls fail: those of the engine, and those of the page table and the caches."""


class InjectedFaultError(Exception):
    """A defect of the host."""


class Interrupted:
    """Calls functions. The first call that the engine makes in them and that `chooses` picks, by its place, raises
    `InjectedFaultError`. `place`: where that was, or None; set it to None for another fault."""

    def __init__(self, chooses: Callable[[str], bool]) -> None:
        self.chooses = chooses
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
        code, calling = frame.f_code, frame.f_back
        own = "/petiole/" in code.co_filename or code.co_filename == "<string>"  # made by dataclasses
        if event != "call" or calling is None or not own or code.co_name == "<genexpr>":
            return
        caller = calling.f_code
        if not any(part in caller.co_filename for part in CALLERS):
            return
        place = f"{code.co_qualname}, called by {caller.co_qualname}:{calling.f_lineno}"
        if self.chooses(place):
            self.place = place
            raise InjectedFaultError(place)

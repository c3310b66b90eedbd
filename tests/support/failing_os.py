"""A module `os` whose calls fail now and then, as those of a full, slow or broken disk do."""

from __future__ import annotations

import os
import random
import time
from typing import Any


class FailingOs:
    """Stands in for `os`. Each call raises at this share, or takes up to `longest_s` before it is made."""

    def __init__(self, rng: random.Random, share: float, longest_s: float = 0.0) -> None:
        self._rng, self._share, self._longest_s = rng, share, longest_s

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if not callable(real) or name in ("close", "geteuid"):
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._longest_s:
                time.sleep(self._rng.random() * self._longest_s)
            if self._rng.random() < self._share:
                raise OSError(self._rng.choice([5, 12, 28, 30]), f"injected in {name}")
            return real(*args, **kwargs)

        return call

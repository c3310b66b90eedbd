"""What is kept of the latest constraints."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

MOST = 64
MOST_CHARACTERS = 2 * 2**20
"""The length of all texts that the values were made of: a compiled grammar takes up to some 400 bytes a
character."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """The values that were used last: at most `MOST`, of at most `MOST_CHARACTERS`. Thread-safe."""

    def __init__(self) -> None:
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._values.get(key)
            if found is None:
                return None
            self._values.move_to_end(key)
            return found[0]

    def keep(self, key: K, value: V, characters: int) -> None:
        with self._lock:
            self._characters += characters - self._values.pop(key, (value, 0))[1]
            self._values[key] = value, characters
            while len(self._values) > MOST or self._characters > MOST_CHARACTERS:
                _, (_, left) = self._values.popitem(last=False)
                self._characters -= left

"""Features of encoded images, kept for prompts whose KV is not cached: a picture behind another prefix has other
keys and values, and the same features. Nobody learns from the time that a picture takes what others have asked
about: like KV, they are found by requests with the same salt alone."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor

Key = tuple[str | None, int]
"""The salt of a request, and the content hash of an image."""


class KeptFeatures:
    """By salt and content, those last used. budget: bytes of them all. hits: how many were found. made: how many
    were put. Used in stream order; the counts are read on any thread."""

    def __init__(self, budget: int) -> None:
        self._budget, self._bytes = budget, 0
        self._features: OrderedDict[Key, Tensor] = OrderedDict()
        self.hits = self.made = 0

    def get(self, key: Key) -> Tensor | None:
        found = self._features.get(key)
        if found is not None:
            self._features.move_to_end(key)
            self.hits += 1
        return found

    def put(self, key: Key, features: Tensor) -> None:
        """Features that are larger than the budget are not kept."""
        self.made += 1
        if features.nbytes > self._budget or key in self._features:
            return
        self._features[key] = features
        self._bytes += features.nbytes
        while self._bytes > self._budget:
            _, oldest = self._features.popitem(last=False)
            self._bytes -= oldest.nbytes

    def clear(self) -> None:
        """Other weights make other features."""
        self._features.clear()
        self._bytes = 0

"""Features of encoded images, kept for prompts whose KV is not cached: a picture behind another prefix has other
keys and values, and the same features."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor


class KeptFeatures:
    """By the content of an image, those last used. budget: bytes of them all. hits: how many were found. Used in
    stream order."""

    def __init__(self, budget: int) -> None:
        self._budget, self._bytes = budget, 0
        self._features: OrderedDict[int, Tensor] = OrderedDict()
        self.hits = 0

    def get(self, content_hash: int) -> Tensor | None:
        found = self._features.get(content_hash)
        if found is not None:
            self._features.move_to_end(content_hash)
            self.hits += 1
        return found

    def put(self, content_hash: int, features: Tensor) -> None:
        """Features that are larger than the budget are not kept."""
        if features.nbytes > self._budget or content_hash in self._features:
            return
        self._features[content_hash] = features
        self._bytes += features.nbytes
        while self._bytes > self._budget:
            _, oldest = self._features.popitem(last=False)
            self._bytes -= oldest.nbytes

    def clear(self) -> None:
        """Other weights make other features."""
        self._features.clear()
        self._bytes = 0

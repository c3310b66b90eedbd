"""Features are kept on a budget: those last used, of each salt its own."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from petiole.gpu_worker.runtime.memory.features import KeptFeatures


def key(image: int) -> tuple[str, int]:
    """Some differ in their salt alone."""
    return "ab"[image % 2], image // 2


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=40), st.integers(0, 40))
def test_those_last_used_within_the_budget(uses: list[tuple[int, int]], budget: int) -> None:
    """Against a list. Each image has one size."""
    kept, sizes, naive = KeptFeatures(4 * budget), dict[int, int](), list[int]()
    hits = made = 0
    for image, size in uses:
        size = sizes.setdefault(image, size)
        found = kept.get(key(image))
        assert (found is not None) == (image in naive)
        if found is None:
            made += 1
            kept.put(key(image), torch.full((size,), float(image)))
        else:
            hits += 1
            assert found.tolist() == [float(image)] * size
        if image in naive:
            naive.remove(image)
        if size <= budget:
            naive.append(image)
        while sum(sizes[one] for one in naive) > budget:
            naive.pop(0)
    assert (kept.hits, kept.made) == (hits, made)
    kept.clear()
    assert all(kept.get(key(image)) is None for image in range(7))

"""Features are kept on a budget: those last used."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from petiole.gpu_worker.runtime.memory.features import KeptFeatures


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=40), st.integers(0, 40))
def test_those_last_used_within_the_budget(uses: list[tuple[int, int]], budget: int) -> None:
    """Against a list. Each image has one size."""
    kept, sizes, naive, hits = KeptFeatures(4 * budget), dict[int, int](), list[int](), 0
    for image, size in uses:
        size = sizes.setdefault(image, size)
        found = kept.get(image)
        assert (found is not None) == (image in naive)
        if found is None:
            kept.put(image, torch.full((size,), float(image)))
        else:
            hits += 1
            assert found.tolist() == [float(image)] * size
        if image in naive:
            naive.remove(image)
        if size <= budget:
            naive.append(image)
        while sum(sizes[one] for one in naive) > budget:
            naive.pop(0)
    assert kept.hits == hits
    kept.clear()
    assert all(kept.get(image) is None for image in range(7))

"""Rows of texts that are computed whole: they come and go like others, and take no pages."""

from __future__ import annotations

import random

import numpy as np
import pytest

from petiole.cache import KVAllocation, OutOfRowsError, build_manager
from petiole.cache.exceptions import RowError

ROWS = 5


@pytest.mark.parametrize("seed", range(5))
def test_texts_of_any_length_take_rows_alone(seed: int) -> None:
    draw, manager = random.Random(seed), build_manager("radix", 1, 16, ROWS + 1, 4)
    running: list[tuple[KVAllocation, list[int]]] = []
    for _ in range(200):
        if draw.random() < 0.5:
            tokens = [draw.randrange(1, 50) for _ in range(draw.choice((1, 16, 100, 5000)))]
            assert manager.can_start(tokens) == (len(running) < ROWS)
            assert manager.pages_to_start(tokens) == 0
            allocation = manager.start(tokens, kv_length=len(tokens))
            assert (allocation is None) == (len(running) == ROWS)
            if allocation is not None:
                assert allocation.reused == 0, "nothing is cached"
                assert manager.new_pages(allocation.row, len(tokens)) == 0
                assert allocation.reserve(len(tokens))
                running.append((allocation, tokens))
        elif running:
            allocation, tokens = running.pop(draw.randrange(len(running)))
            rows = np.array([allocation.row], np.int32)
            assert manager.table.reserve_many(rows, np.array([len(tokens)], np.int32)) == 1
            allocation.publish(tokens, len(tokens))
            assert allocation.share(len(tokens)) == 0
            assert allocation.trim(len(tokens)) == 0
            if draw.random() < 0.5:
                allocation.finish(tokens, len(tokens))
            else:
                allocation.discard()
        manager.check()
        usage = manager.usage()
        assert (usage.pages_total, usage.pages_free, usage.pages_private, usage.pages_cached) == (0, 0, 0, 0)
        assert usage.rows_held == len(running)
    assert len({allocation.row for allocation, _ in running}) == len(running)


def test_rows_that_nobody_holds_are_refused() -> None:
    table = build_manager("off", 1, 1, 3).table
    with pytest.raises(RowError):
        table.reserve_many(np.array([1], np.int32), np.array([4], np.int32))
    table.allocate()
    table.allocate()
    with pytest.raises(OutOfRowsError):
        table.allocate()

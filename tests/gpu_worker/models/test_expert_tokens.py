"""Every expert's positions are counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.harness.driver import Driver
from petiole.gpu_worker.engine.statistics import imbalance
from tests.gpu_worker.models.test_logits import ALL, tokens


def test_positions_are_counted_by_layer_and_expert(
    checkpoint: Callable[[str], tuple[Path, Any]], open_runtime: Callable[..., Any]
) -> None:
    runtime = open_runtime(checkpoint("glm4-moe")[0])
    assert [sum(layer) for layer in runtime.expert_tokens()] == [0, 0], "the first of three layers is dense"
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (20, 9)]
    driver.prefill(sequences)
    driver.decode(sequences)
    first, last = runtime.expert_tokens()
    assert len(first) == len(last) == 12
    assert sum(first) == 3 * (29 + 2), "each position takes three experts"
    assert sum(last) in (sum(first), 3 * (2 + 2)), "of the last layer, compiled code computes the outputs alone"
    assert first[0] == last[0] == 0, "nobody chooses the expert whose correction is low"


def test_a_model_without_experts_counts_none(
    checkpoint: Callable[[str], tuple[Path, Any]], open_runtime: Callable[..., Any]
) -> None:
    assert not open_runtime(checkpoint("qwen3")[0]).expert_tokens()


@pytest.mark.parametrize(
    ("counted", "expected"), [([], 0.0), ([[0, 0]], 0.0), ([[3, 3], [0, 0]], 1.0), ([[4, 0], [1, 1]], 1.5)]
)
def test_the_balance_of_experts(counted: list[list[int]], expected: float) -> None:
    assert imbalance(counted) == expected

"""Which steps are captured as graphs. A captured step serves all smaller steps of its layout, padded.

    decode, verify   all rows have the same number of positions (`Shape.queries`). There is one graph per batch
                     size of a ladder.
    append           rows of any number of positions, one after the other: prefills and mixed steps. There are two
                     graphs for each number of tokens of a ladder: for few rows, and for as many as there may be.

FlashInfer must know the number of rows of a captured step. It may split each of a few rows among several blocks of
the card. With many rows, the blocks have enough to do without splitting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from petiole.contract.settings.engine import EngineConfig

FEW_ROWS = 8

MOST_TOKENS = 512
"""Maximum number of prompt tokens in a captured step. From some hundreds of tokens on, the arithmetic takes the
card longer than the launches take the host, and padding costs as much as tokens."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The room of a captured step. queries: the positions of each row; 0: any number."""

    rows: int
    positions: int
    queries: int = 0


def batch_ladder(asked: Sequence[int], most: int) -> list[int]:
    """Batch sizes to capture graphs for: the configured ones, or 1, 2, 4, every 8th to 64, every 16th to 256, …"""
    if asked:
        return sorted({min(size, most) for size in asked})
    steps = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 64, 64)]
    return sorted({min(size, most) for size in steps})


def token_ladder(config: EngineConfig) -> list[int]:
    """Numbers of tokens to capture graphs for: 16, 32, 64, and every 128th up to a chunk. With mixed steps: up to
    a chunk beside a decode of every sequence."""
    most = min(config.chunk_size, MOST_TOKENS)
    if config.mixes:
        most += config.max_num_seqs
    return sorted({min(n, most) for n in (16, 32, 64, *range(128, most + 128, 128))})


def uniform_shapes(config: EngineConfig, queries: int) -> list[Shape]:
    """The shapes of decodes (one query) or verifications, the smallest first."""
    ladder = batch_ladder(config.graph_batch_sizes, config.max_num_seqs)
    return [Shape(rows, rows * queries, queries) for rows in ladder]


def append_shapes(config: EngineConfig, longest: int) -> list[Shape]:
    """The shapes of prefills and mixed steps, the smallest first. longest: maximum positions of a row."""
    shapes = []
    for positions in token_ladder(config):
        most = min(positions, config.max_num_seqs)
        shapes += [Shape(rows, positions) for rows in sorted({min(FEW_ROWS, most), most})]
    return [shape for shape in shapes if shape.positions <= shape.rows * longest]

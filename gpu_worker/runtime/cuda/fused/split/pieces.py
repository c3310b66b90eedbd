"""Where the keys of rows are cut, and what the launches over their pieces read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 256
"""Positions of a piece, at most, while a row has no more than `MOST_PIECES`."""

MOST_PIECES = 32
"""Of a row. Longer rows have longer pieces, because parts take memory: a piece of 32 heads of 128 takes 16 KiB."""

TILE = 64
"""Positions that a program computes at a time. Pieces are whole tiles, but for the last one of a row."""

FIELDS = 8
"""Numbers of a piece in the list: its row, where it begins and ends, the row's length, the place of the row's
first page in the page list, and the number of the row's pieces. The rest is not used."""


def piece_length(length: int) -> int:
    """Positions of each piece of a row but the last one, which may be shorter. length: positions that its queries
    see, at least 1."""
    longest = max(PIECE, _rounded_up(-(-length // MOST_PIECES)))
    return _rounded_up(-(-length // -(-length // longest)))


def _rounded_up(positions: int) -> int:
    return -(-positions // TILE) * TILE


def most_pieces(longest: int) -> int:
    """Of a row with so many positions, or fewer."""
    return min(MOST_PIECES, -(-longest // PIECE))


@dataclass(frozen=True, slots=True)
class Pieces:
    """The list of a step. listed: int32 [most, FIELDS], the longest pieces first; of_rows: int32 [3, rows], the
    place of each row's first piece in it, behind which all others lie but the last, the place of that one, and how
    many the row has; count: int32 [1], of all rows."""

    listed: Tensor
    of_rows: Tensor
    count: Tensor

    @staticmethod
    def empty(rows: int, longest: int, device: torch.device) -> Pieces:
        sizes = ((rows * most_pieces(longest), FIELDS), (3, rows), (1,))
        return Pieces(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))


@dataclass(frozen=True, slots=True)
class SplitLayers:
    """What the launches of all layers of one kind read. scale, window (0: none) and softcap (0: none): of the
    scores; queries: positions of a row in the step; indices: the page list, int32. parts: float32, of all pieces,
    heads of keys and their queries; sums: float32, the logarithms, of base 2, of their sums of weights. These two
    hold nothing between layers. programs: of a launch."""

    heads: int
    kv_heads: int
    width: int
    scale: float
    window: int
    softcap: float
    queries: int
    page_size: int
    indices: Tensor
    pieces: Pieces
    parts: Tensor
    sums: Tensor
    programs: int

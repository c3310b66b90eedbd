"""What stands between the features of a picture: tokens of text, whose embeddings are positions of the picture,
too.

Mistral    [IMG] [IMG] [IMG_BREAK]                  a row of blocks
           [IMG] [IMG] [IMG_END]
SmolVLM    <fake> <row_1_col_1> <image> x 64 ...    a tile, row by row, and a line's end behind each row
           <fake> <global-img>  <image> x 64 <fake> the whole picture"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from petiole.gpu_worker.models.checkpoint.named_tokens import NamedTokens


class Writing(Protocol):
    @property
    def tokens(self) -> Sequence[int]:
        """All that may stand between features, each once."""
        ...

    def of(self, blocks: Sequence[tuple[int, int]], tiling: tuple[int, int]) -> list[int]:
        """The positions of a picture: tokens, and -n for the next n features. blocks: rows and columns of each of
        its tiles, or of the picture alone; tiling: rows and columns of tiles."""
        ...


@dataclass(frozen=True, slots=True)
class RowEnds:
    """A token behind each row of blocks, and another behind the last one."""

    between: int
    last: int

    @property
    def tokens(self) -> Sequence[int]:
        return self.between, self.last

    def of(self, blocks: Sequence[tuple[int, int]], tiling: tuple[int, int]) -> list[int]:
        ((rows, columns),) = blocks
        return [*[-columns, self.between] * (rows - 1), -columns, self.last]


@dataclass(frozen=True, slots=True)
class Tiles:
    """around: before each tile; places: by row and column, behind that; whole: before the whole picture; line: a
    line's end, behind each row of tiles; lines: two of them, behind the last row."""

    around: int
    places: tuple[tuple[int, ...], ...]
    whole: int
    line: int
    lines: tuple[int, ...]

    @property
    def tokens(self) -> Sequence[int]:
        every = (self.around, self.whole, self.line, *self.lines, *(one for row in self.places for one in row))
        return tuple(dict.fromkeys(every))

    def of(self, blocks: Sequence[tuple[int, int]], tiling: tuple[int, int]) -> list[int]:
        *tiles, whole = (rows * columns for rows, columns in blocks)
        found, (rows, columns) = list[int](), tiling
        for k, size in enumerate(tiles):
            row, column = divmod(k, columns)
            found += [self.around, self.places[row][column], -size]
            if column == columns - 1:
                found += self.lines if row == rows - 1 else (self.line,)
        return [*found, self.around, self.whole, -whole, self.around]


def row_ends(tokens: NamedTokens) -> RowEnds:
    """The tokens of Mistral's models. Raises ModelError, as `smol_tiles`."""
    return RowEnds(tokens.of("[IMG_BREAK]", "image_break_token"), tokens.of("[IMG_END]", "image_end_token"))


def smol_tiles(tokens: NamedTokens) -> Tiles:
    """The tokens of SmolVLM, for as many rows and columns as it has tokens for."""
    around, whole = tokens.of("<fake_token_around_image>"), tokens.of("<global-img>")
    line, lines = tokens.of("Ċ"), tokens.find("ĊĊ")  # as the tokenizer's file spells a line's end
    most = next(n for n in count(1) if tokens.find(f"<row_{n}_col_{n}>") is None) - 1
    sides = range(1, most + 1)
    places = tuple(tuple(tokens.of(f"<row_{row}_col_{column}>") for column in sides) for row in sides)
    return Tiles(around, places, whole, line, (line, line) if lines is None else (lines,))

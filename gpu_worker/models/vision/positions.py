"""Learned positions of patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Positions(Protocol):
    def of(self, rows: int, columns: int) -> Tensor:
        """[rows, columns, hidden]: what is added to the patches of a picture."""
        ...


@dataclass(frozen=True, slots=True)
class BentTable:
    """Between the entries of a square table, whose corners are those of the picture. table: [side², hidden]."""

    table: Tensor
    side: int

    def of(self, rows: int, columns: int) -> Tensor:
        side, place = self.side, self.table.device
        at = []
        for n in (rows, columns):
            along = torch.arange(n, device=place, dtype=torch.float32) * (side - 1) / max(n - 1, 1)
            low = along.floor()
            at.append((low.long(), (low.long() + 1).clamp(max=side - 1), along - low))
        (top, bottom, down), (left, right, across) = at
        found = torch.zeros((), device=place)
        for row, of_row in ((top, 1 - down), (bottom, down)):
            for column, of_column in ((left, 1 - across), (right, across)):
                entries = self.table[row[:, None] * side + column[None, :]]
                found = found + entries * (of_row[:, None] * of_column[None, :])[..., None]
        return found


@dataclass(frozen=True, slots=True)
class AxisTables:
    """The sum of what a column has and what a row has. tables: [2, most, hidden], of columns and of rows."""

    tables: Tensor

    def of(self, rows: int, columns: int) -> Tensor:
        across, down = self.tables[0], self.tables[1]
        return across[None, :columns] + down[:rows, None]


@dataclass(frozen=True, slots=True)
class NearestTable:
    """The entry of a square table in which each patch begins. table: [side², hidden]."""

    table: Tensor
    side: int

    def of(self, rows: int, columns: int) -> Tensor:
        place, at = self.table.device, []
        bounds = torch.arange(1 / self.side, 1.0, 1 / self.side, device=place)
        for n in (rows, columns):
            begins = torch.arange(n, dtype=torch.float32, device=place) * (1.0 / torch.tensor(n))
            at.append(torch.bucketize(begins.clamp(max=1 - 1e-6), bounds, right=True))
        return self.table[at[0][:, None] * self.side + at[1][None, :]]

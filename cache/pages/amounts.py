"""Amounts of pages: a number for a model with one pool, a number for each pool of a model with several.

The scheduler adds amounts and compares them, by the same code for both kinds. A number stands for as many pages of
each pool.
"""

from __future__ import annotations

from typing import TypeAlias


class PageCounts:
    """Pages of each pool. An amount is at most another if it is so in every pool, and more if it is not."""

    __slots__ = ("counts",)

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __add__(self, other: Amount) -> PageCounts:
        return PageCounts(*(a + b for a, b in zip(self.counts, self._of(other), strict=True)))

    __radd__ = __add__

    def __neg__(self) -> PageCounts:
        return PageCounts(*(-n for n in self.counts))

    def __sub__(self, other: Amount) -> PageCounts:
        return self + -other

    def __rsub__(self, other: Amount) -> PageCounts:
        return -self + other

    def __le__(self, other: Amount) -> bool:
        return all(a <= b for a, b in zip(self.counts, self._of(other), strict=True))

    def __ge__(self, other: Amount) -> bool:
        return all(a >= b for a, b in zip(self.counts, self._of(other), strict=True))

    def __gt__(self, other: Amount) -> bool:
        return not self <= other

    def __lt__(self, other: Amount) -> bool:
        return not self >= other

    def __repr__(self) -> str:
        return f"PageCounts{self.counts}"

    def _of(self, other: Amount) -> tuple[int, ...]:
        return other.counts if isinstance(other, PageCounts) else (other,) * len(self.counts)


Amount: TypeAlias = int | PageCounts

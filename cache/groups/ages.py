"""The order in which pages without a holder are taken back: those first that were given back longest ago.

Pages arrive in runs, as arrays, so adding and taking some hundreds of pages takes a few array operations. A page
that was used since has another time, so its entry in an older run is dead. Dead entries are dropped when they are
reached, or when most entries are dead.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from petiole.cache.exceptions import ConservationError
from petiole.cache.pages.page_pool import Pages

_SLACK = 1024


class AgeQueue:
    """Pages of a pool of `n_pages`, oldest first."""

    def __init__(self, n_pages: int) -> None:
        self._times = np.zeros(n_pages, dtype=np.int64)  # when a page was added; 0: it is not here
        self._runs: deque[tuple[int, Pages]] = deque()
        self._now = 0
        self._entries = 0
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def __contains__(self, page: int) -> bool:
        return bool(self._times[page])

    def add(self, pages: Pages) -> None:
        """Add distinct pages, as the youngest. A page that is here already becomes one of them."""
        if not len(pages):
            return
        self._now += 1
        self._live += int(np.count_nonzero(self._times[pages] == 0))
        self._times[pages] = self._now
        self._runs.append((self._now, pages))
        self._entries += len(pages)
        if self._entries > 2 * self._live + _SLACK:
            self._runs = deque((time, live) for time, run in self._runs if len(live := self._of(time, run)))
            self._entries = self._live

    def discard(self, pages: Pages) -> None:
        """Remove distinct pages, if they are here."""
        self._live -= int(np.count_nonzero(self._times[pages]))
        self._times[pages] = 0

    def take(self, count: int) -> Pages:
        """Remove and return the `count` oldest pages; all of them if there are fewer."""
        taken: list[Pages] = []
        missing = count
        while missing > 0 and self._runs:
            time, entries = self._runs[0]
            run = self._of(time, entries)
            self._runs.popleft()
            self._entries -= len(entries)
            if len(run) > missing:
                self._runs.appendleft((time, run[missing:]))
                self._entries += len(run) - missing
                run = run[:missing]
            self._times[run] = 0
            self._live -= len(run)
            missing -= len(run)
            taken.append(run)
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def check(self) -> None:
        """Raises ConservationError if a page is here and in no run, or counted wrongly."""
        queued = sum(len(self._of(time, run)) for time, run in self._runs)
        here = int(np.count_nonzero(self._times))
        if not queued == here == self._live:
            raise ConservationError(f"{here} pages are here, {queued} are in runs, and {self._live} are counted")

    def _of(self, time: int, run: Pages) -> Pages:
        live: Pages = run[self._times[run] == time]
        return live

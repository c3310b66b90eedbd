"""Whether more urgent requests come and go beside the lowest priority class.

A request that arrives waits for the step that is computed, and one that decodes for every second step of prompts.
While more urgent ones come and go, a step of the lowest class has one prompt's chunk, or several that are no more
than an eighth of a chunk together. A batch alone fills its steps: that is quicker wherever most of a step's time
goes into reading the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

RECENT_S = 60.0
PART = 8


@dataclass(slots=True)
class RecentDemand:
    """`lowest`: the class of the worst priority when somebody more urgent was last seen, before `until_s`."""

    lowest: float = math.inf
    until_s: float = -math.inf

    def see(self, best: int, worst: int, now: float) -> None:
        """The best and the worst priority of all requests at this time."""
        if best < worst:
            self.lowest, self.until_s = worst, now + RECENT_S

    def most(self, priority: int, positions: int, chunk: int, now: float) -> int:
        """How many positions several prompts of this priority may have in a step that may have `positions`."""
        limited = priority >= self.lowest and now < self.until_s
        return min(positions, max(1, chunk // PART)) if limited else positions

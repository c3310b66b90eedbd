"""Tasks that count as running although they have ended. The script that writes an end lets its task count no
longer. That of a worker of the version before does not, and nobody should wait an hour for it. So before a request
is refused for them, those that count are looked at."""

from __future__ import annotations

import time
from collections.abc import Sequence

from petiole.gateway.serving.patience import patiently
from petiole.tasks.keys import stream_keys
from petiole.tasks.servers import connections

LOOK_S = 1.0
"""How often those of one tenant, or of one key, are looked at, by one gateway."""


class Looks:
    """An event loop's: when each was looked at last."""

    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    async def forget_ended(self, keys: Sequence[str]) -> bool:
        """`keys`: of sorted sets of tasks. Returns whether any task counts no longer. Raises `Failure`."""
        now = time.monotonic()
        self._at = {key: at for key, at in self._at.items() if now - at < LOOK_S}
        due = [key for key in keys if key not in self._at]
        self._at |= dict.fromkeys(due, now)
        if not due:
            return False
        counted = await patiently(lambda: connections.aperform([("ZRANGE", key, 0, -1) for key in due]))
        tasks = sorted({task for of_key in counted for task in of_key})
        states = [("HGETALL", stream_keys(task.decode()).state) for task in tasks]
        found = await patiently(lambda: connections.aperform(states)) if states else []
        ended = [task for task, state in zip(tasks, found, strict=True) if b"done" in [*state]]
        if ended:
            await patiently(lambda: connections.aperform([("ZREM", key, *ended) for key in due]))
        return bool(ended)


looks = connections.PerLoop(Looks)
"""The running event loop's."""

"""The prefetch count of a worker that holds tasks with an `eta`.

Each such task raises the prefetch by one until it begins, up to a limit. kombu ignores an increment beyond the
limit, but still applies the matching decrement. So after exceeding the limit, a stock worker would be left with a
prefetch of one for good."""

from __future__ import annotations

import logging

from celery.worker.consumer import tasks as consuming
from kombu.common import QoS

logger = logging.getLogger(__name__)


class Prefetch(QoS):
    """`beyond`: increments refused by the limit whose decrements must be ignored."""

    beyond = 0

    def increment_eventually(self, n: int = 1) -> int:
        with self._mutex:
            if self.value:
                room = n if self.max_prefetch is None else min(n, max(0, self.max_prefetch - self.value))
                if room < n and not self.beyond:
                    logger.warning(
                        "no more tasks are taken until some of those held for their eta begin: "
                        "worker_eta_task_limit is %d",
                        self.max_prefetch,
                    )
                self.beyond += n - room
                self.value += room
            return int(self.value)

    def decrement_eventually(self, n: int = 1) -> int:
        with self._mutex:
            forgiven = min(n, self.beyond)
            self.beyond -= forgiven
            return int(super().decrement_eventually(n - forgiven))  # type: ignore[no-untyped-call]


def install() -> None:
    """Make all consumers of this process use `Prefetch`."""
    consuming.QoS = Prefetch

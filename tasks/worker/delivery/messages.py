"""The messages of one task that this worker has. A message may come again after a lost connection.

Only the consumer's thread calls methods. Other threads read `current`.
"""

from __future__ import annotations

import os

from petiole.tasks.worker.delivery.delivery import Delivery


class Messages:
    """`current` is the delivery that is answered with the task's outcome. The others are acknowledged."""

    def __init__(self, delivery: Delivery) -> None:
        self.current = delivery
        self.accepted_at: float | None = None
        self._superseded: list[Delivery] = []

    def add(self, delivery: Delivery) -> bool:
        """The message came again: keep the newer request, and accept it if the older one was accepted. Returns
        False if the newer one is not kept.

        Celery holds a request until its `eta`, so an old request may come after its message was lost. If the
        message has come again before that, the newer request is kept, because a requeued job must give it back.
        """
        if not delivery.held:
            self._superseded.append(delivery)
            return False
        self._superseded.append(self.current)
        self.current = delivery
        if self.accepted_at is not None:
            self.accept(self.accepted_at)
        return True

    def accept(self, at: float) -> None:
        """Report to Celery that the task began at `at` (of `time.monotonic`)."""
        self.accepted_at = at
        self.current.accept_callback(os.getpid(), at)

    def forget(self) -> None:
        """Acknowledge all but the current delivery."""
        for delivery in self._superseded:
            delivery.acknowledge()

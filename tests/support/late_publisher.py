"""A fake engine in a worker whose publisher, after a pause of the process, waits for a message to come again.

So the worker has its own task back before it hears that another worker had it meanwhile.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from petiole.contract.settings.engine import EngineConfig
from petiole.tasks.worker.generation.driver import JobDriver
from petiole.tasks.worker.output.publisher import Publisher
from tests.support.fake_engine import FakeEngine

PAUSE_S = 1.5


class LatePublisherEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        came_again, rebind, flush = threading.Event(), JobDriver.rebind, Publisher.flush
        flushed_at = time.monotonic()

        def rebinding(job: JobDriver, delivery: Any) -> None:
            rebind(job, delivery)
            came_again.set()

        def flushing(publisher: Publisher, batch: Any) -> None:
            nonlocal flushed_at
            if time.monotonic() - flushed_at > PAUSE_S:
                came_again.wait(20.0)
            flush(publisher, batch)
            flushed_at = time.monotonic()

        JobDriver.rebind, Publisher.flush = rebinding, flushing  # type: ignore[method-assign]

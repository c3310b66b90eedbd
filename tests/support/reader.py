"""A reader of a stream on a thread of its own."""

from __future__ import annotations

import threading
import time

from petiole.tasks.streams.api import stream
from tests.support.site import Site


class Reader(threading.Thread):
    """Reads one task's stream with the library's own reader, beginning `delay_s` after it is started."""

    def __init__(self, site: Site, task_id: str, delay_s: float) -> None:
        super().__init__(daemon=True)
        self.site, self.task_id, self.delay_s = site, task_id, delay_s
        self.tokens: list[int] = []
        self.text = ""
        self.reason: str | None = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        time.sleep(self.delay_s)
        try:
            for delta in stream(self.site.app.AsyncResult(self.task_id)):
                self.tokens += delta.token_ids
                self.text += delta.text
                self.reason = delta.finish_reason
        except BaseException as error:
            self.error = error

"""Engines that die.

`MortalEngine`: a task named "die-K-..." kills its worker, once, when K of its tokens are in its log.
`FallingEngine`: its worker dies when every task of FALLS, as many as it says, named "fall-...", has three
tokens in its log.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from petiole.gpu_worker import Delta
from petiole.gpu_worker.engine import Engine
from petiole.gpu_worker.request import Request
from petiole.gpu_worker.request.handle import Handle
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import stream_keys


class MortalEngine(Engine):
    def submit(self, request: Request, *, on_delta: Any = None, **callbacks: Any) -> Handle:
        doom = request.request_id.split("-")
        once = Path(os.environ["PETIOLE_DEATHS"]) / request.request_id
        if doom[0] != "die" or once.exists():
            return super().submit(request, on_delta=on_delta, **callbacks)

        def dying(handle: Handle, delta: Delta) -> None:
            on_delta(handle, delta)
            if delta.index + len(delta.token_ids) >= int(doom[1]) or delta.finish_reason is not None:
                once.touch()
                if delta.finish_reason is None:
                    written(request.request_id, int(doom[1]))
                os.kill(os.getpid(), signal.SIGKILL)

        return super().submit(request, on_delta=dying, **callbacks)


class FallingEngine(Engine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lengths: dict[str, int] = {}

    def submit(self, request: Request, *, on_delta: Any = None, **callbacks: Any) -> Handle:
        if not request.request_id.startswith("fall-"):
            return super().submit(request, on_delta=on_delta, **callbacks)

        def falling(handle: Handle, delta: Delta) -> None:
            on_delta(handle, delta)
            self._lengths[request.request_id] = delta.index + len(delta.token_ids)
            lengths = self._lengths.values()
            if len(lengths) == int(os.environ["FALLS"]) and min(lengths) >= 3:
                for task_id in self._lengths:
                    written(task_id, 3)
                os.kill(os.getpid(), signal.SIGKILL)

        return super().submit(request, on_delta=falling, **callbacks)


def written(task_id: str, n_tokens: int) -> None:
    """Wait until so many tokens are in the log."""
    client = connect(settings().streams_url)
    log = stream_keys(task_id).log
    while sum(len(json.loads(entry)["token_ids"]) for entry in client.lrange(log, 0, -1)) < n_tokens:
        time.sleep(0.001)

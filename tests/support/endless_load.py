"""A model that never comes: its load waits on threads for which the interpreter waits, too, as for a download."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from petiole.contract.settings.engine import EngineConfig


class EndlessLoad:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def start(self) -> None:
        with tempfile.TemporaryDirectory(prefix="half-loaded-"), ThreadPoolExecutor() as download:
            download.submit(Event().wait).result()

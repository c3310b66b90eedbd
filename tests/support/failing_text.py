"""An engine whose text thread fails when it has delivered a few tokens."""

from __future__ import annotations

from typing import Any

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker import Engine
from petiole.gpu_worker.scheduling.state import Generated
from petiole.gpu_worker.threads import detokenization as text_thread


class FailingText(Engine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        collect, seen = text_thread._collect, 0

        def failing(outputs: Any, emissions: Any) -> None:
            nonlocal seen
            seen += sum(len(emission.token_ids) for emission in emissions if isinstance(emission, Generated))
            if seen > 10:
                raise RuntimeError("a bug in the text thread")
            collect(outputs, emissions)

        text_thread._collect = failing

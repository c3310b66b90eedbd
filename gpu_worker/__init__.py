"""The engine: scheduling, runtime, models. It knows no Celery and no Redis.

    from gpu_worker import Engine, EngineConfig, Request, SamplingParams

`Engine` is imported when it is first used, so that reading a configuration or building a request is cheap.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# On a CPU, a compute thread that waits gives its core to the engine's thread soon. libgomp reads this with torch.
os.environ.setdefault("GOMP_SPINCOUNT", "100")

from gpu_worker.config import EngineConfig
from gpu_worker.errors import (
    AdapterError,
    EngineBusy,
    EngineClosed,
    EngineError,
    HandedBack,
    InvalidRequest,
    ModelError,
)
from gpu_worker.request import (
    Constraint,
    Delta,
    FinishReason,
    Request,
    Result,
    SamplingParams,
    Timing,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from gpu_worker.engine import Engine
    from gpu_worker.handle import Handle

__all__ = [
    "AdapterError",
    "Constraint",
    "Delta",
    "Engine",
    "EngineBusy",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "FinishReason",
    "HandedBack",
    "Handle",
    "InvalidRequest",
    "ModelError",
    "Request",
    "Result",
    "SamplingParams",
    "Timing",
    "TokenLogprobs",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from gpu_worker.engine import Engine

        return Engine
    if name == "Handle":
        from gpu_worker.handle import Handle

        return Handle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

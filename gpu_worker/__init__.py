"""The engine: it serves requests from one model on one device. It knows no Celery and no Redis.

    from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams

Each line may import what stands below it. Callers use the names of this package. `Engine` is imported when it is
first used, so that reading a configuration or building a request is cheap.

    engine/       `Engine`: loading, open requests, figures; puts the rest together
    threads/      the engine's threads: the loop, text
    preparation/  a request before it may run: prompts, tokens, truncation, images, texts
    scheduling/   plans each step and commits its results; handles no tensors
    constraints/  output that must match a schema, a pattern or a grammar
    runtime/      launching a step on a device: memory, kernels, sampling
    speculation/  drafts that a verify step accepts or rejects
    children/     processes for what may crash or never end
    text/         tokenizer, chat templates, incremental text, stop strings
    models/       reading a checkpoint; the decoder and its layers
    request/      requests and results: the engine's inputs and outputs; the handle that `submit` returns
    exceptions    the engine's errors
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# On a CPU, a compute thread that waits gives its core to the engine's thread soon. libgomp reads this with torch.
os.environ.setdefault("GOMP_SPINCOUNT", "100")

from petiole import _alias
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import (
    AdapterError,
    EngineBusy,
    EngineClosed,
    EngineError,
    HandedBack,
    InvalidRequest,
    ModelError,
)
from petiole.gpu_worker.request import (
    Constraint,
    Delta,
    Embedding,
    FinishReason,
    Request,
    Result,
    SamplingParams,
    Scoring,
    Timing,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from petiole.gpu_worker.engine import Engine
    from petiole.gpu_worker.request.handle import Handle

__all__ = [
    "AdapterError",
    "Constraint",
    "Delta",
    "Embedding",
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
    "Scoring",
    "Timing",
    "TokenLogprobs",
    "Usage",
]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from petiole.gpu_worker.engine import Engine

        return Engine
    if name == "Handle":
        from petiole.gpu_worker.request.handle import Handle

        return Handle
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_alias.claim(__name__)

"""Everything Celery: submitting tasks, reading their streams, watching the fleet; and the worker.

    from petiole import generate, stream
    result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64)
    for delta in stream(result):
        print(delta.text, end="", flush=True)

Each line may import what stands below it, but nobody imports `worker`: Celery resolves its names. All but `worker`
is the producer side: importing this package reads no settings, connects to nothing, and needs neither torch nor
numpy. The names below are imported at their first use.

    commands/        `petiole ...`: the command line, the demo; imported by nobody
    worker/          a worker: the only part that imports the engine; Celery finds it by `app.worker_side`
    submission/      the tasks, `generate`, `chat`, `query`: what `delay` checks and sends
    streams/         reading a task's stream, for an application, a task's `stream()` and the command line
    fleet/           watching and steering workers: reports, queue lengths, cancel, pause, drain, Prometheus
    app/             the Celery app: its configuration, result backend, RabbitMQ
    servers/         how to reach Redis: connections, sentinels, an embedded server
    traces/          OpenTelemetry's traces: the headers that carry them, the spans of producers and readers
    wire/            what stands in Redis and in messages: records of tasks, headers, names of keys
    settings         every setting, from PETIOLE_* variables; the engine's are in `contract.settings.engine`, too
    output_parsing/  the parser of reasoning and tool calls, and formats as data; imports nothing of Petiole's
    errors           the exceptions that a caller may get
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from petiole import _alias, _lazy
from petiole.contract.tasks import TASKS as _TASKS

if TYPE_CHECKING:
    from petiole.contract.requests.generation import ChatRequest as ChatRequest, GenerateRequest as GenerateRequest
    from petiole.contract.requests.submission import Submission as Submission
    from petiole.contract.results.task_result import (
        End as End,
        GenerationResult as GenerationResult,
        StreamDelta as StreamDelta,
    )
    from petiole.contract.results.vectors import (
        SparseVectors as SparseVectors,
        TokenVectors as TokenVectors,
        Vectors as Vectors,
    )
    from petiole.contract.types import (
        ChatCall as ChatCall,
        ChatOptions as ChatOptions,
        GenerateCall as GenerateCall,
        GenerateOptions as GenerateOptions,
        GenerationDict as GenerationDict,
    )
    from petiole.tasks.app.application import App as _App
    from petiole.tasks.errors import (
        BatchError as BatchError,
        GenerationFailed as GenerationFailed,
        InvalidRequest as InvalidRequest,
        ModelChanged as ModelChanged,
        NoWorker as NoWorker,
        ResultTooLarge as ResultTooLarge,
        StreamError as StreamError,
        StreamExpired as StreamExpired,
        StreamTimeout as StreamTimeout,
        Unavailable as Unavailable,
        Unconfirmed as Unconfirmed,
        UnknownTask as UnknownTask,
        WorkersLost as WorkersLost,
    )
    from petiole.tasks.fleet.control import acancel as acancel, cancel as cancel
    from petiole.tasks.streams.api import (
        SSE_HEADERS as SSE_HEADERS,
        aend as aend,
        asse as asse,
        astream as astream,
        end as end,
        sse as sse,
        stream as stream,
    )
    from petiole.tasks.streams.readers import AsyncGeneration as AsyncGeneration
    from petiole.tasks.submission.batches.api import batch as batch
    from petiole.tasks.submission.definitions import (
        caption as caption,
        chat as chat,
        classify as classify,
        count as count,
        detect as detect,
        embed as embed,
        generate as generate,
        point as point,
        query as query,
        rerank as rerank,
        score as score,
    )
    from petiole.tasks.submission.put_image import put_image as put_image

    celery_app: _App

_ROOMS = {
    "petiole.contract.requests.generation": ["ChatRequest", "GenerateRequest"],
    "petiole.contract.requests.submission": ["Submission"],
    "petiole.contract.results.task_result": ["End", "GenerationResult", "StreamDelta"],
    "petiole.contract.results.vectors": ["SparseVectors", "TokenVectors", "Vectors"],
    "petiole.contract.types": ["ChatCall", "ChatOptions", "GenerateCall", "GenerateOptions", "GenerationDict"],
    "petiole.tasks.errors": [
        "BatchError",
        "GenerationFailed",
        "InvalidRequest",
        "ModelChanged",
        "NoWorker",
        "ResultTooLarge",
        "StreamError",
        "StreamExpired",
        "StreamTimeout",
        "Unavailable",
        "Unconfirmed",
        "UnknownTask",
        "WorkersLost",
    ],
    "petiole.tasks.fleet.control": ["acancel", "cancel"],
    "petiole.tasks.streams.api": ["SSE_HEADERS", "aend", "asse", "astream", "end", "sse", "stream"],
    "petiole.tasks.streams.readers": ["AsyncGeneration"],
    "petiole.tasks.submission.batches.api": ["batch"],
    "petiole.tasks.submission.definitions": [*(task.name for task in _TASKS.values()), "count"],
    "petiole.tasks.submission.put_image": ["put_image"],
}
"""By room, the names that it offers."""
_HOMES = {name: f"{home}:{name}" for home, names in _ROOMS.items() for name in names}
_HOMES["celery_app"] = "petiole.tasks.app.application:app"
__all__ = sorted(_HOMES)

# `celery -A tasks` looks for `celery`: `app` is a folder
__getattr__ = _lazy.names(__name__, {**_HOMES, "celery": _HOMES["celery_app"]})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_alias.claim(__name__)

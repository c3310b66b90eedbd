"""Everything Celery: submitting tasks, reading their streams, watching the fleet; and the worker.

    from petiole import generate, stream
    result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64)
    for delta in stream(result):
        print(delta.text, end="", flush=True)

Each line may import what stands below it, but nobody imports `worker`: Celery resolves its names. All but `worker`
is the producer side: importing this package reads no settings, connects to nothing, and needs neither torch nor
numpy. The names below are imported at their first use.

    commands/     `petiole ...`: the command line, the demo; imported by nobody
    worker/       a worker: the only part that imports the engine; Celery finds it by `worker_side`
    submission/   the tasks, `generate`, `chat`, `query`: what `delay` checks and sends, how a body gets its result
    streams/      reading a task's stream, for an application, a task's `stream()` and the command line
    fleet/        watching and steering workers: reports, queue lengths, cancel, pause, drain, Prometheus
    app/          the Celery app: its configuration, result backend, RabbitMQ
    servers/      how to reach Redis: connections, sentinels, an embedded server
    record/       what stands in Redis of one task: deltas and ends as JSON, the scripts that write them
    requests/     the contents of a task's message and result: options, results, images, headers
    settings      every setting, from PETIOLE_* variables; the engine's are in `gpu_worker.config`, too
    gateway_settings  those of `petiole serve`
    worker_side   the names of the worker's classes, as dotted strings
    urls          the forms of broker and Redis URLs; passwords that are not shown
    templates/    tool and reasoning formats as data, one incremental parser; imports nothing of Petiole's
    keys          every name that Petiole writes into Redis or into a message
    errors        the exceptions that a caller may get
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from petiole import _alias, _lazy

if TYPE_CHECKING:
    from petiole.tasks.app.application import app as celery_app
    from petiole.tasks.errors import (
        BatchError,
        GenerationFailed,
        InvalidRequest,
        ModelChanged,
        NoWorker,
        ResultTooLarge,
        StreamError,
        StreamExpired,
        StreamTimeout,
        Unavailable,
        Unconfirmed,
        UnknownTask,
        WorkersLost,
    )
    from petiole.tasks.fleet.control import acancel, cancel
    from petiole.tasks.requests.celery_options import Submission
    from petiole.tasks.requests.results import End, GenerationResult, StreamDelta
    from petiole.tasks.requests.schemas import ChatRequest, GenerateRequest
    from petiole.tasks.requests.types import ChatCall, ChatOptions, GenerateCall, GenerateOptions, GenerationDict
    from petiole.tasks.streams.definitions import SSE_HEADERS, aend, asse, astream, end, sse, stream
    from petiole.tasks.streams.readers import AsyncGeneration
    from petiole.tasks.submission.batches.definitions import batch
    from petiole.tasks.submission.definitions import (
        caption,
        chat,
        classify,
        count,
        detect,
        embed,
        generate,
        point,
        query,
        rerank,
        score,
    )
    from petiole.tasks.submission.images import put_image
    from petiole.vectors import SparseVectors, TokenVectors, Vectors

__all__ = [
    "SSE_HEADERS",
    "AsyncGeneration",
    "BatchError",
    "ChatCall",
    "ChatOptions",
    "ChatRequest",
    "End",
    "GenerateCall",
    "GenerateOptions",
    "GenerateRequest",
    "GenerationDict",
    "GenerationFailed",
    "GenerationResult",
    "InvalidRequest",
    "ModelChanged",
    "NoWorker",
    "ResultTooLarge",
    "SparseVectors",
    "StreamDelta",
    "StreamError",
    "StreamExpired",
    "StreamTimeout",
    "Submission",
    "TokenVectors",
    "Unavailable",
    "Unconfirmed",
    "UnknownTask",
    "Vectors",
    "WorkersLost",
    "acancel",
    "aend",
    "asse",
    "astream",
    "batch",
    "cancel",
    "caption",
    "celery_app",
    "chat",
    "classify",
    "count",
    "detect",
    "embed",
    "end",
    "generate",
    "point",
    "put_image",
    "query",
    "rerank",
    "score",
    "sse",
    "stream",
]

_HOMES = {
    "celery_app": "petiole.tasks.app.application:app",
    "celery": "petiole.tasks.app.application:app",  # `celery -A tasks` looks for it: `app` is a folder
    "GenerationFailed": "petiole.tasks.errors:GenerationFailed",
    "InvalidRequest": "petiole.tasks.errors:InvalidRequest",
    "ModelChanged": "petiole.tasks.errors:ModelChanged",
    "NoWorker": "petiole.tasks.errors:NoWorker",
    "ResultTooLarge": "petiole.tasks.errors:ResultTooLarge",
    "WorkersLost": "petiole.tasks.errors:WorkersLost",
    "StreamError": "petiole.tasks.errors:StreamError",
    "StreamExpired": "petiole.tasks.errors:StreamExpired",
    "StreamTimeout": "petiole.tasks.errors:StreamTimeout",
    "Unavailable": "petiole.tasks.errors:Unavailable",
    "Unconfirmed": "petiole.tasks.errors:Unconfirmed",
    "acancel": "petiole.tasks.fleet.control:acancel",
    "batch": "petiole.tasks.submission.batches.definitions:batch",
    "BatchError": "petiole.tasks.errors:BatchError",
    "UnknownTask": "petiole.tasks.errors:UnknownTask",
    "cancel": "petiole.tasks.fleet.control:cancel",
    "ChatRequest": "petiole.tasks.requests.schemas:ChatRequest",
    "GenerateRequest": "petiole.tasks.requests.schemas:GenerateRequest",
    "End": "petiole.tasks.requests.results:End",
    "GenerationResult": "petiole.tasks.requests.results:GenerationResult",
    "StreamDelta": "petiole.tasks.requests.results:StreamDelta",
    "ChatCall": "petiole.tasks.requests.types:ChatCall",
    "ChatOptions": "petiole.tasks.requests.types:ChatOptions",
    "GenerateCall": "petiole.tasks.requests.types:GenerateCall",
    "GenerateOptions": "petiole.tasks.requests.types:GenerateOptions",
    "GenerationDict": "petiole.tasks.requests.types:GenerationDict",
    "Submission": "petiole.tasks.requests.celery_options:Submission",
    "AsyncGeneration": "petiole.tasks.streams.readers:AsyncGeneration",
    "aend": "petiole.tasks.streams.definitions:aend",
    "astream": "petiole.tasks.streams.definitions:astream",
    "end": "petiole.tasks.streams.definitions:end",
    "stream": "petiole.tasks.streams.definitions:stream",
    "sse": "petiole.tasks.streams.definitions:sse",
    "asse": "petiole.tasks.streams.definitions:asse",
    "SSE_HEADERS": "petiole.tasks.streams.definitions:SSE_HEADERS",
    **{
        task: f"petiole.tasks.submission.definitions:{task}"
        for task in (
            "caption",
            "chat",
            "classify",
            "count",
            "detect",
            "embed",
            "generate",
            "point",
            "query",
            "rerank",
            "score",
        )
    },
    "put_image": "petiole.tasks.submission.images:put_image",
    "SparseVectors": "petiole.vectors:SparseVectors",
    "TokenVectors": "petiole.vectors:TokenVectors",
    "Vectors": "petiole.vectors:Vectors",
}
__getattr__ = _lazy.names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_alias.claim(__name__)

"""Everything Celery: submitting tasks, reading their streams, watching the fleet; and the worker.

    from petiole import generate, stream
    result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64)
    for delta in stream(result):
        print(delta.text, end="", flush=True)

Each line may import what stands below it, but nobody imports `worker`: Celery resolves its names. All but `worker`
is the producer side: importing this package reads no settings, connects to nothing, and needs neither torch nor
numpy. The names below are imported at their first use.

    commands/    `petiole ...`: the command line, the demo; imported by nobody
    worker/      a worker: the only part that imports the engine; Celery finds it by `worker_side`
    submission/  the tasks, `generate`, `chat`, `query`: what `delay` checks and sends, how a body gets its result
    streams/     reading a task's stream, for an application, a task's `stream()` and the command line
    fleet/       watching and steering workers: reports, queue lengths, cancel, pause, drain, Prometheus
    app/         the Celery app: its configuration, result backend, RabbitMQ
    servers/     how to reach Redis: connections, sentinels, an embedded server
    record/      what stands in Redis of one task: deltas and ends as JSON, the scripts that write them
    messages/    the headers of a task's message: their rules, and the key of affinity
    settings     every setting, from PETIOLE_* variables; the engine's are in `contract.settings.engine`, too
    worker_side  the names of the worker's classes, as dotted strings
    urls         the forms of broker and Redis URLs; passwords that are not shown
    templates/   tool and reasoning formats as data, one incremental parser; imports nothing of Petiole's
    keys         every name that Petiole writes into Redis or into a message
    errors       the exceptions that a caller may get
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from petiole import _alias, _lazy
from petiole.contract.tasks import TASKS as _TASKS

if TYPE_CHECKING:
    from petiole.contract.requests.generation import ChatRequest, GenerateRequest
    from petiole.contract.requests.submission import Submission
    from petiole.contract.results.task_result import End, GenerationResult, StreamDelta
    from petiole.contract.results.vectors import SparseVectors, TokenVectors, Vectors
    from petiole.contract.types import ChatCall, ChatOptions, GenerateCall, GenerateOptions, GenerationDict
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
    from petiole.tasks.streams.api import SSE_HEADERS, aend, asse, astream, end, sse, stream
    from petiole.tasks.streams.readers import AsyncGeneration
    from petiole.tasks.submission.batches.api import batch
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
    from petiole.tasks.submission.put_image import put_image

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
    "batch": "petiole.tasks.submission.batches.api:batch",
    "BatchError": "petiole.tasks.errors:BatchError",
    "UnknownTask": "petiole.tasks.errors:UnknownTask",
    "cancel": "petiole.tasks.fleet.control:cancel",
    "ChatRequest": "petiole.contract.requests.generation:ChatRequest",
    "GenerateRequest": "petiole.contract.requests.generation:GenerateRequest",
    "End": "petiole.contract.results.task_result:End",
    "GenerationResult": "petiole.contract.results.task_result:GenerationResult",
    "StreamDelta": "petiole.contract.results.task_result:StreamDelta",
    "ChatCall": "petiole.contract.types:ChatCall",
    "ChatOptions": "petiole.contract.types:ChatOptions",
    "GenerateCall": "petiole.contract.types:GenerateCall",
    "GenerateOptions": "petiole.contract.types:GenerateOptions",
    "GenerationDict": "petiole.contract.types:GenerationDict",
    "Submission": "petiole.contract.requests.submission:Submission",
    "AsyncGeneration": "petiole.tasks.streams.readers:AsyncGeneration",
    "aend": "petiole.tasks.streams.api:aend",
    "astream": "petiole.tasks.streams.api:astream",
    "end": "petiole.tasks.streams.api:end",
    "stream": "petiole.tasks.streams.api:stream",
    "sse": "petiole.tasks.streams.api:sse",
    "asse": "petiole.tasks.streams.api:asse",
    "SSE_HEADERS": "petiole.tasks.streams.api:SSE_HEADERS",
    **{task.name: f"petiole.tasks.submission.definitions:{task.name}" for task in _TASKS.values()},
    "count": "petiole.tasks.submission.definitions:count",
    "put_image": "petiole.tasks.submission.put_image:put_image",
    "SparseVectors": "petiole.contract.results.vectors:SparseVectors",
    "TokenVectors": "petiole.contract.results.vectors:TokenVectors",
    "Vectors": "petiole.contract.results.vectors:Vectors",
}
__getattr__ = _lazy.names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_alias.claim(__name__)

"""Petiole: serve language models from a Celery fleet.

    from petiole import generate, stream
    result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64)
    for delta in stream(result):
        print(delta.text, end="", flush=True)

    testing/     for an application's own tests, on top of the producer side
    gateway/     HTTP for any client of OpenAI's interface, on top of the producer side
    tasks/       everything Celery: submitting tasks and reading their streams, and the worker
    gpu_worker/  the engine: scheduling, runtime, models. It knows no Celery and no Redis
    cache/       who owns which KV page: pure Python and numpy
    contract/    what a request, a result, a setting, a task is: each described once
    plain        text from outside, as a log or a terminal shows it

An import may only go down this list. The four folders are links to the repository's own. The names below are
those of `petiole.tasks`. They are imported at their first use, so `import petiole.cache` does not import Celery.
`celery -A petiole` finds `app`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from petiole import _lazy

if TYPE_CHECKING:
    from petiole.tasks import (
        SSE_HEADERS,
        AsyncGeneration,
        BatchError,
        ChatCall,
        ChatOptions,
        ChatRequest,
        End,
        GenerateCall,
        GenerateOptions,
        GenerateRequest,
        GenerationDict,
        GenerationFailed,
        GenerationResult,
        InvalidRequest,
        ModelChanged,
        NoWorker,
        ResultTooLarge,
        StreamDelta,
        StreamError,
        StreamExpired,
        StreamTimeout,
        Submission,
        Unavailable,
        Unconfirmed,
        UnknownTask,
        Vectors,
        WorkersLost,
        acancel,
        aend,
        asse,
        astream,
        batch,
        cancel,
        caption,
        celery_app,
        chat,
        classify,
        count,
        detect,
        embed,
        end,
        generate,
        point,
        put_image,
        query,
        rerank,
        score,
        sse,
        stream,
    )
    from petiole.tasks import celery_app as app

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
    "app",
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
    "testing",
]

# A checkout without links, as git makes it on Windows by default: the folders are beside this one.
if not os.path.isdir(os.path.join(__path__[0], "tasks")):
    __path__.append(os.path.dirname(os.path.abspath(__path__[0])))


__getattr__ = _lazy.names(
    __name__,
    {name: f"petiole.tasks:{name}" for name in __all__}
    | {"app": "petiole.tasks:celery_app", "testing": "petiole.testing"},
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

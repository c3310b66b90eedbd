"""Petiole: serve language models from a Celery fleet.

    from petiole import generate, stream
    result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64)
    for delta in stream(result):
        print(delta.text, end="", flush=True)

    testing/     for an application's own tests, on top of the producer side
    gateway/     HTTP for any client of OpenAI's interface, on top of the producer side
    tasks/       everything Celery: submitting tasks and reading their streams, and the worker
    engines/     other engines behind the same pool
    gpu_worker/  the engine: scheduling, runtime, models. It knows no Celery and no Redis
    cache/       who owns which KV page: pure Python and numpy
    contract/    what a request, a result, a setting, a task is: each described once
    plain        text from outside, as a log or a terminal shows it
    memory       what was freed goes back to the system
    json_text    JSON text of others as values

An import may only go down this list. The four folders are links to the repository's own. The names below are
those of `petiole.tasks`. They are imported at their first use, so `import petiole.cache` does not import Celery.
`celery -A petiole` finds `app`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from petiole import _lazy

if TYPE_CHECKING:
    from petiole.tasks import (
        SSE_HEADERS as SSE_HEADERS,
        AsyncGeneration as AsyncGeneration,
        BatchError as BatchError,
        ChatCall as ChatCall,
        ChatOptions as ChatOptions,
        ChatRequest as ChatRequest,
        End as End,
        GenerateCall as GenerateCall,
        GenerateOptions as GenerateOptions,
        GenerateRequest as GenerateRequest,
        GenerationDict as GenerationDict,
        GenerationFailed as GenerationFailed,
        GenerationResult as GenerationResult,
        InvalidRequest as InvalidRequest,
        ModelChanged as ModelChanged,
        NoWorker as NoWorker,
        ResultTooLarge as ResultTooLarge,
        SparseVectors as SparseVectors,
        StreamDelta as StreamDelta,
        StreamError as StreamError,
        StreamExpired as StreamExpired,
        StreamTimeout as StreamTimeout,
        Submission as Submission,
        TokenVectors as TokenVectors,
        Unavailable as Unavailable,
        Unconfirmed as Unconfirmed,
        UnknownTask as UnknownTask,
        Vectors as Vectors,
        WorkersLost as WorkersLost,
        acancel as acancel,
        aend as aend,
        asse as asse,
        astream as astream,
        batch as batch,
        cancel as cancel,
        caption as caption,
        celery_app as celery_app,
        chat as chat,
        classify as classify,
        count as count,
        detect as detect,
        embed as embed,
        end as end,
        generate as generate,
        point as point,
        put_image as put_image,
        query as query,
        rerank as rerank,
        score as score,
        sse as sse,
        stream as stream,
    )

    app = celery_app

# A checkout without links, as git makes it on Windows by default: the folders are beside this one.
if not os.path.isdir(os.path.join(__path__[0], "tasks")):
    __path__.append(os.path.dirname(os.path.abspath(__path__[0])))

from petiole.tasks import __all__ as _names

__all__ = sorted([*_names, "app", "testing"])
__getattr__ = _lazy.names(
    __name__,
    {name: f"petiole.tasks:{name}" for name in _names}
    | {"app": "petiole.tasks:celery_app", "testing": "petiole.testing"},
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

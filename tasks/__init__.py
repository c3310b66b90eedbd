"""Everything Celery: submitting tasks, reading their streams, watching the fleet; and the worker.

    from petiole import generate, stream
    result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64)
    for delta in stream(result):
        print(delta.text, end="", flush=True)

Each line may import what stands below it, but nobody imports `worker`: Celery resolves its names. All but `worker`
is the producer side: importing this package reads no settings, connects to nothing, and needs neither torch nor
numpy.

    commands/     `petiole ...`: the command line, the demo; imported by nobody
    worker/       a worker: the only part that imports the engine; Celery finds it by `worker_side`
    definitions   the tasks `generate` and `chat`: what `delay` checks and sends, how a body gets its result
    streams/      reading a task's stream, for an application, a task's `stream()` and the command line
    fleet/        watching and steering workers: reports, queue lengths, cancel, drain, Prometheus
    app/          the Celery app: its configuration, result backend, RabbitMQ
    servers/      how to reach Redis: connections, sentinels, an embedded server
    requests/     what a task is asked and what it answers: options, results, keys, headers
    handover      how a task's body gets its result from the worker that runs it; not the `handoff` of a shutdown
    settings      every setting, from PETIOLE_* variables; for all of Petiole but the engine
    worker_side   the names of the worker's classes, as dotted strings
    urls          the forms of broker and Redis URLs; passwords that are not shown
    keys          every name that Petiole writes into Redis or into a message
    errors        the exceptions that a caller may get
"""

from petiole import _alias
from petiole.tasks.app.application import app as celery_app
from petiole.tasks.definitions import chat, generate
from petiole.tasks.errors import InvalidRequest, NoWorker, StreamError, StreamExpired, StreamTimeout, Unavailable
from petiole.tasks.fleet.control import cancel
from petiole.tasks.requests.schemas import ChatRequest, GenerateRequest, GenerationResult, StreamDelta
from petiole.tasks.requests.submission import Submission
from petiole.tasks.requests.types import ChatCall, ChatOptions, GenerateCall, GenerateOptions, GenerationDict
from petiole.tasks.streams.readers import AsyncGeneration, astream, stream

__all__ = [
    "AsyncGeneration",
    "ChatCall",
    "ChatOptions",
    "ChatRequest",
    "GenerateCall",
    "GenerateOptions",
    "GenerateRequest",
    "GenerationDict",
    "GenerationResult",
    "InvalidRequest",
    "NoWorker",
    "StreamDelta",
    "StreamError",
    "StreamExpired",
    "StreamTimeout",
    "Submission",
    "Unavailable",
    "astream",
    "cancel",
    "celery_app",
    "chat",
    "generate",
    "stream",
]

_alias.claim(__name__)

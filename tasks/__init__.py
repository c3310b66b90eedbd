"""Petiole's producer side: submit generations to Celery, and read their streams.

    from tasks import generate, stream
    result = generate.delay(prompt="Count from 1 to 5.", max_tokens=64)
    for delta in stream(result):
        print(delta.text, end="", flush=True)

Importing this package reads no settings, connects to nothing, and needs neither torch nor numpy.
"""

from tasks.app import app as celery_app
from tasks.definitions import chat, generate
from tasks.errors import InvalidRequest, StreamError, StreamExpired, StreamTimeout, Unavailable
from tasks.fleet import cancel
from tasks.schemas import ChatRequest, GenerateRequest, GenerationResult, StreamDelta
from tasks.streaming import astream, stream
from tasks.types import AsyncGeneration, ChatOptions, GenerateOptions, GenerationDict

__all__ = [
    "AsyncGeneration",
    "ChatOptions",
    "ChatRequest",
    "GenerateOptions",
    "GenerateRequest",
    "GenerationDict",
    "GenerationResult",
    "InvalidRequest",
    "StreamDelta",
    "StreamError",
    "StreamExpired",
    "StreamTimeout",
    "Unavailable",
    "astream",
    "cancel",
    "celery_app",
    "chat",
    "generate",
    "stream",
]

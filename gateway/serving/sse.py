"""A stream as server-sent events, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from petiole.gateway.core.failures import Failure
from petiole.gateway.core.streams import ClientStream, Frame
from petiole.gateway.serving.generations import Generation
from petiole.tasks.settings import settings

T = TypeVar("T")

_BREAKS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))
"""Characters at which readers of lines, such as httpx's, break a line, and their escapes in JSON."""

ALIVE = b": alive\n"
"""A comment. An empty line after it would be an event to openai-python, one with the `id` of the last and without
data."""


NO_IDS = (b"x-petiole-event-ids", b"none")
"""A header of clients, such as `vllm bench serve`, that take an event for one line."""
_ID = re.compile(rb"^id: .*\n", re.M)

OUTERMOST = "petiole.outermost_send"
"""In a scope: the `send` that this application was given."""


class ClientGone(Exception):  # noqa: N818
    """Nobody waits for the answer any more."""


def on_one_line(part: bytes) -> bytes:
    """Events whose JSON has no character at which any client breaks lines."""
    for character, escape in _BREAKS:
        if character in part:
            part = part.replace(character, escape)
    return part


def without_ids(part: bytes) -> bytes:
    """Events that are a line each. A comment, too, may then have an empty line behind it."""
    return _ID.sub(b"", part).replace(ALIVE, ALIVE + b"\n")


def written(frames: Sequence[Frame]) -> bytes:
    """Events as they go over the wire."""
    out = b""
    for frame in frames:  # its data is JSON, which has no line breaks
        if frame.name is not None:
            out += b"event: %b\n" % frame.name.encode()
        out += b"id: %b\ndata: %b\n\n" % (frame.cursor.encode(), frame.data)
    return out


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work returns. Raises `ClientGone`, and cancels the work, as soon as the client has gone."""
    working, gone = asyncio.current_task(), False
    assert working is not None

    def left(_: asyncio.Task[None]) -> None:
        nonlocal gone
        if not ended:
            gone = True
            working.cancel()

    ended, leaving = False, asyncio.ensure_future(_left(request.receive))
    leaving.add_done_callback(left)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and not working.uncancel():
            raise ClientGone from None
        raise
    finally:
        ended = True
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def events(
    generation: Generation, stream: ClientStream, failed: Callable[[Failure], bytes], end: bytes = b""
) -> AsyncGenerator[bytes, None]:
    """A generation's events as they go over the wire, and comments where nothing happens, or nothing that is
    shown, such as a long thought that the client does not want. What goes wrong once the stream has begun is an
    event that the interface writes (`failed`). It has no number: it is not in the log."""
    async with contextlib.aclosing(generation):
        try:
            if begun := written(stream.begin()):
                yield begun
            told_at, silence_s = time.monotonic(), settings().gateway_heartbeat_s
            while batch := await generation.batch():
                now, out = time.monotonic(), b""
                for choice, delta in batch:
                    out += ALIVE if delta is None else written(stream.read(choice, delta))
                if out or now - told_at >= silence_s:
                    told_at = now
                    yield out or ALIVE
        except Failure as failure:
            yield failed(failure)
        yield end


class EventStream(Response):
    """Sends what an iterator gives, until it ends or the client leaves. Then it closes the iterator."""

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._parts = parts
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope.get(OUTERMOST, send), NO_IDS in scope["headers"]))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send(self, send: Send, outermost: Send, no_ids: bool) -> None:
        """The layers of this application look at the start, the first part and the end of an answer. The parts
        between go past them."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with contextlib.aclosing(self._parts) as parts:
            await send(start)
            through = send
            async for part in parts:
                if no_ids:
                    part = without_ids(part)
                if not part.isascii():
                    part = on_one_line(part)
                await through({"type": "http.response.body", "body": part, "more_body": True})
                through = outermost
        await send({"type": "http.response.body", "body": b"", "more_body": False})

"""Responses over a WebSocket, as Open Responses has it: each frame from the client begins a response, one after
the other; each frame to the client is an event, or the error in place of a response.

A response with `store` false lives in its connection alone: the last one can be continued there, and nowhere else.
A continuation that fails makes the connection forget what it was to continue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any

import redis
from starlette.websockets import WebSocket, WebSocketDisconnect

from petiole.gateway.core.caller import Caller, as_caller, caller
from petiole.gateway.core.events import encode
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.core.streams import ClientStream
from petiole.gateway.openai.answers import error_body
from petiole.gateway.openai.responses import conversation_store, resource, submitting
from petiole.gateway.openai.responses.items import Item
from petiole.gateway.openai.responses.request import CreateResponse, History
from petiole.gateway.openai.responses.view import ResponsesView
from petiole.gateway.serving import request_body
from petiole.gateway.serving.auth.callers import DENIED, callers, key_in
from petiole.gateway.serving.generations import Generation
from petiole.gateway.serving.retry import failure_of
from petiole.tasks.settings import settings

CREATE = "response.create"
LIVES_S = 3600.0
_WAITING, _WAITING_SIZE = 16, 2**20
"""Frames, and characters or bytes of them, that may wait while a response runs: the next frame is not read."""
_OF_HTTP = ("stream", "stream_options", "background")
_GOING_AWAY = 1001
_UNAUTHORIZED = 401


@dataclass
class UnstoredResponse:
    """The last response of the connection that is not stored, with all that was said up to its end."""

    name: str
    items: list[Item]


async def serve(socket: WebSocket) -> None:
    await socket.accept()
    with contextlib.suppress(WebSocketDisconnect):
        await WebSocketSession(socket).run()


class WebSocketSession:
    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._frames: asyncio.Queue[str | bytes] = asyncio.Queue(_WAITING)
        self._size, self._taken = 0, asyncio.Event()
        self._last: UnstoredResponse | None = None

    async def run(self) -> None:
        """Until the client leaves, or the connection has lived its time. What runs then is read no further."""
        reading, answering = asyncio.ensure_future(self._read()), asyncio.ensure_future(self._answer())
        try:
            await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reading, answering):
                task.cancel()
            results = await asyncio.gather(reading, answering, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _read(self) -> None:
        while (message := await self._socket.receive())["type"] != "websocket.disconnect":
            frame = message.get("text") or message.get("bytes") or b""
            self._size += len(frame)
            await self._frames.put(frame)
            while self._size > _WAITING_SIZE:
                self._taken.clear()
                await self._taken.wait()

    async def _answer(self) -> None:
        """A response that has begun is sent to its end, also if its key is revoked meanwhile."""
        ends_at = time.monotonic() + LIVES_S
        while (left_s := ends_at - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    frame = await self._frames.get()
                self._size -= len(frame)
                self._taken.set()
            except TimeoutError:
                break
            if not await self._turn(frame):
                return await self._socket.close(DENIED)
        message = f"a connection lives for {LIVES_S:.0f} s: open another one"
        await self._refuse(Failure(400, message, code="websocket_connection_limit_reached"))
        return await self._socket.close(_GOING_AWAY)

    async def _turn(self, frame: str | bytes) -> bool:
        """Whether the client may go on."""
        continued = None
        try:
            with as_caller(await self._caller()):
                asked = await request_body.apart(decoded, frame)
                continued = asked.previous_response_id
                if await self._respond(asked):
                    return True
        except (Failure, redis.RedisError) as error:
            failure = failure_of(error)
            await self._refuse(failure)
            if failure.status == _UNAUTHORIZED:
                return False
        if self._last is not None and self._last.name == continued:
            self._last = None
        return True

    async def _caller(self) -> Caller:
        """Who asks now: the key may have been revoked, and its limits changed. Raises `Failure`."""
        who = await callers().of(key_in(self._socket.scope))
        if who.name != caller().name:
            message = "the key is another tenant's now: open another connection"
            raise Failure(_UNAUTHORIZED, message, code="invalid_api_key")
        return who

    async def _respond(self, asked: CreateResponse) -> bool:
        """Whether the response has not failed."""
        own = await submitting.told(asked)
        past = await self._past(asked)
        generation = await submitting.begin(asked, own, past)
        async with contextlib.aclosing(generation):
            await generation.accepted(settings().gateway_prepared_s)
            view = await self._send(generation)
        ended = view.whole.ended
        if ended is None or ended.error is not None:
            return False
        if asked.store:
            with contextlib.suppress(Failure):
                await conversation_store.ended(generation.record, view.whole)
        else:
            said = resource.output(generation.record, view.whole.pieces, resource.status_of(ended))
            self._last = UnstoredResponse(generation.record.id, [*past.items, *own, *said])
        return True

    async def _past(self, asked: CreateResponse) -> History:
        last = self._last
        if last is None or last.name != asked.previous_response_id:
            return await submitting.before(asked)
        if not asked.store:
            return History((), last.items)
        # What continues it is stored.
        name = await conversation_store.tell_as_turn(last.items, settings().gateway_keep_s)
        return History((name,), last.items)

    async def _send(self, generation: Generation) -> ResponsesView:
        view = ResponsesView(generation.record)
        stream = ClientStream(view, generation.record)
        frames = stream.begin()
        async with contextlib.aclosing(generation.deltas()) as deltas:
            for frame in frames:
                await self._socket.send_text(frame.data.decode())
            async for choice, delta in deltas:
                for frame in stream.read(choice, delta) if delta is not None else ():
                    await self._socket.send_text(frame.data.decode())
        return view

    async def _refuse(self, failure: Failure) -> None:
        shown = {"type": "error", "status": failure.status, **error_body(failure)}
        shown["error"]["code"] = failure.code or "invalid_request"
        await self._socket.send_text(encode(shown).decode())


def decoded(frame: str | bytes) -> CreateResponse:
    """The request in a frame. Raises `Failure`."""
    given: dict[str, Any] = request_body.decoded(frame.encode() if isinstance(frame, str) else frame)
    kind = given.pop("type", None)
    if kind != CREATE:
        raise invalid("type", f"type: must be {CREATE}", "invalid_value")
    for name in _OF_HTTP:
        if given.get(name) is not None:
            raise invalid(name, f"{name}: is not a parameter of a WebSocket's requests", "unknown_parameter")
    return request_body.as_request(given, CreateResponse)

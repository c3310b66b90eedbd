"""A WebSocket's client that leaves right after what it has said."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from petiole import memory
from petiole.gateway.core.caller import Caller
from petiole.gateway.openai.responses import websocket
from petiole.gateway.openai.responses.request import CreateResponse
from petiole.gateway.openai.responses.websocket import WebSocketSession


class Leaving:
    """A client whose last frame is read with its leaving. Some turns of the event loop lie before each."""

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._messages: list[dict[str, Any]] = [
            {"type": "websocket.receive", "text": "{}"},
            {"type": "websocket.disconnect"},
        ]

    async def receive(self) -> dict[str, Any]:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        return self._messages.pop(0)


@pytest.mark.parametrize("turns", range(6))
def test_a_client_that_leaves_with_its_last_frame_ends_the_connection(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answered(*_: object) -> bool:
        return True

    monkeypatch.setattr(WebSocketSession, "_turn", answered)

    async def served() -> None:
        client: Any = Leaving(turns)
        serving = asyncio.create_task(WebSocketSession(client).run())
        _, there = await asyncio.wait({serving}, timeout=30)
        assert not there, "the connection waits for frames of a client that has left"
        await serving

    asyncio.run(served())


class Insisting:
    """A client that sends one large frame after the other. `read`: how many."""

    def __init__(self) -> None:
        self.read = 0

    async def receive(self) -> dict[str, Any]:
        self.read += 1
        return {"type": "websocket.receive", "text": "x" * websocket._WAITING_SIZE}


def test_while_a_response_runs_large_frames_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = asyncio.Semaphore(0)

    async def answered(*_: object) -> bool:
        return await turns.acquire()

    monkeypatch.setattr(WebSocketSession, "_turn", answered)

    async def served() -> None:
        client: Any = Insisting()
        serving = asyncio.create_task(WebSocketSession(client).run())
        for done in range(3):
            for _ in range(20):
                await asyncio.sleep(0)
            assert client.read == done + 3, "one is answered, and two wait"
            turns.release()
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(served())


class Refused:
    """A client of one frame, which leaves once that is refused. `shown`: what it is sent."""

    def __init__(self, frame: str) -> None:
        self.shown: list[str] = []
        self._frames, self._refused = [frame], asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        if self._frames:
            return {"type": "websocket.receive", "text": self._frames.pop()}
        await self._refused.wait()
        return {"type": "websocket.disconnect"}

    async def send_text(self, text: str) -> None:
        self.shown.append(text)
        self._refused.set()


@pytest.mark.parametrize(("size", "apart"), [(memory.LARGE_BYTES - 1, False), (memory.LARGE_BYTES, True)])
def test_a_large_frame_is_decoded_on_a_thread(size: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    async def everybody(_: WebSocketSession) -> Caller:
        return Caller()

    def seen(frame: str | bytes) -> CreateResponse:
        threads.append(threading.current_thread())
        return decoded(frame)

    decoded = websocket.decoded
    monkeypatch.setattr(websocket, "decoded", seen)
    monkeypatch.setattr(WebSocketSession, "_caller", everybody)
    client: Any = Refused("x" * size)

    asyncio.run(WebSocketSession(client).run())
    assert "the body is not JSON" in client.shown[0]
    assert [thread is not threading.main_thread() for thread in threads] == [apart]

"""A stream is never silent for longer than its setting says."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core.events import encode
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.streams import ClientStream
from petiole.gateway.openai.chat_view import ChatView
from petiole.gateway.serving import sse
from petiole.tasks.settings import settings

RECORD = RequestRecord(
    id="c", kind="chat.completion", created=1, model="m", tasks=["t"], asked={"parts": True, "unthought": True}
)
SECONDS = 4


class Thinking:
    """A generation whose worker sends a token of a thought each second, and then an answer."""

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock
        self._index = -1

    async def batch(self) -> list[tuple[int, StreamDelta | None]]:
        self._index += 1
        if self._index > 60:
            return []
        if self._index == 60:
            return [(0, self._delta(60, content="answer", finish_reason="stop"))]
        self._clock[0] += 1
        return [(0, self._delta(self._index, reasoning="thought "))]

    def _delta(self, index: int, **said: Any) -> StreamDelta:
        return StreamDelta(task_id="t", attempt=1, index=index, token_ids=[1], text="", **said)

    async def aclose(self) -> None:
        pass


def test_a_client_that_wants_no_thought_gets_a_comment_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(sse, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(sse, "settings", lambda: settings().model_copy(update={"gateway_heartbeat_s": SECONDS}))

    async def read() -> list[bytes]:
        stream = ClientStream(ChatView(RECORD), RECORD)
        return [part async for part in sse.events(Thinking(clock), stream, lambda _: b"")]  # type: ignore[arg-type]

    parts = asyncio.run(read())
    assert parts.count(sse.ALIVE) == 60 // SECONDS
    said = b"".join(parts)
    assert b"thought" not in said
    assert b"answer" in said


def test_no_event_has_a_character_at_which_clients_break_lines() -> None:
    text = "a\u2028b\u2029c\u0085d"
    part = b"data: " + encode({"text": text}) + b"\n\n"
    sent = sse.on_one_line(part).decode()
    assert sent.splitlines() == [sent.strip(), ""]
    assert json.loads(sent.removeprefix("data: "))["text"] == text


def test_who_wants_no_ids_gets_events_of_one_line() -> None:
    part = b'id: 0\ndata: {"a":"id: 1"}\n\n' + sse.ALIVE + b"event: x\nid: 2\ndata: {}\n\n"
    assert sse.without_ids(part) == b'data: {"a":"id: 1"}\n\n: alive\n\nevent: x\ndata: {}\n\n'

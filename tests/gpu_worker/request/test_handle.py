"""Readers of one handle: each hears of every change, whatever the others do meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from petiole.gpu_worker import Delta, FinishReason, Result
from petiole.gpu_worker.request import Timing, Usage
from petiole.gpu_worker.request.handle import Handle
from tests.support.toy_engine import request

RESULT = Result("r", "", (), FinishReason.STOP, None, Usage(0, 0, 0), Timing(0.0, 0.0, None, 0.0), "toy")


def a_handle(**callbacks: Any) -> Handle:
    return Handle(request(), None, **callbacks)  # type: ignore[arg-type]


def meanwhile(handle: Handle, readers: int, change: Callable[[asyncio.AbstractEventLoop], None]) -> list[Result]:
    """What readers of one event loop get, while a thread changes the handle."""

    async def main() -> list[Result]:
        tasks = [asyncio.create_task(handle._wait()) for _ in range(readers)]
        await asyncio.sleep(0)
        thread = threading.Thread(target=change, args=(asyncio.get_running_loop(),))
        thread.start()
        try:
            return await asyncio.wait_for(asyncio.gather(*tasks), 30)
        finally:
            await asyncio.to_thread(thread.join)

    return asyncio.run(main())


def test_a_reader_that_leaves_at_once_does_not_cost_another_its_end() -> None:
    handle = a_handle()

    def end(loop: asyncio.AbstractEventLoop) -> None:
        soon = loop.call_soon_threadsafe

        def slowly(*call: Any) -> None:
            """The loop runs what it was woken for before the next is woken."""
            before = len(handle._listeners)
            soon(*call)
            while len(handle._listeners) == before:
                pass

        loop.call_soon_threadsafe = slowly  # type: ignore[method-assign, assignment]
        handle._end(RESULT)
        loop.call_soon_threadsafe = soon  # type: ignore[method-assign]

    assert meanwhile(handle, 3, end) == [RESULT] * 3


def test_a_loop_that_closes_while_it_is_woken_does_not_fail_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Handle] = []
    handle = a_handle(on_done=ended.append)

    async def listen() -> None:
        handle._listen()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(listen())
    loop.close()
    with monkeypatch.context() as patched:
        patched.setattr(loop, "is_closed", lambda: False)  # as it was when the other thread asked
        handle._push(Delta(0, (1,), "a"))
        handle._end(RESULT)
    assert ended == [handle]
    assert handle.result() is RESULT

"""Calls in threads of the process, for callers of an event loop."""

from __future__ import annotations

import asyncio
import gc
import weakref

from petiole.tasks.app.thread_executor import ProcessThreads
from tests.support.site import eventually


class Text(str):
    """That a weak reference can watch."""


def _refuse(text: str) -> None:
    raise ValueError(len(text))


def test_what_a_failed_call_was_given_is_free_soon() -> None:
    """A search for cycles comes late."""

    async def failed(threads: ProcessThreads) -> weakref.ref[Text]:
        text = Text("x")
        watched, call = weakref.ref(text), threads.run(_refuse, text)
        del text
        try:
            await call
        except ValueError:  # `pytest.raises` would keep it, with its frames
            return watched
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        watched = asyncio.run(failed(ProcessThreads("refusing", 1, 8)))
        eventually(lambda: watched() is None, "the thread has ended")
    finally:
        gc.enable()

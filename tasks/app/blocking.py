"""Runs calls that block for callers of asyncio, on threads of Petiole's own.

asyncio's default threads are few, and the application's. If Petiole's calls took them while the broker is away,
everything else of the application that needs a thread would wait, too. Submissions and lookups have threads of
their own each: a lookup does not wait for submissions. Threads start at their first use, in each process."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TooManyWait(Exception):  # noqa: N818
    """As many calls wait for a thread as may."""


class ProcessThreads:
    """Up to `size` threads in each process, for up to `most` calls at once."""

    def __init__(self, name: str, size: int, most: int) -> None:
        self.most = most
        self._name, self._size = name, size
        self._of_process: dict[int, ThreadPoolExecutor] = {}
        self._running: set[Future[object]] = set()

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The call's result, in the caller's context. Raises `TooManyWait` without calling."""
        if len(self._running) >= self.most:
            raise TooManyWait(f"{self.most} calls wait already")
        future = self._threads().submit(contextvars.copy_context().run, partial(call, *args, **options))
        self._running.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._running.discard)
        return await asyncio.wrap_future(future)

    def _threads(self) -> ThreadPoolExecutor:
        process = os.getpid()
        if process not in self._of_process:  # so this is a fork, or the first call
            self._running.clear()
            self._of_process.setdefault(process, ThreadPoolExecutor(self._size, f"petiole-{self._name}"))
        return self._of_process[process]


SUBMISSIONS = ProcessThreads("submit", size=4, most=10_000)
"""More threads would not submit faster, because they share the interpreter with the event loop."""
LOOKUPS = ProcessThreads("look", size=4, most=100_000)
"""Results, states, and commands to workers."""

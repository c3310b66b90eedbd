"""Runs calls that block for callers of asyncio, on threads of Petiole's own.

asyncio's default threads are few, and the application's. If Petiole's calls took them while the broker is away,
everything else of the application that needs a thread would wait, too. Submissions and lookups have threads of
their own each: a lookup does not wait for submissions. Threads start at their first use, in each process.

A thread may take several waiting calls together, so that they share a round trip, and wake the event loop once.
They are few, so that the loop does not stand still for long when their results come."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from itertools import groupby
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TooManyWait(Exception):  # noqa: N818
    """As many calls wait for a thread as may."""


class WaitingCall:
    """One caller's: its result, or its error, once it has run."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.future = asyncio.get_running_loop().create_future()
        self.result: Any = None
        self.error: BaseException | None = None
        self._call, self._context = call, copy_context()

    def run(self, *more: Any) -> None:
        """Run it in the caller's context. `more`: arguments of the thread's."""
        try:
            self.result = self._context.run(self._call, *more)
        except BaseException as error:
            self.error = error

    def settle(self) -> None:
        """The error refers to this object, by its traceback. So the object forgets error and future."""
        error, self.error = self.error, None
        future = self.future
        del self.future
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(self.result)
        else:
            future.set_exception(error)


def run_each(calls: Iterable[WaitingCall]) -> None:
    for call in calls:
        call.run()


class _ProcessState:
    def __init__(self, name: str, size: int) -> None:
        self.pool = ThreadPoolExecutor(size, f"petiole-{name}")
        self.lock = threading.Lock()
        self.waiting: deque[WaitingCall] = deque()
        self.unsettled = self.working = 0


class ProcessThreads:
    """Up to `size` threads in each process, for up to `most` calls. A thread takes up to `together` calls that
    wait, and `work` runs them."""

    def __init__(
        self,
        name: str,
        size: int,
        most: int,
        together: int = 1,
        work: Callable[[Sequence[WaitingCall]], object] = run_each,
    ) -> None:
        self.most = most
        self._size, self._together, self._work = size, together, work
        self._make = partial(_ProcessState, name, size)
        self._of_process: dict[int, _ProcessState] = {}

    async def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The call's result, in the caller's context. Raises `TooManyWait` without calling."""
        process = os.getpid()
        mine = self._of_process.get(process) or self._of_process.setdefault(process, self._make())
        one = WaitingCall(partial(call, *args, **options))
        with mine.lock:
            if mine.unsettled >= self.most:
                raise TooManyWait(f"{self.most} calls wait already")
            mine.unsettled += 1
            mine.waiting.append(one)
            if starts := mine.working < self._size:
                mine.working += 1
        try:
            if starts:
                mine.pool.submit(self._empty, mine)
            result: T = await one.future
            return result
        finally:
            with mine.lock:
                mine.unsettled -= 1

    def _empty(self, mine: _ProcessState) -> None:
        while calls := self._taken(mine):
            self._work(calls)
            for loop, some in groupby(calls, lambda call: call.future.get_loop()):
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(_settle, list(some))

    def _taken(self, mine: _ProcessState) -> list[WaitingCall]:
        with mine.lock:
            calls: list[WaitingCall] = []
            while mine.waiting and len(calls) < self._together:
                if not (call := mine.waiting.popleft()).future.cancelled():
                    calls.append(call)
            if not calls:
                mine.working -= 1
            return calls


def _settle(calls: Iterable[WaitingCall]) -> None:
    for call in calls:
        call.settle()


LOOKUPS = ProcessThreads("look", size=4, most=100_000)
"""Results, states, and commands to workers."""

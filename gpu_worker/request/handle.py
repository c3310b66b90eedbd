"""The handle that `Engine.submit` returns: a request's output stream and its result.

Only the text thread writes to a handle (`_admit`, `_push`, `_end`). Any number of threads and event loops may read
it: with `for`, `async for`, `await` or `result()`. Each reader sees all deltas from the first. A handle ends
exactly once (invariant I8): with a `Result`, an error or `HandedBack`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from typing import Protocol

from petiole.contract.results.outputs import Prepared
from petiole.gpu_worker.request import Delta, FinishReason, Request, Result

logger = logging.getLogger(__name__)


class Controller(Protocol):
    """The part of the engine that a handle calls."""

    def cancel_request(self, handle: Handle, reason: FinishReason) -> None: ...

    def hand_back_request(self, handle: Handle) -> None: ...


class Handle:
    """A submitted request. Thread-safe.

    `adapter_key` is the content key of the request's adapter, or None. `prepared` says what is known of the
    request before it is admitted. A preparation thread sets both.
    """

    def __init__(
        self,
        request: Request,
        engine: Controller,
        *,
        on_prepared: Callable[[Handle, Prepared], None] | None = None,
        on_delta: Callable[[Handle, Delta], None] | None = None,
        on_admitted: Callable[[Handle], None] | None = None,
        on_done: Callable[[Handle], None] | None = None,
    ) -> None:
        self.request = request
        self.adapter_key: str | None = None
        self.prepared: Prepared | None = None
        self.admitted = False
        self.error: BaseException | None = None
        self._engine: Controller | None = engine  # until the end
        self._on_prepared = on_prepared
        self._on_delta, self._on_admitted, self._on_done = on_delta, on_admitted, on_done
        self._deltas: list[Delta] = []
        self._result: Result | None = None
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        state = "done" if self.done() else "running" if self.admitted else "waiting"
        return f"<Handle {self.request.request_id} {state}>"

    # ------------------------------------------------------------ control

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End the request at the next step with its partial output and the finish reason `reason`."""
        engine = self._engine
        if engine is not None and not self.done():
            engine.cancel_request(self, reason)

    def hand_back(self) -> None:
        """End the request with `HandedBack`, after all committed tokens have been delivered."""
        engine = self._engine
        if engine is not None and not self.done():
            engine.hand_back_request(self)

    # ------------------------------------------------------------ reading

    def done(self) -> bool:
        return self._result is not None or self.error is not None

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result. Raises the request's error, or TimeoutError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                raise TimeoutError(f"request {self.request.request_id} has not ended after {timeout} s")
        return self._outcome()

    def __iter__(self) -> Iterator[Delta]:
        seen = 0
        while True:
            with self._changed:
                while len(self._deltas) == seen and not self.done():
                    self._changed.wait()
                fresh, ended = self._deltas[seen:], self.done()
            yield from fresh
            seen += len(fresh)
            if ended and len(self._deltas) == seen:
                if self.error is not None:
                    raise self.error
                return

    async def __aiter__(self) -> AsyncIterator[Delta]:
        seen = 0
        changed, stop = self._listen()
        try:
            while True:
                await changed.wait()
                changed.clear()
                with self._changed:
                    fresh, ended = self._deltas[seen:], self.done()
                for delta in fresh:
                    yield delta
                seen += len(fresh)
                if ended and len(self._deltas) == seen:
                    if self.error is not None:
                        raise self.error
                    return
        finally:
            stop()

    def __await__(self) -> Generator[object, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        changed, stop = self._listen()
        try:
            while not self.done():
                await changed.wait()
                changed.clear()
        finally:
            stop()
        return self._outcome()

    def _listen(self) -> tuple[asyncio.Event, Callable[[], None]]:
        """An asyncio event, initially set, that every change sets, and a function that unsubscribes it."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        changed.set()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._listeners.append(wake)
        return changed, lambda: self._listeners.remove(wake)

    def _outcome(self) -> Result:
        if self.error is not None:
            raise self.error
        assert self._result is not None
        return self._result

    # ------------------------------------------------------------ written by a preparation thread

    def _prepare(self, prepared: Prepared, adapter_key: str | None) -> None:
        self.prepared, self.adapter_key = prepared, adapter_key
        self._call(self._on_prepared, prepared)

    # ------------------------------------------------------------ written by the text thread

    def _admit(self) -> None:
        if not self.admitted:
            self.admitted = True
            self._call(self._on_admitted)

    def _push(self, delta: Delta) -> None:
        assert not self.done(), "I8: a delta after the end"
        with self._changed:
            self._deltas.append(delta)
            self._notify()
        self._call(self._on_delta, delta)

    def _end(self, outcome: Result | BaseException) -> None:
        with self._changed:
            assert not self.done(), "I8: a second end"
            if isinstance(outcome, Result):
                self._result = outcome
            else:
                self.error = outcome
            self._notify()
        self._call(self._on_done)
        # Their owner may refer to this handle: a cycle would keep both until a garbage collection.
        self._on_prepared = self._on_delta = self._on_admitted = self._on_done = None
        self._engine = None  # whose memory a result that is kept would keep, too

    def _notify(self) -> None:
        self._changed.notify_all()
        for wake in tuple(self._listeners):  # a copy: a reader that is woken may leave before the next is
            wake()

    def _call(self, callback: Callable[..., None] | None, *more: object) -> None:
        if callback is not None:
            try:
                callback(self, *more)
            except BaseException:  # even SystemExit must not end the text thread
                logger.exception("a callback of request %s raised", self.request.request_id)

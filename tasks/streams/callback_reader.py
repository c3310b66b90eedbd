"""A reader for whoever follows many streams at once, such as a gateway: it hands each delta on where it arrives.

The protocol is that of every reader (`following`), and most of its steps are `receive`. An `AsyncStream` wakes an
asyncio task for each of them. Here the shared connection's own task feeds the protocol, and this reader's task
sleeps until there is something else to do: the log must be read, the reader's key renewed, or nothing has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.servers import connections
from petiole.tasks.streams.protocol import Step
from petiole.tasks.streams.readers import AsyncStream

_HEARD = object()
"""In place of a message: `receive` has been answered, once or more often."""


class CallbackStream(AsyncStream):
    """`run` calls `take` with each delta, up to the last one, which may be that of a failed task. `hold` stops
    this as soon as possible, and `resume` lets it go on."""

    def __init__(self, task_id: str, take: Callable[[StreamDelta], None], **options: Any) -> None:
        super().__init__(task_id, **options)
        self._take = take
        self._room = asyncio.Event()
        self._room.set()
        self._fault: Exception | None = None

    async def run(self) -> None:
        """Raises what prevents the reading."""
        try:
            while not self._complete:
                assert self._step is not None
                answer = await self._perform(self._step)
                if answer is not _HEARD:
                    self._go_on(self._advance(answer))
                elif self._fault is not None:
                    raise self._fault
                await self._room.wait()
        finally:
            await self.aclose()

    async def _unsubscribe(self) -> None:
        if (subscription := self._subscription) is not None:
            self._subscription = None
            subscription.leave()

    async def aclose(self) -> None:
        if self._closed or self._abandoned:
            await super().aclose()
        else:  # without an asyncio task of its own, because nothing is waited for
            self._leave()
            await self._unsubscribe()

    def hold(self) -> None:
        self._room.clear()

    def resume(self) -> None:
        self._room.set()

    def _go_on(self, step: Step) -> None:
        """Hand out deltas, up to the next operation or the last delta."""
        while not isinstance(step, tuple):
            if (delta := self._hand_out(step)) is not None:
                self._take(delta)
            if self._complete:
                return
            step = self._steps.send(None)
        self._step = step

    async def _receive(self, left_s: Callable[[], float]) -> Any:
        if interest := self.interest():
            await connections.aperform(interest)
        assert self._subscription is not None
        if await self._subscription.listen(left_s, self._hear):
            return _HEARD
        self._watch.silent()
        return None

    def _hear(self, raw: bytes) -> bool:
        """Feed a message to the protocol. Returns whether it waits for the next one; otherwise `run` goes on."""
        try:
            self._go_on(self._steps.send(raw))
        except Exception as error:
            self._fault = error
            return False
        if self._complete or not self._room.is_set() or self._interest_is_due():
            return False
        assert isinstance(self._step, tuple)
        return bool(self._step[0] == "receive")

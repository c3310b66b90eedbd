"""Silent streams look together whether they have missed anything.

A stream in which nothing has come for a second looks whether its task has ended, and whether its log has grown:
pub/sub may lose messages. With many streams in one event loop, that was most of what a silent stream cost. Here
the streams of a loop that look at about the same time share the look: one command for all results, and one round
trip for all logs. Mostly it says that nothing has happened. Only a stream for which it does not say so reads its
result and its log itself, as a stream alone does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from celery.backends.base import Backend, DisabledBackend
from celery.backends.redis import RedisBackend

from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import stream_keys

TOGETHER_S = 0.1
"""For how long the first stream that looks waits for others."""
MOST_AT_ONCE = 128
"""Streams in one round trip, so that the event loop is not held."""


class IdleStream(NamedTuple):
    """A stream that looks. `entries`: of the log, that it has read. `unannounced`: it waits for what announces the
    task, too. `more`: commands that are due, and whose answers do not matter."""

    task_id: str
    backend: Backend
    entries: int
    unannounced: bool
    more: Sequence[tuple[Any, ...]] = ()


class StreamPoller:
    """The streams of one event loop that look now."""

    def __init__(self) -> None:
        self._waiting: list[tuple[IdleStream, asyncio.Future[bool]]] = []
        self._looking: set[asyncio.Task[None]] = set()

    def quiet(self, stream: IdleStream) -> asyncio.Future[bool]:
        """Whether it is certain that nothing has happened. If the look fails, it is not."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()
        self._waiting.append((stream, answer))
        if len(self._waiting) == 1:
            loop.call_later(TOGETHER_S, self._begin)
        return answer

    def _begin(self) -> None:
        waiting, self._waiting = self._waiting, []
        looking = asyncio.ensure_future(self._answer(waiting))
        self._looking.add(looking)
        looking.add_done_callback(self._looking.discard)

    async def _answer(self, waiting: Sequence[tuple[IdleStream, asyncio.Future[bool]]]) -> None:
        for at in range(0, len(waiting), MOST_AT_ONCE):
            some = [one for one in waiting[at : at + MOST_AT_ONCE] if not one[1].done()]
            try:
                quiet = await _look([stream for stream, _ in some])
            except Exception:
                quiet = [False] * len(some)
            for (_, answer), found in zip(some, quiet, strict=True):
                if not answer.done():
                    answer.set_result(found)


stream_poller = connections.PerLoop(StreamPoller)
"""The poller of the running event loop."""


async def _look(streams: Sequence[IdleStream]) -> list[bool]:
    """Results before logs: if a task has ended, its log is complete."""
    ended = await LOOKUPS.run(_ended, streams)
    commands: list[tuple[Any, ...]] = []
    for stream in streams:
        keys = stream_keys(stream.task_id)
        commands += stream.more
        commands.append(("LLEN", keys.log))
        if stream.unannounced:
            commands.append(("HGETALL", keys.state))
    answers, found = iter(await connections.aperform(commands, raises=False)), []
    for stream, over in zip(streams, ended, strict=True):
        for _ in stream.more:
            next(answers)
        same = next(answers) == stream.entries
        state = next(answers) if stream.unannounced else {}
        found.append(same and not over and isinstance(state, dict) and b"prepared" not in state)
    return found


def _ended(streams: Sequence[IdleStream]) -> list[bool]:
    """Whether a result is stored, or may be: only a Redis says it for many tasks together."""
    found = [not isinstance(stream.backend, RedisBackend | DisabledBackend) for stream in streams]
    for backend in {id(stream.backend): stream.backend for stream in streams}.values():
        if isinstance(backend, RedisBackend):
            own = [k for k, stream in enumerate(streams) if stream.backend is backend]
            stored = backend.mget([backend.get_key_for_task(streams[k].task_id) for k in own])
            for k, result in zip(own, stored, strict=True):
                found[k] = result is not None
    return found

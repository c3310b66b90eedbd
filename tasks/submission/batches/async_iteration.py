"""`async for` over a batch: the loop runs in a thread of its own, so that the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor

from petiole.tasks.submission.batches.progress import RowResult


async def results(rows: Generator[RowResult], stop: Callable[[], None]) -> AsyncIterator[RowResult]:
    """The results of the loop `rows`, which ends when the caller stops or is cancelled. `stop`: ends its wait."""
    thread, running = ThreadPoolExecutor(1, "petiole-batch"), asyncio.get_running_loop()
    try:
        while (result := await running.run_in_executor(thread, next, rows, None)) is not None:
            yield result
    finally:
        stop()
        ended = running.run_in_executor(thread, rows.close)
        thread.shutdown(wait=False)
        await asyncio.shield(ended)

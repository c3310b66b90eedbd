"""A conversation that comes back after its KV has left the cache, or after its worker: how long until its first
token, beside computing it again."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from bench.harness import load
from bench.harness.checkpoints.decoders import QWEN3_06B, TINY, checkpoint
from bench.harness.runs import Bench
from petiole.gpu_worker import Engine, Request

FROM_MEMORY, FROM_DISK = 0.08, 0.2
MOST_COMPUTED = 300
"""Tokens, of the 2,000 of a prompt of a conversation whose worker was replaced."""
TURN = 20


def returning(bench: Bench) -> None:
    """The cache holds one conversation at a time."""
    long = replace(QWEN3_06B, max_positions=8192)
    shape, length = (long, 4000) if bench.large else (TINY, bench.pick(600, 1500))
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(shape))

        def worker(folder: str) -> AbstractContextManager[Engine]:
            room = length + 100
            return bench.engine(model, shape, kv_tier=folder, num_pages=room, max_model_len=room)

        places = {"memory": (_folder("/dev/shm"), FROM_MEMORY), "disk": (_folder(None), FROM_DISK)}
        for place, (made, target) in places.items():
            with made as folder, worker(folder) as engine:
                asked = load.requests(bench.pick(2, 4), length, 8, seed=len(place))
                computed = [_first_token_ms(engine, request) for request in asked]
                again = [_turn(request) for request in asked]
                if place == "disk":
                    _leave_memory(Path(folder))
                restored = [_first_token_ms(engine, request) for request in again]
                bench.report.add(
                    f"{shape.name}, a conversation of {length} tokens returns after eviction, from {place}: TTFT",
                    statistics.median(restored),
                    "ms",
                    peer=statistics.median(computed),
                    target=target,
                    better="lower",
                    note="peer: computing it",
                )
        n = min(2000, length)
        asked = load.requests(bench.pick(2, 4), n, 8, seed=9)
        computed_by = {"the other of two workers": _computed_beside, "a new worker": _computed_after}
        for who, computed_of_each in computed_by.items():
            with _folder("/dev/shm") as folder:
                bench.report.add(
                    f"{shape.name}, conversations of {n:,} tokens on {who}: computed of each",
                    computed_of_each(lambda: worker(folder), asked),
                    "tokens",
                    target=MOST_COMPUTED,
                    better="lower",
                )


def _computed_beside(worker: Callable[[], AbstractContextManager[Engine]], asked: list[Request]) -> float:
    """Tokens of a conversation that a worker computes while the one that had it lives on."""
    with worker() as first, worker() as second:
        first.generate(asked)
        load.rest()  # the user reads
        return _computed(second, asked)


def _computed_after(worker: Callable[[], AbstractContextManager[Engine]], asked: list[Request]) -> float:
    """Tokens of a conversation that a worker computes that replaces the one that had it."""
    with worker() as first:
        first.generate(asked)
    with worker() as second:
        return _computed(second, asked)


def _computed(engine: Engine, asked: list[Request]) -> float:
    before = float(engine.stats()["prompt_tokens"])
    engine.generate([_turn(request) for request in asked])
    return (float(engine.stats()["prompt_tokens"]) - before) / len(asked)


def _first_token_ms(engine: Engine, request: Request) -> float:
    return load.at_concurrency(engine, [request], 1).ttfts_ms[0]


def _turn(request: Request) -> Request:
    assert isinstance(request.prompt, list)
    return replace(request, prompt=[*request.prompt, *range(5, 5 + TURN)])


@contextmanager
def _folder(parent: str | None) -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir=parent, prefix="petiole-bench-") as folder:
        yield folder


def _leave_memory(folder: Path) -> None:
    """Write the files to the disk, and drop what the system keeps of them in memory."""
    for path in folder.rglob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

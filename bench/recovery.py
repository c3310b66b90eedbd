"""A worker dies, or is deployed, in mid-sentence: how long its readers wait for the next delta.

Two real workers on an embedded Redis. The first takes all tasks, since the second does not consume yet; when every
reader has its first delta the second begins to consume and the first gets its signal. What counts is the time from
the signal to the first delta of the next attempt, in the hands of the reader that waits longest. Every stream must
then be whole.

`--kills N` measures N kills of a worker with the default settings instead, of one stream each: a fleet of two
that goes on, in which the dead are replaced.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any

from bench.report import Report, arguments, progress

PATIENCE_S = 120.0
TRIES = 5
names = count()


@dataclass(frozen=True)
class Case:
    """How the first worker ends, under which settings, and how long a reader may wait."""

    name: str
    signal: signal.Signals
    settings: dict[str, str]
    target_s: float


DEPLOY = Case("SIGTERM, drain_seconds=0", signal.SIGTERM, {"PETIOLE_DRAIN_SECONDS": "0"}, 3.0)
CASES = [
    Case("SIGKILL, the defaults", signal.SIGKILL, {}, 20.0),
    Case("SIGKILL, visibility_timeout=4", signal.SIGKILL, {"PETIOLE_VISIBILITY_TIMEOUT_S": "4"}, 6.0),
    DEPLOY,
]


async def waits(n: int, tokens: int, end: Any) -> list[float]:
    """Seconds from `end()` to the next attempt's first delta, of each stream that was interrupted."""
    from petiole.tasks import generate

    begun = asyncio.Semaphore(0)
    resumed: list[float] = []

    async def read(i: int) -> None:
        attempt, seen = 0, 0
        async for delta in generate.astream(
            prompt=f"Count from {i} to 99.", timeout_s=PATIENCE_S, max_tokens=tokens, ignore_eos=True, seed=i
        ):
            if not attempt:
                begun.release()
            elif delta.attempt > attempt:
                resumed.append(time.perf_counter())
            attempt, seen = delta.attempt, seen + len(delta.token_ids)
        assert seen == tokens, f"{seen} of {tokens} tokens came"

    readers = [asyncio.create_task(read(i)) for i in range(n)]
    for _ in range(n):
        await begun.acquire()
    ended = await asyncio.to_thread(end)
    await asyncio.gather(*readers)
    return [at - ended for at in resumed]


def round_of(case: Case, n: int, tokens: int) -> list[float]:
    from petiole.tasks import celery_app
    from petiole.tasks.commands import demo

    queue = celery_app.conf.task_default_queue
    with ExitStack() as stack:
        second, _ = stack.enter_context(demo.worker(f"bench{next(names)}", **case.settings))
        while not celery_app.control.cancel_consumer(queue, destination=[second], reply=True, timeout=5):
            pass
        _, first = stack.enter_context(demo.worker(f"bench{next(names)}", **case.settings))

        def end() -> float:
            celery_app.control.add_consumer(queue, destination=[second], reply=False)
            first.send_signal(case.signal)
            return time.perf_counter()

        return asyncio.run(waits(n, tokens, end))


def measure(report: Report, case: Case, rounds: int, n: int, tokens: int) -> None:
    seconds: list[float] = []
    for _ in range(TRIES * rounds):  # again where every task had ended before its worker did
        seconds += round_of(case, n, tokens)
        if len(seconds) >= rounds * n // 2:
            break
    if not seconds:
        raise RuntimeError("no stream was interrupted: the answers are too short for this machine")
    report.add(
        f"{case.name}: to the next delta, at most",
        max(seconds),
        "s",
        target=case.target_s,
        better="lower",
        samples=seconds,
        note=f"{len(seconds)} streams",
    )


KILLED_MEDIAN_S, KILLED_MOST_S = 1.5, 2.5
SEEN_S = 3.0
"""How long a worker lives before it is killed, so that the other one knows it."""


def killed(report: Report, kills: int, tokens: int) -> None:
    """Kill the worker that streams, `kills` times, with another one that has room."""
    from petiole.tasks.commands import demo

    seconds: list[float] = []
    with ExitStack() as stack:
        fleet = [stack.enter_context(demo.worker(f"bench{next(names)}")) for _ in range(2)]
        for _ in progress(range(kills), "workers that are killed"):
            for _ in range(TRIES):
                time.sleep(SEEN_S)

                def end() -> float:
                    holder = next(one for one in fleet if one[1].pid == holding_process())
                    fleet.remove(holder)
                    holder[1].kill()
                    return time.perf_counter()

                waited = asyncio.run(waits(1, tokens, end))
                fleet.append(stack.enter_context(demo.worker(f"bench{next(names)}")))
                if waited:
                    seconds += waited
                    break
    for what, value, target_s in (
        ("median", statistics.median(seconds), KILLED_MEDIAN_S),
        ("maximum", max(seconds), KILLED_MOST_S),
    ):
        report.add(
            f"SIGKILL, the defaults, another worker has room: to the next delta, {what}",
            value,
            "s",
            target=target_s,
            better="lower",
            samples=seconds,
            note=f"{len(seconds)} kills",
        )


def holding_process() -> int:
    """The process that holds the only task: it is part of its owner's name."""
    from petiole.tasks.servers import connections

    keys: Any = connections.streams().keys("petiole:unacked:*")
    (key,) = keys
    return int(key.decode().split(":")[3])


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=0, help="measure so many kills, and nothing else")
    options = parser.parse_args(argv)
    from petiole.tasks.commands import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    settings.cache_clear()
    report = Report("From the end of a worker to the next delta (embedded Redis, petiole-tiny)")
    if options.kills:
        killed(report, options.kills, 1800)
        report.finish(options.json)
        return
    rounds, n = (1, 2) if options.quick else (3, 8)
    for case in progress([DEPLOY] if options.quick else CASES, "workers that end"):
        measure(report, case, rounds, n, 1800)
    report.finish(options.json)


if __name__ == "__main__":
    main()

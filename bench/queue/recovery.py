"""A worker dies, or is deployed, in mid-sentence: how long do its readers wait for the next delta?

Two real workers run on an embedded Redis. The first takes all tasks, because the second does not consume yet. When
every reader has its first delta, the second begins to consume and the first gets its signal. The figure is the
time from the signal until the reader that waits longest has the first delta of the next attempt. Every stream must
then be whole.

Then workers that the others have seen are killed, with one stream each: a fleet of two goes on, in which each dead
worker is replaced. `--kills N` is the number of kills. `--rabbitmq URL` kills ten workers on that broker, too, in
a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from bench.harness.report import Measurement, Report, arguments, progress

PATIENCE_S = 120.0
TRIES = 5
KILLS = 10
names = count()


@dataclass(frozen=True)
class Case:
    """How the first worker ends, under which settings, and how long a reader may wait."""

    name: str
    signal: signal.Signals
    settings: dict[str, str]
    target_s: float


LEASE_OF_4_S = {"PETIOLE_VISIBILITY_TIMEOUT_S": "4"}
DEPLOY = Case("SIGTERM, drain_seconds=0", signal.SIGTERM, {"PETIOLE_DRAIN_SECONDS": "0"}, 3.0)
CASES = [
    Case("SIGKILL, visibility_timeout=4", signal.SIGKILL, LEASE_OF_4_S, 6.0),
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
    from petiole.tasks.commands.demos import demo

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
    for _ in range(TRIES * rounds):  # repeat if every task had ended before its worker
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
"""How long a worker lives before it is killed, so that the other one has seen it."""


def killed(report: Report, broker: str, kills: int, tokens: int) -> None:
    """Kill the worker that streams, `kills` times, with another one that has room."""
    from petiole.tasks.commands.demos import demo

    seconds: list[float] = []
    with ExitStack() as stack:
        fleet = dict(stack.enter_context(demo.worker(f"bench{next(names)}")) for _ in range(2))

        def kill_who_streams() -> float:
            fleet.pop(who_streams(list(fleet))).kill()
            return time.perf_counter()

        for _ in progress(range(kills), "workers that are killed"):
            for _ in range(TRIES):
                time.sleep(SEEN_S)

                waited = asyncio.run(waits(1, tokens, kill_who_streams))
                fleet |= [stack.enter_context(demo.worker(f"bench{next(names)}"))]
                if waited:
                    seconds += waited
                    break
    for what, value, target_s in (
        ("median", statistics.median(seconds), KILLED_MEDIAN_S),
        ("maximum", max(seconds), KILLED_MOST_S),
    ):
        report.add(
            f"SIGKILL, the defaults, {broker}, another worker has room: to the next delta, {what}",
            value,
            "s",
            target=target_s,
            better="lower",
            samples=seconds,
            note=f"{len(seconds)} kills",
        )


def who_streams(fleet: list[str]) -> str:
    """The worker that runs the only task."""
    from petiole.tasks import celery_app

    while True:
        active = celery_app.control.inspect(destination=fleet, limit=len(fleet)).active() or {}
        for name, tasks in active.items():
            if tasks:
                return str(name)


def killed_on(report: Report, url: str, kills: int) -> None:
    """The same in another process, whose broker is at `url`; streams and results stay in the embedded Redis."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        options = ["--broker", url, "--kills", str(kills), "--json", str(path)]
        subprocess.run([sys.executable, "-m", "bench.queue.recovery", *options], check=True)
        for result in json.loads(path.read_text())["results"]:
            derived = {"ratio", "met"}
            report.results.append(Measurement(**{k: v for k, v in result.items() if k not in derived}))


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=KILLS, help="how many, of workers that the others know")
    parser.add_argument("--rabbitmq", metavar="URL", default="", help="an empty RabbitMQ, for kills there")
    parser.add_argument("--broker", metavar="URL", default="", help="nothing but the kills, with this broker")
    options = parser.parse_args(argv)
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    if options.broker:
        os.environ.update({"PETIOLE_BROKER_URL": options.broker, "PETIOLE_REDIS_URL": "embedded://"})
    settings.cache_clear()
    report = Report("From the end of a worker to the next delta (embedded Redis, petiole-tiny)")
    rounds, n, kills = (1, 2, 1) if options.quick else (3, 8, options.kills)
    if options.broker:
        kills = min(kills, KILLS)
    else:
        for case in progress([DEPLOY] if options.quick else CASES, "workers that end"):
            measure(report, case, rounds, n, 1800)
    killed(report, "RabbitMQ" if options.broker else "Redis", kills, 1800)
    if options.rabbitmq:
        killed_on(report, options.rabbitmq, kills)
    report.finish(options.json)


if __name__ == "__main__":
    main()

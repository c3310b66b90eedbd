"""Submissions from one process: how many, how long an event loop stands still meanwhile, how soon they fail while
the broker is away, and what a replica's confirmation costs.

A redis-server with one replica runs beside, and no worker: the tasks stay in their queue. The peer of `delay` and
`adelay` is Celery's own `delay` of a task without checks, routes and headers; their floor is redis-py's LPUSH of
the same bytes, one after the other.

    python -m bench.queue.submission [--quick] [--json PATH]

It needs a process of its own, because it ends the broker that the process has configured."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from bench.harness.report import Report, arguments, best_of
from petiole.tasks.servers import embedded
from petiole.tasks.servers.connections import connect

AT_ONCE = 1000
TARGET_A_SECOND, TARGET_STILL_MS, TARGET_AWAY_S, TARGET_IMPORT_S = 1700.0, 50.0, 5.0, 0.3
OPTIONS: dict[str, Any] = {"prompt": "What is 17 + 25?", "max_tokens": 4}


@contextmanager
def server(folder: Path, *options: str) -> Iterator[tuple[redis.Redis, subprocess.Popen[bytes]]]:
    folder.mkdir()
    path = folder / "r.sock"
    command = [embedded.server_binary(), "--unixsocket", str(path), "--dir", str(folder), "--save", "", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        client = redis.Redis(unix_socket_path=str(path))
        until(client.ping)
        yield client, process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + 30
    while True:
        with suppress(redis.ConnectionError):
            if condition():
                return
        if time.monotonic() > give_up_at:
            raise TimeoutError("the servers are not ready within 30 s")
        time.sleep(0.01)


async def at_once(submit: Callable[..., Any], number: int) -> tuple[float, float, list[BaseException]]:
    """Seconds until all are submitted, the longest time that the event loop stood still, and the errors."""
    still, done = 0.0, asyncio.gather(*(submit(**OPTIONS) for _ in range(number)), return_exceptions=True)
    began = last = time.perf_counter()
    while not done.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        still, last = max(still, now - last - 0.001), now
    return last - began, still, [one for one in await done if isinstance(one, BaseException)]


def measure(report: Report, url: str, primary: subprocess.Popen[bytes], *, quick: bool) -> None:
    from petiole.tasks import generate

    number, rounds, each = (20, 1, 20) if quick else (AT_ONCE, 5, 300)
    plain = Celery("plain", broker=url, set_as_current=False)
    noop = plain.task(_nothing, name="noop", shared=False)
    generate.delay(**OPTIONS)  # imports, connections
    client = connect(url)
    message = client.lindex("petiole", 0)
    assert message is not None
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: generate.delay(**OPTIONS),
        "peer": lambda: noop.delay(**OPTIONS),
        "confirmed": lambda: generate.delay(**OPTIONS, confirm=1),
        "floor": lambda: client.lpush("bench", message),
    }
    best, runs = dict.fromkeys(ways, float("inf")), []
    for _ in range(rounds):  # in turns, because the machine is not always as fast
        for name, way in ways.items():
            best[name] = min(best[name], best_of(way, rounds=1, number=each))
        runs.append(asyncio.run(at_once(generate.adelay, number)))
    assert not any(errors for *_, errors in runs)
    us = {name: 1e6 * seconds for name, seconds in best.items()}
    report.add("delay()", us["ours"], "us", peer=us["peer"], floor=us["floor"], better="lower")
    name = "delay(confirm=1), with a replica beside"
    report.add(name, us["confirmed"], "us", peer=us["ours"], better="lower")
    seconds = min(run[0] for run in runs) / number
    name = f"{number} adelay() at once"
    report.add(f"{name}: each", 1e6 * seconds, "us", peer=us["peer"], floor=us["floor"], better="lower")
    report.add(name, 1 / seconds, "/s", target=None if quick else TARGET_A_SECOND)
    still = 1000 * min(run[1] for run in runs)
    report.add("the event loop stands still meanwhile", still, "ms", target=TARGET_STILL_MS, better="lower")
    primary.kill()
    primary.wait()
    seconds, _, errors = asyncio.run(at_once(generate.adelay, number))
    assert len(errors) == number
    report.add("the broker is away: the last one fails", seconds, "s", target=TARGET_AWAY_S, better="lower")


def _nothing(**options: Any) -> None:
    """A task without a body."""


def import_s() -> float:
    """Processor seconds that `from petiole import generate` takes in a new process beyond Python's own start."""
    code = "import time; t = time.process_time(); from petiole import generate; print(time.process_time() - t)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    report = Report("Submissions from one process")
    imports = min(import_s() for _ in range(1 if options.quick else 5))
    report.add("import of the producer side", imports, "s", target=TARGET_IMPORT_S, better="lower")
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder) / "primary", "--port", "0", "--repl-diskless-sync-delay", "0") as (client, primary),
        server(Path(folder) / "replica", "--port", "0") as (replica, _),
    ):
        port = free_port()
        client.config_set("port", port)
        replica.replicaof("127.0.0.1", str(port))
        until(lambda: replica.info("replication")["master_link_status"] == "up")
        url = f"redis+socket://{folder}/primary/r.sock?virtual_host=0"
        os.environ["PETIOLE_BROKER_URL"] = url
        measure(report, url, primary, quick=options.quick)
    report.finish(options.json)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


if __name__ == "__main__":
    main()

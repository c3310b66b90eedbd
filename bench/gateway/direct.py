"""What HTTP adds: `petiole serve`, in turns with direct reading of the same streams.

A gateway runs as `petiole serve` starts it, on the embedded Redis. Its processor time is read from outside.

first delta     a real worker runs the tiny model. One client asks, waits for the first text, and begins again
                when its answer has ended: through the gateway, and through `generate.astream`
one token       whole answers of one token; beside the processor time of `delay` itself
a key           the same, in turns with a gateway that asks for keys and counts what their limits say (`keyed`)
a proxy         a stream of 33 chunks, in turns with LiteLLM's proxy and sglang-router before a mock (`proxied`)
a delta         no worker: a process writes many streams at the pace of one, and clients follow all of them: over
                HTTP, and as `AsyncStream` in one process
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.gateway import keyed, proxied
from bench.gateway.served import PROMPT, Client, Served, median, serving
from bench.harness.report import Report, arguments
from bench.harness.writer import writing_all

FIRST_ADDED_MS, ONE_TOKEN_ADDED_MS, DELTA_US = 1.0, 1.0, 60.0


async def one_client(report: Report, gateway: Served, n: int) -> float:
    """Returns the milliseconds that are added to the first delta."""
    from petiole.tasks import generate

    client = Client(gateway.address)
    await client.connect()
    asked = {"model": "petiole-tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}

    async def through_gateway() -> float:
        began = time.perf_counter()
        client.ask("POST", "/v1/completions", {**asked, "stream": True})
        await client.events(b'"text":"')
        first = time.perf_counter() - began
        await client.events()
        await client.finish()
        return first * 1e3

    async def direct() -> float:
        began, first = time.perf_counter(), 0.0
        async for _ in generate.astream(prompt=PROMPT, max_tokens=4, temperature=0, timeout_s=60):
            first = first or time.perf_counter() - began
        return first * 1e3

    through: list[float] = []
    directly: list[float] = []
    for _ in range(n + 10):
        through.append(await through_gateway())
        directly.append(await direct())
    added = median(report, "first delta through the gateway", "ms", through[10:])
    added -= median(report, "first delta of generate.astream", "ms", directly[10:])
    report.add("  added to it", max(0.0, added), "ms", target=FIRST_ADDED_MS, better="lower")

    async def whole() -> float:
        began = gateway.cpu_s
        client.ask("POST", "/v1/completions", {**asked, "max_tokens": 1})
        await client.answer()
        return (gateway.cpu_s - began) * 1e3

    async def submitted() -> float:
        began = time.process_time()
        result = await generate.adelay(prompt=PROMPT, max_tokens=1, temperature=0)
        taken = (time.process_time() - began) * 1e3
        await result.aget(timeout=60)
        return taken

    whole_ms, delay_ms = list[float](), list[float]()
    for _ in range(n + 10):
        whole_ms.append(await whole())
        delay_ms.append(await submitted())
    beside = median(report, "one token: processor time of the gateway", "ms", whole_ms[10:])
    beside -= median(report, "one token: processor time of delay()", "ms", delay_ms[10:])
    report.add("  beside it", max(0.0, beside), "ms", target=ONE_TOKEN_ADDED_MS, better="lower")
    await client.aclose()
    return max(0.0, added)


# ---------------------------------------------------------------- many streams


@dataclass(frozen=True)
class Streams:
    """`n` streams at a time, each of `deltas` deltas, `per_s` of them in a second."""

    n: int
    per_s: float
    deltas: int

    @property
    def name(self) -> str:
        return f"{self.n} streams of {self.per_s:g} deltas a second"


def record(streams: Streams, name: str) -> list[str]:
    """The gateway's record of each, as a request writes it. Returns their ids."""
    from petiole.gateway.core.record import RequestRecord, dump
    from petiole.tasks.servers import connections
    from petiole.tasks.wire.keys import gateway_key

    ids = [f"{name}-{one}" for one in range(streams.n)]
    with connections.streams().pipeline(transaction=False) as pipe:
        for one in ids:
            asked = RequestRecord(id=one, kind="chat.completion", created=0, model="bench", tasks=[one])
            pipe.set(gateway_key(one), dump(asked), ex=600)
        pipe.execute()
    return ids


def begin(writer: subprocess.Popen[bytes]) -> None:
    assert writer.stdin is not None
    writer.stdin.close()


async def over_http(gateway: Served, streams: Streams, name: str) -> tuple[float, float]:
    """Processor seconds of the gateway, and seconds in all."""
    writer = writing_all(name, streams.n, streams.deltas, streams.per_s)
    clients = [(Client(gateway.address), one) for one in record(streams, name)]
    for client, one in clients:
        await client.connect()
        client.ask("GET", f"/v1/chat/completions/{one}?stream=true")
        await client.events(b'"role"')
    began, cpu = time.perf_counter(), gateway.cpu_s
    begin(writer)
    counts = await asyncio.gather(*(client.events() for client, _ in clients))
    taken = gateway.cpu_s - cpu, time.perf_counter() - began
    await asyncio.to_thread(writer.wait)
    if wrong := [count for count in counts if count < 2]:
        raise RuntimeError(f"{len(wrong)} streams came with {wrong[0]} events")
    await asyncio.gather(*(client.aclose() for client, _ in clients))
    return taken


async def directly(streams: Streams, name: str) -> tuple[float, float]:
    """The same of a process that reads the streams itself."""
    from petiole.tasks.streams.readers import AsyncStream

    writer = writing_all(name, streams.n, streams.deltas, streams.per_s)
    readers = [AsyncStream(f"{name}-{one}") for one in range(streams.n)]
    for reader in readers:
        await reader.open()

    async def read(reader: AsyncStream) -> None:
        async for _ in reader:
            pass

    began, cpu = time.perf_counter(), time.process_time()
    begin(writer)
    await asyncio.gather(*map(read, readers))
    taken = time.process_time() - cpu, time.perf_counter() - began
    await asyncio.to_thread(writer.wait)
    return taken


def many(report: Report, gateway: Served, streams: Streams, rounds: int, target: float | None) -> None:
    """In turns over HTTP and directly."""
    ours, peers = list[float](), list[float]()
    cores = list[float]()
    for number in range(rounds):
        cpu, seconds = asyncio.run(over_http(gateway, streams, f"bench-{streams.n}-{number}"))
        ours.append(cpu / (streams.n * streams.deltas) * 1e6)
        cores.append(cpu / seconds)
        cpu, _ = asyncio.run(directly(streams, f"bench-direct-{streams.n}-{number}"))
        peers.append(cpu / (streams.n * streams.deltas) * 1e6)
    median(report, f"{streams.name}: processor time of the gateway for a delta", "us", ours, target=target)
    median(report, "  of a process that reads them itself", "us", peers)
    median(report, "  gateway: processor time", "cores", cores, target=1)


QUICK = [(Streams(4, 20, 10), DELTA_US)]
FULL = [(Streams(64, 20, 200), DELTA_US), (Streams(1000, 10, 100), None)]


def measure(report: Report, gateway: Served, sizes: Sequence[tuple[Streams, float | None]], rounds: int) -> None:
    for streams, target in sizes:
        many(report, gateway, streams, rounds, target)


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.servers import embedded
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    embedded.socket_path()
    settings.cache_clear()
    report = Report("HTTP: petiole serve in turns with direct reading (embedded Redis)")
    with serving() as gateway:
        measure(report, gateway, QUICK if options.quick else FULL, 1 if options.quick else 3)
        with demo.worker():
            added_ms = asyncio.run(one_client(report, gateway, 5 if options.quick else 200))
            asyncio.run(proxied.measure(report, gateway, added_ms, 1 if options.quick else 6))
            with serving(PETIOLE_GATEWAY_KEYS=keyed.keys()) as asking:
                asyncio.run(keyed.measure(report, gateway, asking, 2 if options.quick else 200))
    report.finish(options.json)
    return 0

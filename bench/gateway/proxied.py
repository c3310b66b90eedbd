"""The gateway beside proxies before model servers: a stream of 33 chunks through each, in turns in one run.

A proxy passes on what a mock has at once; a request to the mock itself is what it adds to. The gateway submits a
task, reads its log and writes the chunks itself, while a worker generates: its figures have all of this, and only
what it adds to the first delta is told of against direct reading (`gateway.one_client`)."""

from __future__ import annotations

import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.gateway.served import PROMPT, Client, Served
from bench.harness.report import NotAvailableError, Report
from bench.peers import proxies
from bench.peers.proxies import CHUNKS, MODEL, Proxy

PROXIES = {"LiteLLM's proxy": proxies.litellm, "sglang-router": proxies.sglang_router}
A_ROUND = 20


async def measure(report: Report, gateway: Served, added_ms: float, rounds: int) -> None:
    """`added_ms`: what the gateway adds to the first delta."""
    said = [{"role": "user", "content": PROMPT}]
    theirs: dict[str, Any] = {"model": MODEL, "messages": said, "stream": True}
    ours = {**theirs, "model": "petiole-tiny", "max_tokens": CHUNKS - 2, "ignore_eos": True}
    with ExitStack() as stack:
        upstream = stack.enter_context(proxies.mock())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides: dict[str, tuple[Served | Proxy, dict[str, Any]]] = {
            "": (gateway, ours),
            "mock": (upstream, theirs),
        }
        for name, start in PROXIES.items():
            try:
                sides[name] = stack.enter_context(start(upstream, folder)), theirs
            except NotAvailableError as error:
                report.absent[name] = str(error)
        if len(sides) == 2:
            return
        cpu_ms: dict[str, list[float]] = {name: [] for name in sides}
        first_ms: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + 1):
            for name, (server, asked) in sides.items():
                began = server.cpu_s
                firsts = [await stream(server, asked) for _ in range(A_ROUND)]
                if number:  # the first is no figure
                    cpu_ms[name].append((server.cpu_s - began) / A_ROUND * 1e3)
                    first_ms[name] += firsts
    own_ms = statistics.median(cpu_ms[""])
    at_once_ms = statistics.median(first_ms["mock"])
    for name in (name for name in PROXIES if name in sides):
        their_ms = statistics.median(first_ms[name]) - at_once_ms
        report.add(f"first delta: added, beside {name}", added_ms, "ms", peer=their_ms, better="lower")
        what = f"a stream of {CHUNKS} chunks: processor time, beside {name}"
        report.add(what, own_ms, "ms", peer=statistics.median(cpu_ms[name]), samples=cpu_ms[""], better="lower")


async def stream(server: Served | Proxy, asked: dict[str, Any]) -> float:
    """One whole stream. Returns the milliseconds until its first chunk, which has the role alone. Its connection
    is new: on one that is kept, sglang-router's first chunk waits 40 ms for an acknowledgement."""
    client = Client(server.address)
    await client.connect()
    began = time.perf_counter()
    client.ask("POST", "/v1/chat/completions", asked)
    await client.events(b'"delta"')
    first_ms = (time.perf_counter() - began) * 1e3
    await client.events()
    await client.aclose()
    return first_ms

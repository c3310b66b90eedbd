"""A running gateway, and a client that does no more than it must."""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bench.harness.report import Report

PROMPT = "What is 17 + 25?"
KEY = "ptl-bench"
START_S = 60.0
ALIVE_S = 60.0


@dataclass
class Served:
    """A running gateway."""

    process: subprocess.Popen[bytes]
    url: str

    @property
    def cpu_s(self) -> float:
        """Its processor seconds so far: Linux has a clock for each process."""
        return time.clock_gettime(~self.process.pid << 3 | 2)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname
        assert parts.port
        return parts.hostname, parts.port


@contextmanager
def serving(**told: str) -> Iterator[Served]:
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.servers._supervisor import die_with

    command = [sys.executable, "-m", "petiole.tasks.commands.cli", "serve", "--host", "127.0.0.1", "--port", "0"]
    more = {
        "PYTHONPATH": demo.python_path(),
        "PYTHONUNBUFFERED": "1",
        "PETIOLE_GATEWAY_HEARTBEAT_S": str(ALIVE_S),
        **told,
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **more}, stdout=log, stderr=log, preexec_fn=die_with(os.getpid())
        )
        try:
            yield Served(process, _url(process, log.fileno()))
        finally:
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[bytes], log: int) -> str:
    give_up_at = time.monotonic() + START_S
    while True:
        if found := re.search(rb"serving (http://\S+)", written := os.pread(log, 100_000, 0)):
            return found[1].decode()
        if process.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"the gateway does not serve:\n{written.decode()}")
        time.sleep(0.05)


# ---------------------------------------------------------------- one client


class Client:
    """One connection of a client that does no more than it must."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=2**20)

    def ask(self, method: str, path: str, body: object = None) -> None:
        payload = b"" if body is None else json.dumps(body).encode()
        key = f"authorization: Bearer {KEY}\r\n"  # SDKs always send one
        told = f"{key}content-type: application/json\r\ncontent-length: {len(payload)}\r\n"
        self._writer.write(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{told}\r\n".encode() + payload)

    async def events(self, until: bytes = b"[DONE]") -> int:
        """Read up to the event with these words. Returns how many events came before."""
        count = 0
        while until not in (line := await self._reader.readline()):
            if not line:
                raise RuntimeError("the gateway has closed the connection")
            count += line.startswith(b"data: ")
        return count

    async def answer(self) -> None:
        """Read an answer that has a length."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200") or (length := re.search(rb"content-length: (\d+)", head)) is None:
            raise RuntimeError(f"the gateway answered: {head[:200]!r}")
        await self._reader.readexactly(int(length[1]))

    async def finish(self) -> None:
        """Read the rest of a stream, so that the connection can be used again."""
        await self._reader.readuntil(b"\r\n0\r\n\r\n")

    async def aclose(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def median(report: Report, name: str, unit: str, samples: Sequence[float], **more: Any) -> float:
    """Add the samples' median, which is returned. Less is better."""
    middle = statistics.median(samples)
    report.add(name, middle, unit, samples=samples, better="lower", **more)
    return middle

"""Proxies that speak OpenAI's interface, before one mock of a model server: LiteLLM's and sglang-router.

The mock answers each request at once with the same chunks, so all that a client waits for is the proxy's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.harness.report import NotAvailableError

CHUNKS = 33
MODEL = "mock"
START_S = 120.0
_ALONE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would fetch prices
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


@dataclass(frozen=True)
class Proxy:
    """A running server. `group`: of its processes."""

    address: tuple[str, int]
    group: int

    @property
    def cpu_s(self) -> float:
        """The processor seconds of all its processes so far."""
        return sum(map(_clock_s, _processes(self.group)))


@contextmanager
def mock() -> Iterator[Proxy]:
    with _started([sys.executable, __file__, "{port}"]) as server:
        yield server


@contextmanager
def sglang_router(upstream: Proxy, folder: Path) -> Iterator[Proxy]:
    url = "http://{}:{}".format(*upstream.address)
    told = ["--worker-urls", url, "--host", "127.0.0.1", "--port", "{port}", "--log-level", "error"]
    told += ["--prometheus-port", str(_free_port())]
    command = [_python("SGLANG_ROUTER"), "-m", "sglang_router.launch_router", *told]
    with _started(command, folder / "router.log") as server:
        yield server


@contextmanager
def litellm(upstream: Proxy, folder: Path) -> Iterator[Proxy]:
    base = "http://{}:{}/v1".format(*upstream.address)
    told = {"model": f"openai/{MODEL}", "api_base": base, "api_key": "none"}
    config = folder / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": told}]}))
    program = str(Path(_python("LITELLM")).with_name("litellm"))
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", "{port}"]
    with _started(command, folder / "litellm.log", _ALONE) as server:
        yield server


def _python(name: str) -> str:
    if (found := os.environ.get(f"BENCH_{name}_PYTHON")) is None:
        raise NotAvailableError(f"BENCH_{name}_PYTHON names no Python")
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def _started(
    command: Sequence[str], log: Path | str = os.devnull, told: Mapping[str, str] | None = None
) -> Iterator[Proxy]:
    """`{port}` in the command is a free port. Its processes end with this."""
    port = _free_port()
    filled = [word.replace("{port}", str(port)) for word in command]
    with open(log, "wb") as said:
        try:
            process = subprocess.Popen(
                filled,
                stdout=said,
                stderr=said,
                cwd="/",
                env={**os.environ, **(told or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise NotAvailableError(f"{command[0]} does not start: {error.strerror}") from error
    try:
        give_up_at = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise NotAvailableError(f"does not serve: {Path(log).read_text()[-500:]}")
            time.sleep(0.1)
        yield Proxy(("127.0.0.1", port), process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    """A router listens before it knows its workers, and LiteLLM before its models: so a whole request is tried."""
    import http.client

    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        headers = {"content-type": "application/json", "authorization": "Bearer none"}
        connection.request("POST", "/v1/chat/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        return answer.status == 200 and b"[DONE]" in answer.read()
    return False


def _processes(group: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                found += [int(entry.name)] if os.getpgid(int(entry.name)) == group else []
    return found


def _clock_s(pid: int) -> float:
    """Linux has a clock for each process."""
    with suppress(OSError):
        return time.clock_gettime(~pid << 3 | 2)
    return 0.0


def serve(port: int) -> None:
    """The mock: a stream of chunks for each POST, a health and a model for each GET."""
    import asyncio

    def chunk(delta: dict[str, str], reason: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        whole = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
        return b"data: " + json.dumps(whole).encode() + b"\n\n"

    words = [chunk({"content": " word"}, None)] * (CHUNKS - 2)
    said = b"".join([chunk({"role": "assistant", "content": ""}, None), *words, chunk({}, "stop")])
    said += b"data: [DONE]\n\n"
    streamed = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    streamed += b"%x\r\n%b\r\n0\r\n\r\n" % (len(said), said)
    listed = {"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL, "status": "ok"}
    facts = json.dumps(listed).encode()
    known = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(facts),
        facts,
    )

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in request.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].split(b":")[1]) if lengths else 0)
                writer.write(streamed if request.startswith(b"POST") else known)
                await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", port)
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    serve(int(sys.argv[1]))

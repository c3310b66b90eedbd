"""The worker's end of the socket: it starts the child, talks to it, and notices its end.

    worker ──► child                                         child ──► worker
    arguments                                                ready, or failed: once, at the start
    submit (n, prompt, sampling, ...), cancel (n)            outputs: those of a step; the last of n has an end
    pause (n), resume (n)                                    done (n), with the error, if any
                                                             alive: all ranks answer; figures of the scheduler
                                                             dead: vLLM says that its engine has ended

While requests run, the child asks all ranks for a sign of life once a second, because vLLM's own health check does
not notice a rank that is stopped. So a silent socket means a hung engine. Ranks of an idle engine are asked twice
a minute.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from petiole.gpu_worker.exceptions import EngineError, MachineError, ModelError

PROGRAM = Path(__file__).parent / "program.py"
_END_S = 5.0
"""How long the child may take to end by itself."""


class Child:
    """The child, and the threads that read and write.

    `heard_at`: when it last gave a sign of life, by `time.monotonic`. `pid`: also the process group of all its
    processes. `on_message` and `on_end` are called on the reading thread; `on_end` once, unless it is closed.
    """

    def __init__(self, python: str, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._on_message = on_message
        self._socket, end = socket.socketpair()
        with end:
            command = [python, str(PROGRAM), str(end.fileno())]
            env = os.environ | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "PYTHONUNBUFFERED": "1"}
            env.pop("PYTHONPATH", None)  # of this interpreter's packages, which are other versions than vLLM's
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[end.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env=env
                )
            except OSError as error:
                self._socket.close()
                raise MachineError(f"PETIOLE_VLLM_PYTHON: {python} cannot be run: {error}") from error
        self._lines = self._socket.makefile("rb")
        self._outgoing: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.pid, self.heard_at, self._closed = self._process.pid, time.monotonic(), False

    def start(self, arguments: Sequence[str], most_s: float) -> dict[str, Any]:
        """Have it load a model by vLLM's own arguments. Returns what it says of the model. Raises ModelError."""
        self._socket.settimeout(most_s)
        try:
            self._send({"arguments": list(arguments)})
            said = json.loads(self._lines.readline() or "{}")
        except TimeoutError:
            self.close(kindly=False)
            raise MachineError(f"vLLM did not start within {most_s:g} s (PETIOLE_VLLM_START_S)") from None
        except OSError:
            said = {}
        if "ready" in said:
            return dict(said["ready"])
        self.close()
        if "failed" in said:
            raise ModelError(f"vLLM does not start: {said['failed']}")
        raise MachineError(f"vLLM's process ended while it started: {self.ended_how}")

    def serve(self, silence_s: float, on_end: Callable[[BaseException], None]) -> None:
        """Begin to read and to write. `silence_s`: after so long without a sign of life, the child is hung."""
        self._socket.settimeout(silence_s)
        threading.Thread(target=self._read, args=(silence_s, on_end), name="vllm-in", daemon=True).start()
        threading.Thread(target=self._write, name="vllm-out", daemon=True).start()

    def say(self, **message: Any) -> None:
        """Send a message. Never waits."""
        self._outgoing.put(message)

    @property
    def ended_how(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it still runs"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"

    def close(self, *, kindly: bool = True) -> None:
        """End the child and all its processes. `kindly`: let it end by itself first."""
        self._closed = True
        self._outgoing.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S if kindly else 0)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()

    # ------------------------------------------------------------ on the threads

    def _send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            with suppress(OSError):  # the reading thread notices the end
                self._send(message)

    def _read(self, silence_s: float, on_end: Callable[[BaseException], None]) -> None:
        why = ""
        try:
            while line := self._lines.readline():
                self.heard_at = time.monotonic()
                message = json.loads(line)
                if "dead" in message:
                    why = message["dead"]
                    break
                self._on_message(message)
        except TimeoutError:
            why = f"no sign of life for {silence_s:g} s (PETIOLE_VLLM_SILENCE_S)"
        except (OSError, ValueError) as error:
            why = str(error)
        if not self._closed:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
            on_end(EngineError(f"vLLM has ended: {why or 'its process ended ' + self.ended_how}"))

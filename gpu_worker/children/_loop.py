"""Answers questions, one after the other, from standard input to standard output, within limits.

`child` runs this module as a script. Its argument is the file of a job, which has

    MEMORY_BYTES      the address space that the process may have
    answer(question)  from a message to another. It sets a timer of the kernel, ITIMER_PROF, to the time that it
                      may compute. The kernel ends the process then, even inside one long operation

When the memory of the machine or of the container runs out, the kernel ends this process before others. A message,
in either direction, is its length (8 bytes, little-endian) and JSON, or NUL and bytes; the first one says that the
job is ready. The script imports nothing of Petiole, so a job that imports nothing either starts at once."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import runpy
import signal
import sys
from pathlib import Path
from typing import IO, Any


def read(pipe: IO[bytes]) -> Any:
    """The next message. Raises EOFError."""
    head = pipe.read(8)
    body = pipe.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    if not body:
        raise EOFError
    return body[1:] if body.startswith(b"\0") else json.loads(body)


def write(pipe: IO[bytes], message: Any) -> None:
    body = b"\0" + message if isinstance(message, bytes) else json.dumps(message).encode()
    pipe.write(len(body).to_bytes(8, "little") + body)
    pipe.flush()


def main(job: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else writes there
    names = runpy.run_path(job)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (names["MEMORY_BYTES"],) * 2)
    with contextlib.suppress(EOFError, BrokenPipeError):
        write(answers, "ready")
        while True:
            answer = names["answer"](read(sys.stdin.buffer))
            signal.setitimer(signal.ITIMER_PROF, 0)
            write(answers, answer)


if __name__ == "__main__":
    main(sys.argv[1])

"""A process of one's own for a job that may crash, compute without end or fill the memory.

The other process limits itself (`_loop`). It ends when its standard input closes, so it ends with this process.
After it has ended, the next question starts another one. Threads take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

from petiole.gpu_worker.children import _loop
from petiole.gpu_worker.children._loop import read, write

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
"""Libraries reserve memory for each thread, and there is one job."""


class ChildEnded(Exception):  # noqa: N818
    """The child ended before it had answered: it took too much, or crashed."""


class Child:
    """`job`: the file that the child runs, as `_loop` describes. The process starts with the first question."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget)

    def ask(self, question: Any) -> Any:
        """The answer. Both are JSON or bytes. Raises ChildEnded; ValueError or RecursionError if the question
        cannot be JSON; and RuntimeError if the job cannot be started."""
        with self._lock:
            if self.process is None or self.process.poll() is not None:
                self.close()
                self.process = self._started()
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            try:
                write(self.process.stdin, question)
                return read(self.process.stdout)
            except (EOFError, BrokenPipeError):
                self.close()
                raise ChildEnded from None

    def close(self) -> None:
        """End the process, if there is one."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(OSError):  # the unsent rest
                    pipe.close()

    def _started(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-P", _loop.__file__, self.job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, "PYTHONPATH": path},
        )
        assert process.stdout is not None
        try:
            read(process.stdout)
        except EOFError:
            raise RuntimeError(f"{self.job} cannot be run: exit status {process.wait()}") from None
        return process

    def _forget(self) -> None:
        """After a fork: nobody but the parent may use its pipes."""
        self._lock, self.process = threading.Lock(), None

"""A process under another Python that computes loads: it answers each line with a line.

The child says that it is ready, or why it cannot run. Between two loads it waits, so that sides can take turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.harness.report import NotAvailableError


class Child:
    """A script of this folder, which imports nothing of this project. Raises NotAvailableError where it does not
    run."""

    def __init__(self, python: str, script: Path, kind: str, asked: Mapping[str, Any]) -> None:
        try:
            self._child = subprocess.Popen(
                [python, str(script), kind, json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",  # so that it imports nothing from here
                start_new_session=True,  # so that its own children end with it
            )
        except OSError as error:
            raise NotAvailableError(f"{python} does not start: {error.strerror}") from error
        self._receive()

    def ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it has died: there is no answer
            self._child.stdin.write(json.dumps(what) + "\n")
            self._child.stdin.flush()
        return self._receive()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with suppress(BrokenPipeError, ValueError):
            self._child.communicate()

    def _receive(self) -> dict[str, Any]:
        """The next answer. Skips other lines, because libraries print whatever they like."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    self.close()
                    raise NotAvailableError(answer["error"])
                return answer
        status = self._child.wait()
        if status < 0:
            raise NotAvailableError(f"died of {signal.Signals(-status).name}")
        raise NotAvailableError(f"ended with status {status}")

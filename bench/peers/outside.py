"""Peers with packages of their own: a child process under another Python computes the loads.

OpenVINO GenAI and vLLM for CPUs need other versions of torch and transformers than this project. So each may have
a virtual environment of its own: `BENCH_OPENVINO_PYTHON` or `BENCH_VLLM_PYTHON` names the path of its Python.
Without that variable, this Python is tried. The child says that it is ready, or why it cannot run. Then it answers
each line of prompts with the seconds that they took. Between two loads it waits, so that sides can take turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.report import NotAvailableError

_SCRIPT = Path(__file__).with_name("outside_child.py")
NAMES = {"openvino": "OpenVINO GenAI", "vllm": "vLLM"}


class Outside:
    """`kind`: a key of NAMES. Raises NotAvailableError where it does not run."""

    def __init__(
        self, kind: str, folder: str, *, threads: int, most: tuple[int, int, int], four_bits: bool = False
    ) -> None:
        """`most`: sequences at once, tokens of one, and tokens of all at once. four_bits: of the weights"""
        python = os.environ.get(f"BENCH_{kind.upper()}_PYTHON") or sys.executable
        sizes = {"sequences": most[0], "tokens": most[1], "all": most[2]}
        asked = {"folder": folder, "threads": threads, "four_bits": four_bits, **sizes}
        try:
            self._child = subprocess.Popen(
                [python, str(_SCRIPT), kind, json.dumps(asked)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",  # so that it imports nothing from here
                start_new_session=True,  # so that its own children end with it
            )
        except OSError as error:
            raise NotAvailableError(f"{python} does not start: {error.strerror}") from error
        self._receive()

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        """Output tokens a second, from the first prompt handed over to the last result."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"prompts": prompts, "output": output}) + "\n")
        self._child.stdin.flush()
        return len(prompts) * output / float(self._receive()["seconds"])

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
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
        raise NotAvailableError(f"ended with status {self._child.wait()}")

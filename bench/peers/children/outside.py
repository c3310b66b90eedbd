"""Peers with packages of their own: a child process under another Python computes the loads.

OpenVINO GenAI and vLLM for CPUs need other versions of torch and transformers than this project. So each may have
a virtual environment of its own: `BENCH_OPENVINO_PYTHON` or `BENCH_VLLM_PYTHON` names the path of its Python.
Without that variable, this Python is tried. The child says that it is ready, or why it cannot run. Then it answers
each line of prompts with the seconds that they took. Between two loads it waits, so that sides can take turns.

A folder without weights gets random ones from transformers, under the peer's Python. (OpenVINO takes Qwen3.5 from
transformers up to 5.2.)"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.children.child import Child

_SCRIPT = Path(__file__).with_name("outside_child.py")
NAMES = {"openvino": "OpenVINO GenAI", "vllm": "vLLM"}
EXACT = ", exact inputs"


class Outside(Child):
    """Raises NotAvailableError where it does not run."""

    def __init__(
        self,
        kind: str,
        folder: str,
        *,
        threads: int,
        most: tuple[int, int, int],
        four_bits: bool = False,
        exact_inputs: bool = False,
    ) -> None:
        """`kind`: a key of NAMES. `most`: sequences at once, tokens of one, and tokens of all at once. four_bits:
        of the weights. exact_inputs: not rounded to eight bits beside them"""
        self.name = NAMES[kind] + EXACT * exact_inputs
        python = os.environ.get(f"BENCH_{kind.upper()}_PYTHON") or sys.executable
        sizes = {"sequences": most[0], "tokens": most[1], "all": most[2]}
        products = {"threads": threads, "four_bits": four_bits, "exact_inputs": exact_inputs}
        super().__init__(python, _SCRIPT, kind, {"folder": folder, **products, **sizes})

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        """Output tokens a second, from the first prompt handed over to the last result."""
        return len(prompts) * output / self._seconds(prompts, output)

    def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> Callable[[], float]:
        """Returns a function that gives the seconds of `n_tokens` steps: a run with them, less one without."""
        return lambda: self._seconds(prompts, 1 + n_tokens) - self._seconds(prompts, 1)

    def _seconds(self, prompts: Sequence[Sequence[int]], output: int) -> float:
        return float(self.ask({"prompts": prompts, "output": output})["seconds"])

"""llama.cpp as a peer, in a process of its own: batched decodes, greedy, no text.

Optional: `llama_cpp` and `gguf` may be missing. `BENCH_LLAMA_PYTHON` may name another Python that has `llama_cpp`.
The model is written as GGUF, with random weights of the same type, or in four bits, or is a file that exists. A
build that dies with its buffers of rearranged weights computes without them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness.report import NotAvailableError, Report
from bench.peers.children.child import Child

_SCRIPT = Path(__file__).parent / "children/llama_cpp_child.py"
_TRIALS = ((1, 8), (8, 40), (1, 512))
"""Sequences and tokens of each, on which a build may die."""


class LlamaCpp:
    """One model. Methods raise NotAvailableError once the process has died."""

    name = "llama.cpp"

    def __init__(self, path: Path, vocab: int, threads: int, *, states: bool = False) -> None:
        asked = {"path": str(path), "vocab": vocab, "threads": threads, "states": states}
        try:
            self._child = self._started({**asked, "extra": True})
        except NotAvailableError as error:
            if "died" not in str(error):
                raise
            self._child = self._started({**asked, "extra": False})

    @staticmethod
    def _started(asked: Mapping[str, Any]) -> Child:
        child = Child(os.environ.get("BENCH_LLAMA_PYTHON") or sys.executable, _SCRIPT, "llama.cpp", asked)
        try:
            for n, length in _TRIALS:
                child.ask({"do": "whole", "prompts": [[5 + i % 7 for i in range(length)]] * n, "tokens": 2})
        except NotAvailableError:
            child.close()
            raise
        return child

    def decode(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> Callable[[], float]:
        """Computes the prompts. Returns a function that decodes `n_tokens` for each and returns the seconds."""
        return self._work("decode", prompts, n_tokens)

    def load(self) -> float:
        """Seconds to read the file again, without mapping it."""
        return float(self._child.ask({"do": "load"})["seconds"])

    def prefill(self, prompt: Sequence[int]) -> Callable[[], float]:
        return self._work("prefill", [prompt], 0)

    def whole(self, prompts: Sequence[Sequence[int]], n_tokens: int) -> float:
        """Seconds from the first prompt to the last of `n_tokens` for each, by the attention that was faster in
        the first load of this size."""
        return float(self._child.ask({"do": "whole", "prompts": prompts, "tokens": n_tokens})["seconds"])

    def _work(self, kind: str, prompts: Sequence[Sequence[int]], n_tokens: int) -> Callable[[], float]:
        work = self._child.ask({"do": kind, "prompts": prompts, "tokens": n_tokens})["work"]
        return partial(self._run, work)

    def _run(self, work: int) -> float:
        return float(self._child.ask({"do": "run", "work": work})["seconds"])

    def close(self) -> None:
        self._child.close()


def open_peer(
    raw: Mapping[str, Any], dtype: str, threads: int, report: Report, *, four_bits: bool = False
) -> LlamaCpp | None:
    """raw: the model's `config.json`. None: it does not run, and the report says why."""
    if find_spec("gguf") is None:
        report.absent[LlamaCpp.name] = "not installed: gguf"
        return None
    from bench.peers import gguf_file

    with tempfile.TemporaryDirectory(prefix="petiole-gguf-") as scratch:
        path = Path(scratch) / "model.gguf"
        gguf_file.write(raw, dtype, four_bits, path)
        try:
            return LlamaCpp(path, raw["vocab_size"], threads, states="linear_num_key_heads" in raw)
        except NotAvailableError as error:
            report.absent[LlamaCpp.name] = str(error)
            return None

"""Peers that make vectors of texts: sentence-transformers, OpenVINO, ONNX Runtime, each in a process of its own.

`BENCH_TEXTS_PYTHON` names the Python of an environment that has them; without it, this Python is tried."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.peers.children.child import Child

PEERS = ("sentence-transformers", "OpenVINO", "ONNX Runtime")
_SCRIPT = Path(__file__).with_name("texts_child.py")


class TextPeer(Child):
    """`kind`: one of PEERS. first: the first position is pooled, not the mean of all. dtype: that of OpenVINO.
    Raises NotAvailableError where it does not run."""

    def __init__(self, kind: str, folder: str, *, threads: int, first: bool, dtype: str) -> None:
        python = os.environ.get("BENCH_TEXTS_PYTHON") or sys.executable
        super().__init__(
            python, _SCRIPT, kind, {"folder": folder, "threads": threads, "first": first, "dtype": dtype}
        )
        self.how: dict[str, str] = {}
        """By length: the setting that is the quickest."""

    def texts_per_s(self, length: str, texts: Sequence[str]) -> float:
        """length: what texts of one length are known by."""
        answer = self.ask({"texts": texts, "length": length, "check": False})
        self.how[length] = answer["how"]
        return len(texts) / float(answer["seconds"])

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        return np.array(self.ask({"texts": texts, "length": "", "check": True})["vectors"], np.float32)

"""A peer in a process of its own: what it answers, and what stands in its place where it is not to be had."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.harness.report import NotAvailableError
from bench.peers.children.outside import Outside
from tests.support.site import eventually

FAKE_VLLM = """
import os, pathlib, subprocess

class SamplingParams:
    def __init__(self, **options): self.n = options["max_tokens"]

class LLM:
    def __init__(self, **options):
        print("a library that prints")
        if folder := os.environ.get("WORKER"):
            worker = subprocess.Popen(["sleep", "600"])
            (pathlib.Path(folder) / "pid").write_text(str(worker.pid))

    def generate(self, prompts, sampling, use_tqdm):
        class Result: outputs = [type("Output", (), {"token_ids": [1] * sampling.n})]
        return [Result() for prompt in prompts]
"""


def start(kind: str) -> Outside:
    return Outside(kind, "model", threads=1, most=(2, 64, 128))


def test_a_peer_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("import a_package_that_nobody_has")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NotAvailableError, match="not installed: a_package_that_nobody_has"):
        start("vllm")


def test_one_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise RuntimeError('no such processor')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(NotAvailableError, match="RuntimeError: no such processor"):
        start("vllm")


def test_a_python_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BENCH_OPENVINO_PYTHON", str(tmp_path / "python"))
    with pytest.raises(NotAvailableError, match="does not start: No such file"):
        start("openvino")


def test_it_computes_loads_under_the_python_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("BENCH_VLLM_PYTHON", sys.executable)
    peer = start("vllm")
    try:
        assert peer.tokens_per_s([[3, 4], [5, 6]], 8) > 0
        assert peer.tokens_per_s([[3, 4]], 1) > 0
    finally:
        peer.close()


def test_what_it_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("WORKER", str(tmp_path))
    start("vllm").close()
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: has_ended(pid), "the worker ends")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[1][0] == "Z"
    except FileNotFoundError:
        return True

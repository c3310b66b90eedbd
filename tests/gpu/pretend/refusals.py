"""Workers that cannot serve, on a pretended card: `python -m tests.gpu.pretend python -m
tests.gpu.pretend.refusals`.

Each must end with status 70 and one line that says what was found and what to do. No broker is needed: a worker
loads its model first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.harness.checkpoints.decoders import Shape, config, write
from petiole.gpu_worker import models
from tests.gpu.pretend.check import WIDE

EX_SOFTWARE = 70
TINY = Path(models.__file__).parent / "petiole_tiny"
LINE = "the model cannot be served"


@dataclass(frozen=True)
class Case:
    """`settings`: of the environment; `without`: what the worker must not find. CUDA itself takes 600 MiB of
    PRETEND_MEMORY."""

    name: str
    said: str
    settings: dict[str, str] = field(default_factory=dict)
    shape: Shape = WIDE
    without: str = ""


NO_COMPILER = {"PATH": "/usr/bin:/bin", "CUDA_HOME": "/nowhere", "FLASHINFER_WORKSPACE_BASE": "/nowhere"}
CASES = (
    Case("no FlashInfer", "which is not installed: pip install 'flashinfer-python", without="metadata"),
    Case("an older FlashInfer", "found 0.6.4: pip install 'flashinfer-python", without="version"),
    Case("no memory for the weights", "it does not fit into memory", {"PRETEND_MEMORY": str(615 << 20)}),
    Case("no memory for the KV cache", "no memory for the KV cache", {"PRETEND_MEMORY": str(900 << 20)}),
    Case("heads of 96", "head_dim: must be 64, 128, 256 on CUDA, got 96", shape=replace(WIDE, head_dim=96)),
    Case("KV of a type without a kernel", "is not compiled", {"PETIOLE_KV_DTYPE": "fp8", **NO_COMPILER}),
    Case("weights of a type without a kernel", "dtype: must be bfloat16, float16", {"PETIOLE_DTYPE": "float32"}),
)


def main() -> None:
    wrong = 0
    for case in CASES:
        status, lines = refused(case)
        right = status == EX_SOFTWARE and len(lines) == 1 and case.said in lines[0]
        wrong += not right
        print(f"{case.name}: {'' if right else 'WRONG, '}status {status}: {' / '.join(lines)[-400:]}", flush=True)
    if wrong:
        raise SystemExit(1)


def refused(case: Case) -> tuple[int, list[str]]:
    """The status of a worker, and its lines that say why."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        write(case.shape, model)
        (model / "config.json").write_text(json.dumps(config(case.shape)))
        (model / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
        (Path(folder) / "sitecustomize.py").write_text(HIDDEN.format(without=case.without))
        environment = {
            **os.environ,
            "PETIOLE_MODEL": str(model),
            "PETIOLE_DEVICE": "cuda",
            "PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            **case.settings,
        }
        command = [sys.executable, "-m", "celery", "-A", "petiole", "worker"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    output = run.stdout + run.stderr
    lines = [line for line in output.splitlines() if LINE in line]
    if not lines or "Traceback" in output:
        lines.append(output[-2000:])
    return run.returncode, lines


HIDDEN = """\
import importlib.metadata
found = importlib.metadata.version
def version(name):
    if name == "flashinfer-python" and "{without}" == "metadata":
        raise importlib.metadata.PackageNotFoundError(name)
    return "0.6.4" if name == "flashinfer-python" and "{without}" == "version" else found(name)
importlib.metadata.version = version
"""


if __name__ == "__main__":
    main()

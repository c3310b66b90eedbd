"""The compiled CPU path takes no memory by itself: where none is left, Python raises, and the process lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from petiole.gpu_worker.runtime.cpu.native.build import load_library

ROOT = Path(__file__).resolve().parents[4]

A_LITTLE_MORE_EACH_TIME = """
import resource, sys
from pathlib import Path
import torch
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.runtime import ModelRuntime

def in_use():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def limit(most):
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

config = EngineConfig(model=sys.argv[1], device="cpu", dtype="float32", num_threads=2, num_pages=2000)
native = ModelRuntime(config)._executor._native

def forward(n):
    at = torch.arange(n)
    return native.forward(0, at % 300, at % 200, at // 200, at[-1:])

forward(1)  # its threads have their stacks
for room in range(0, 2**24, 2**17):
    limit(in_use() + room)
    try:
        forward(1000)
    except (MemoryError, RuntimeError) as error:
        said = str(error)
    else:
        print("done")
        break
    finally:
        limit(resource.RLIM_INFINITY)
    print(said)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and the C library's settings")
@pytest.mark.skipif(load_library() is None, reason="no C compiler")
def test_too_little_memory_is_an_error_of_the_step_wherever_it_runs_out(checkpoint):
    only_what_is_asked_for = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TOP_PAD_": "0"}
    run = subprocess.run(
        [sys.executable, "-c", A_LITTLE_MORE_EACH_TIME, str(checkpoint("qwen3")[0])],
        env=os.environ | only_what_is_asked_for | {"PETIOLE_NATIVE": "on"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    *refused, last = run.stdout.splitlines()
    assert last == "done"
    assert all("allocate" in said for said in refused)
    assert len(set(refused)) >= 2, "at several places: a free part of the heap may have room for the smallest"

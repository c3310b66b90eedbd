"""Every workload runs at its smallest size, and writes what the record is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.__main__ import ON_CUDA, WORKLOADS

REPOSITORY = Path(__file__).resolve().parents[2]
FIELDS = {"name", "value", "unit", "peer", "ratio", "floor", "target", "met"}
SMALL_MACHINE = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("name", [name for name in WORKLOADS if name not in ON_CUDA])
def test_a_workload_writes_its_results(name: str, tmp_path: Path) -> None:
    """In a process of its own, as `make bench` runs it."""
    command = [sys.executable, "-m", "bench", "--quick", "--json", str(tmp_path), name]
    run = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **SMALL_MACHINE}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    written = json.loads((tmp_path / f"{name}.json").read_text())
    assert written["results"] or written["absent"]  # without a peer that is a program of others
    assert {"machine", "versions", "commit", "command"} <= set(written)
    for result in written["results"]:
        assert set(result) >= FIELDS
        assert result["value"] >= 0


def test_the_command_line_names_every_workload(capfd: pytest.CaptureFixture[str]) -> None:
    from petiole.tasks.commands.cli import main

    with pytest.raises(SystemExit) as end:
        main(["bench", "--help"])
    assert end.value.code == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in WORKLOADS)

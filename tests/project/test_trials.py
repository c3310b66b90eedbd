"""What `make test` leaves out is named, and stays so when it is renamed. A run says at its end what it skipped."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.parsing import parsed
from tests.support.site import REPOSITORY
from tests.support.trials import TRIALS, is_slow


@pytest.mark.parametrize("trials", TRIALS)
def test_files_and_representatives_of_trials_exist(trials: str) -> None:
    path = REPOSITORY / trials
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    functions = {
        node.name
        for file in files
        for node in ast.walk(parsed(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name.partition("[")[0] for name in TRIALS[trials]} <= functions


def test_a_trial_is_slow_and_its_representative_is_not() -> None:
    file, representative = "tests/e2e/test_cut_connections.py", "test_wherever_the_connection_is_cut"
    assert is_slow("tests/chaos/test_kills.py", "test_killed_workers_lose_nothing_and_double_nothing")
    assert is_slow(file, f"{representative}[redis-plain]")
    assert not is_slow(file, f"{representative}[redis-linked]")
    assert not is_slow("tests/e2e/test_vision.py", "test_a_skill_answers_as_it_has_streamed[query]")


SKIPPING = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_a(n):
    pytest.importorskip("absent_package")

@pytest.mark.skip(reason="no card")
def test_b():
    pass
"""


def test_the_end_of_a_run_says_what_was_skipped_and_why(tmp_path: Path) -> None:
    (tmp_path / "test_skipping.py").write_text(SKIPPING)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "tests.conftest", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, _, said = done.stdout.partition("skipped, and why")
    assert said.splitlines()[1:3] == [
        "    2  could not import 'absent_package': No module named 'absent_package'",
        "    1  no card",
    ]

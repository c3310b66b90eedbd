"""What `make test` leaves out is named, and stays there when it is renamed."""

from __future__ import annotations

import ast

import pytest

from tests.support.site import REPOSITORY
from tests.support.trials import TRIALS, is_slow


@pytest.mark.parametrize("trials", TRIALS)
def test_files_and_representatives_of_trials_exist(trials: str) -> None:
    path = REPOSITORY / trials
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    functions = {
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name.partition("[")[0] for name in TRIALS[trials]} <= functions


def test_a_trial_is_slow_and_its_representative_is_not() -> None:
    file, representative = "tests/e2e/test_cut_connections.py", "test_wherever_the_connection_is_cut"
    assert is_slow("tests/chaos/test_kills.py", "test_killed_workers_lose_nothing_and_double_nothing")
    assert is_slow(file, f"{representative}[redis-plain]")
    assert not is_slow(file, f"{representative}[redis-linked]")
    assert not is_slow("tests/e2e/test_vision.py", "test_a_skill_answers_as_it_has_streamed[query]")

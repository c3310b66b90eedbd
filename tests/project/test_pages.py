"""The examples of docs/testing.md are run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.site import REPOSITORY

PAGE = (REPOSITORY / "docs" / "testing.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.S))


@pytest.mark.e2e
@pytest.mark.parametrize("names", [("test_eager.py",), ("conftest.py", "test_worker.py")])
def test_an_example(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text(FILES[name])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PETIOLE_")}
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)],
        env={**kept, "PYTHONPATH": str(REPOSITORY), "PETIOLE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr

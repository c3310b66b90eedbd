"""What a type checker knows of Petiole in an application's code."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

APPLICATION = """
from typing_extensions import assert_type

from tasks.definitions import chat, generate
from tasks.schemas import StreamDelta
from tasks.streaming import Stream, stream

assert_type(generate.stream(prompt="Count from 1 to 5."), Stream)
assert_type(next(chat.stream(messages=[])), StreamDelta)
assert_type(next(stream(generate.delay(prompt="Count from 1 to 5."))), StreamDelta)
"""


def test_type_checkers_read_every_package_that_is_checked_here() -> None:
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
    assert [name for name in checked if not (ROOT / name / "py.typed").exists()] == []


def test_the_tasks_have_the_type_of_what_they_are(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "application.py").write_text(APPLICATION)
    files = [
        "application.py",
        *(str(ROOT / "tasks" / f"{name}.py") for name in ("definitions", "schemas", "streaming")),
    ]
    flags = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports", "--explicit-package-bases"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, *files],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"MYPYPATH": str(ROOT)},
    )
    errors = [line for line in done.stdout.splitlines() if "application.py" in line]
    assert errors == [], done.stdout + done.stderr

"""What runs on a card that is lent for a quarter of an hour."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from bench.gpu import calls
from bench.gpu.calls import CALLS, Command, main, run
from bench.gpu.steps import PARTS


def test_the_parts_that_calls_name_are_there_and_the_calls_fit_into_a_quarter_of_an_hour() -> None:
    for seconds, commands in CALLS.values():
        assert all(command.seconds <= seconds for command in commands)
        words = [word for command in commands for word in command.arguments]
        named = {part for option, part in itertools.pairwise(words) if option == "--only"}
        assert named <= PARTS.keys()
    assert CALLS["a"][0] + CALLS["b"][0] + 2 * 90 <= 15 * 60, "a start takes up to 90 s"


def test_every_command_has_its_own_file_switches_and_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "import os; print(os.environ.get('PETIOLE_UNTIMED'), flush=True); "
    commands = (
        Command("works", ("-c", said), 60, (("PETIOLE_UNTIMED", "on"),)),
        Command("fails", ("-c", said + "raise SystemExit(3)"), 60),
        Command("hangs", ("-c", said + "import time; time.sleep(600)"), 3),
    )
    monkeypatch.delenv("PETIOLE_UNTIMED", raising=False)
    monkeypatch.setitem(calls.CALLS, "a", (100, commands))
    with pytest.raises(SystemExit, match="not all of it: fails, hangs"):
        main(["a", str(tmp_path / "new")])
    lines = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["works: done", "fails: ended with 3", "hangs: stopped after 3 s"]
    found = [(tmp_path / "new" / f"a-{name}.txt").read_text() for name in ("works", "fails", "hangs")]
    assert found == ["on\n", "None\n", "None\n"]
    with pytest.raises(SystemExit, match="not all of it: works, fails, hangs"):
        main(["a", str(tmp_path), "--within", "0"])


def test_what_a_stopped_command_has_started_ends_with_it(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    child = f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    why = run(Command("tests", ("-c", parent), 60), tmp_path, tmp_path / "log", 3)
    assert why == "stopped after 3 s"
    time.sleep(0.3)
    alive.unlink()
    time.sleep(0.5)
    assert not alive.exists()

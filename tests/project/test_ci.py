"""`.ci/run` tries once more what failed, and says so at the end of a green run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.site import REPOSITORY

CI = REPOSITORY / ".ci" / "run"

pytestmark = pytest.mark.skipif(not CI.exists() or not shutil.which("bash"), reason="a checkout, and bash")

MAKE = """#!/usr/bin/env bash
[ "$1" = lint ] && [ "$LINT" = fails ] && echo "a linter's line" && exit 2
[ "$1" = "$FAILS" ] || exit 0
mkdir -p .pytest_cache/v/cache
echo '{"tests/test_b.py::test_two": true, "tests/test_a.py::test_one": true}' > .pytest_cache/v/cache/lastfailed
exit 1
"""
PYTHON = """#!/usr/bin/env bash
[ "$2" = pytest ] && exit $AGAIN
exec {python} "$@"
"""


def run(folder: Path, *, fails: str, again: int = 0, lint: str = "passes") -> subprocess.CompletedProcess[str]:
    """The script in a folder of its own, with stand-ins for make, pytest and the servers that it looks for."""

    def program(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    (folder / ".ci").mkdir()
    shutil.copy(CI, folder / ".ci" / "run")
    program(folder / ".venv/bin/python", PYTHON.replace("{python}", sys.executable))
    program(folder / "bin/make", MAKE)
    for tool in ("redis-server", "rabbitmq-server", "promtool"):
        program(folder / "bin" / tool, "#!/usr/bin/env bash\n")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(
        [folder / ".ci/run"],
        env={**environment, "FAILS": fails, "AGAIN": str(again), "LINT": lint},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("target", ["test", "trials"])
def test_a_green_run_lists_what_failed_once(tmp_path: Path, target: str) -> None:
    done = run(tmp_path, fails=target, again=0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "passed only when it was tried once more:",
        "  tests/test_a.py::test_one",
        "  tests/test_b.py::test_two",
    ]


def test_a_run_without_failures_lists_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, fails="no", again=0)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", ["test", "trials"])
def test_what_fails_twice_fails_the_run(tmp_path: Path, target: str) -> None:
    done = run(tmp_path, fails=target, again=1)
    assert done.returncode == 1
    assert "passed only" not in done.stdout


@pytest.mark.parametrize("fails", ["no", "test", "trials"])
def test_what_a_linter_says_fails_the_run_and_is_shown_at_its_end(tmp_path: Path, fails: str) -> None:
    done = run(tmp_path, fails=fails, lint="fails")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "a linter's line"

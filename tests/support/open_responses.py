"""The compliance suite of Open Responses, against any server. It is not part of this repository: it is fetched,
with bun, into a folder that is kept between runs.

    python -m tests.support.open_responses URL MODEL [TEST ...]

PETIOLE_OPEN_RESPONSES names a folder that has the suite already."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = "https://github.com/Stars1233/openresponses"
COMMIT = "92c12d9"
PACKAGES = ("zod@3", "bun")
_RUN_S = 300


class Missing(Exception):  # noqa: N818
    """The suite cannot be had here."""


@dataclass(frozen=True)
class Outcome:
    status: str
    why: str


def folder() -> Path:
    """The suite, ready to run. Raises `Missing`."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise Missing("needs node and npm")
    given = os.environ.get("PETIOLE_OPEN_RESPONSES")
    found = Path(given) if given else Path(tempfile.gettempdir()) / f"open-responses-{COMMIT}-{os.getuid()}"
    if not (found / "bin" / "compliance-test.ts").exists():
        if given:
            raise Missing(f"PETIOLE_OPEN_RESPONSES: {found} has no bin/compliance-test.ts")
        shutil.rmtree(found, ignore_errors=True)
        _done("git", "clone", "-q", SOURCE, str(found))
        _done("git", "-C", str(found), "checkout", "-q", COMMIT)
    if not (found / "node_modules" / ".bin" / "bun").exists():
        with tempfile.TemporaryDirectory() as empty:  # the suite's own package.json asks for a whole website
            _done("npm", "install", "--silent", "--prefix", empty, *PACKAGES)
            shutil.copytree(
                Path(empty) / "node_modules", found / "node_modules", symlinks=True, dirs_exist_ok=True
            )
    return found


def _done(*command: str) -> None:
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_RUN_S, env=environment)
    except (OSError, subprocess.SubprocessError) as error:
        raise Missing(f"cannot be fetched: {' '.join(command[:2])}: {error}") from None


def run(url: str, model: str, tests: tuple[str, ...] = ()) -> dict[str, Outcome]:
    """By the id of each test: how it went. Raises `Missing`."""
    where = folder()
    bun = str(where / "node_modules" / ".bin" / "bun")
    command = [bun, "run", "bin/compliance-test.ts", "-u", url, "-k", "none", "-m", model, "--json"]
    command += ["-f", ",".join(tests)] if tests else []
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=_RUN_S, check=False)
    try:
        results = json.loads(done.stdout)["results"]
    except (ValueError, KeyError):
        raise AssertionError(f"the suite has not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}") from None
    return {one["id"]: Outcome(one["status"], "; ".join(one.get("errors") or ())) for one in results}


if __name__ == "__main__":
    failed = 0
    for name, outcome in run(sys.argv[1], sys.argv[2], tuple(sys.argv[3:])).items():
        print(f"{outcome.status:8} {name} {outcome.why}")
        failed += outcome.status != "passed"
    sys.exit(failed > 0)

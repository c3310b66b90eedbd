"""Each SDK's program against a real gateway. `make sdks` installs the SDKs and says where: PETIOLE_SDKS is a
folder with a virtual environment and with node_modules. Without it only what the tests' own environment has is
run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.gateway import Gateway
from tests.support.site import REPOSITORY

HERE = REPOSITORY / "tests" / "support" / "sdks"
PROGRAMS, WITH_TOOLS = (sorted(path.name for path in HERE.glob(names)) for names in ("with_*", "tools_with_*"))
SDKS = os.environ.get("PETIOLE_SDKS")
ABSENT = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'|Cannot find package '([^']+)'")
LEAST_NODE = 22
_RUN_S = 240


def command(program: str, tmp_path: Path) -> list[str]:
    """How it is run. Node looks for packages beside a program, so that one is copied to where they are."""
    if program.endswith(".py"):
        return [str(Path(SDKS) / "bin" / "python") if SDKS else sys.executable, str(HERE / program)]
    where = Path(SDKS) if SDKS else tmp_path
    if (node := shutil.which(where / "node_modules" / ".bin" / "node") or shutil.which("node")) is None:
        pytest.skip("needs node")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(version.removeprefix("v").partition(".")[0]) < LEAST_NODE:
        pytest.skip(f"needs node {LEAST_NODE} or later, has {version.strip()}")
    return [node, str(shutil.copy(HERE / program, where / program))]


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_sdk_gets_what_it_asks_for(gateway: Gateway, program: str, tmp_path: Path) -> None:
    is_fine(gateway, program, tmp_path)


@pytest.mark.parametrize("program", WITH_TOOLS)
def test_an_sdk_gets_calls_of_its_tools(tooled_gateway: Gateway, program: str, tmp_path: Path) -> None:
    is_fine(tooled_gateway, program, tmp_path)


def is_fine(gateway: Gateway, program: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [*command(program, tmp_path), gateway.url], capture_output=True, text=True, timeout=_RUN_S, cwd=tmp_path
    )
    if run.returncode and (absent := ABSENT.search(run.stderr)):
        pytest.skip(f"needs {absent[1] or absent[2]}")
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.endswith("fine\n")

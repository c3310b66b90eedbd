"""A producer in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.site import REPOSITORY, Site


def environment_of(site: Site, folder: Path = REPOSITORY, **more: str) -> dict[str, str]:
    """Of a producer that finds modules of its own in `folder`."""
    path = os.pathsep.join(map(str, dict.fromkeys([REPOSITORY, folder])))
    return {**os.environ, **site.environment, "PYTHONPATH": path, **more}


def run_python(
    site: Site, *arguments: str, folder: Path = REPOSITORY, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, in `folder`."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment_of(site, folder, **more),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def printed(site: Site, *arguments: str, folder: Path = REPOSITORY, **more: str) -> str:
    """What such a run prints, which must succeed."""
    found = run_python(site, *arguments, folder=folder, **more)
    assert found.returncode == 0, found.stderr
    return found.stdout


def client(site: Site, code: str, first: str = "") -> Any:
    """Run a producer of its own, in which `first` runs before the imports; what it prints last is JSON."""
    return json.loads(
        printed(site, "-c", f"{first}\nimport json, asyncio\nimport tasks\nfrom tasks import *\n{code}")
    )

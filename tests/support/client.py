"""A producer in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.site import REPOSITORY, Site


def client(site: Site, code: str, first: str = "") -> Any:
    """Run a producer of its own, in which `first` runs before the imports; what it prints last is JSON."""
    ran = subprocess.run(
        [sys.executable, "-c", f"{first}\nimport json, asyncio\nimport tasks\nfrom tasks import *\n{code}"],
        env={**os.environ, **site.environment, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)

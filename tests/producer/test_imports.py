"""What a web app pays for `import tasks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = """
import json, sys
import {module}
print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
"""


@pytest.mark.parametrize("module", ["tasks", "tasks.cli", "tasks.demo", "tasks.embedded", "tasks.fleet"])
def test_the_producer_side_needs_nothing_of_the_worker(module: str) -> None:
    imported = subprocess.run(
        [sys.executable, "-c", CHECK.format(module=module)], capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "gpu_worker", "cache", "transformers"} & set(json.loads(imported.stdout))


def test_importing_reads_no_setting_and_starts_no_server(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PETIOLE_BROKER_URL": "embedded://",
        "PETIOLE_PAGE_SIZE": "not a number",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", "import tasks, tasks.cli"], env=environment, check=True)
    assert not list(tmp_path.iterdir())


def test_another_app_stays_the_current_one() -> None:
    code = """
import celery
mine = celery.Celery("mine")
import tasks
assert celery.current_app._get_current_object() is mine
assert tasks.generate.app is tasks.celery_app
"""
    subprocess.run([sys.executable, "-c", code], check=True)

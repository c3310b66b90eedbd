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
print(json.dumps(sorted(sys.modules)))
"""
NOT_THE_PRODUCERS = (
    "torch",
    "numpy",
    "transformers",
    "petiole.gpu_worker",
    "petiole.cache",
    "petiole.tasks.worker",
)


@pytest.mark.parametrize(
    "module",
    [
        "tasks",
        "petiole.tasks.submission.task",
        "petiole.tasks.app.configuration",
        "petiole.tasks.commands.cli",
        "petiole.tasks.commands.demos.demo",
        "petiole.tasks.servers.embedded",
        "petiole.tasks.fleet.control",
        "petiole.tasks.wire.record.scripts",
    ],
)
def test_the_producer_side_needs_nothing_of_the_worker(module: str) -> None:
    imported = subprocess.run(
        [sys.executable, "-c", CHECK.format(module=module)], capture_output=True, text=True, check=True
    )
    brought = json.loads(imported.stdout)
    assert not [name for name in brought if f"{name}.".startswith(tuple(f"{one}." for one in NOT_THE_PRODUCERS))]


TO_SUBMIT = {"asyncio", "pydantic", "redis"}


def brought(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(imported.stdout))


@pytest.mark.parametrize(
    "name", ["generate, chat", "query, put_image", "app", "stream, astream", "cancel", "Unavailable, NoWorker"]
)
def test_an_import_brings_little_beside_celery(name: str) -> None:
    assert not TO_SUBMIT & brought(f"from petiole import {name}")


def test_a_submission_does_not_pay_for_what_workers_and_terminals_use() -> None:
    modules = brought("from petiole import generate; generate.delay; generate.s")
    assert modules > TO_SUBMIT
    assert not {"celery.apps.worker", "celery.bin", "rich", "prometheus_client"} & modules


def test_importing_reads_no_setting_and_starts_no_server(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PETIOLE_BROKER_URL": "embedded://",
        "PETIOLE_PAGE_SIZE": "not a number",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    subprocess.run(
        [sys.executable, "-c", "from petiole import tasks; import petiole.tasks.commands.cli"],
        env=environment,
        check=True,
    )
    assert not list(tmp_path.iterdir())


def test_another_app_stays_the_current_one() -> None:
    code = """
import celery
mine = celery.Celery("mine")
from petiole import tasks
assert celery.current_app._get_current_object() is mine
assert tasks.generate.app is tasks.celery_app
"""
    subprocess.run([sys.executable, "-c", code], check=True)


WORKER_OF_A_PRODUCER = """
import sys
sys.modules |= {"hiredis": None}  # as if it were not installed
sys.argv = ["celery", "-A", "petiole", "worker"]
from celery.__main__ import main
main()
"""


def test_a_worker_needs_more_than_a_producer_and_says_so_in_a_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WORKER_OF_A_PRODUCER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "pip install 'petiole[worker]' (no hiredis)" in done.stderr

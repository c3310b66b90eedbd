"""In a checkout `tasks`, `gpu_worker` and `cache` are the modules of `petiole`, whichever name came first."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from petiole import tasks
from tests.support.parsing import parsed
from tests.support.site import REPOSITORY

SAME = """
import sys, tasks.errors, petiole.tasks.errors
from tasks.servers.connections import streams
from petiole.tasks.servers import connections
assert tasks is petiole.tasks and tasks.errors is petiole.tasks.errors
assert connections.streams is streams
import cache, gpu_worker
from gpu_worker.engine import Engine
assert Engine is petiole.gpu_worker.Engine
assert cache.PageTable is petiole.cache.PageTable
assert petiole.app is tasks.celery_app is petiole.celery_app
assert petiole.generate is tasks.generate
assert tasks.errors.__spec__.name == "petiole.tasks.errors"
"""


def run(code: str, cwd: Path = REPOSITORY, path: Path = REPOSITORY) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "first",
    [
        "import tasks",
        "import petiole.tasks",
        "import petiole",
        "from tasks import generate",
        "import tasks.worker.output.outcomes",
        "import cache",
        "import gpu_worker.engine",
        "from petiole import stream",
    ],
)
def test_a_module_has_two_names_and_is_one(first: str) -> None:
    run(f"{first}\n{SAME}")


def test_a_short_name_beside_an_application_is_the_applications(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("mine = True\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "__init__.py").write_text("mine = True\n")
    (tmp_path / "cache" / "tokens.py").write_text("mine = True\n")
    run(
        "import petiole.tasks, petiole.cache, tasks, cache, cache.tokens\n"
        "assert tasks.mine and cache.mine and cache.tokens.mine\n"
        "assert not petiole.cache is cache",
        tmp_path,
    )


def test_a_module_that_does_not_exist_is_missing_under_both_names() -> None:
    run(
        "import importlib, tasks\n"
        "for name in ('tasks.nothing', 'petiole.tasks.nothing', 'tasks.worker.nothing.at_all'):\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError:\n"
        "        continue\n"
        "    raise AssertionError(name)"
    )


@pytest.mark.parametrize("module", ["tasks.commands.cli", "petiole.tasks.commands.cli"])
def test_a_module_runs_under_both_names(module: str) -> None:
    command = [sys.executable, "-m", module, "settings"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "PETIOLE_BROKER_URL" in done.stdout


@pytest.mark.parametrize("name", ["tasks", "petiole"])
def test_celery_finds_the_app_under_both_names(name: str) -> None:
    code = (
        "from celery.app.utils import find_app\n"
        f"app = find_app({name!r})\n"
        "from petiole.tasks import celery_app\n"
        "assert app is celery_app, app"
    )
    run(code)


def test_a_checkout_without_links_works_as_well(tmp_path: Path) -> None:
    """As git makes it on Windows: in place of each link there is a file that says where it leads."""
    (tmp_path / "petiole").mkdir()
    for file in (REPOSITORY / "petiole").glob("*.py"):
        shutil.copy(file, tmp_path / "petiole" / file.name)
    shutil.copytree(REPOSITORY / "petiole" / "contract", tmp_path / "petiole" / "contract")
    for folder in ("gateway", "tasks", "gpu_worker", "cache"):
        (tmp_path / folder).symlink_to(REPOSITORY / folder)
        (tmp_path / "petiole" / folder).write_text(f"../{folder}")
    assert str(tmp_path) in run(f"{SAME}\nprint(petiole.__path__)", tmp_path, tmp_path)


def test_importing_the_package_alone_brings_nothing() -> None:
    assert "celery" not in run("import petiole, sys; print(*sys.modules)").split()


def test_the_cache_brings_no_celery() -> None:
    brought = run("import petiole.cache, sys; print(*sys.modules)").split()
    assert not {"celery", "kombu", "redis", "torch", "pydantic"} & set(brought)


def test_the_package_names_what_the_producer_side_names() -> None:
    run(
        "import petiole, petiole.tasks\n"
        "assert set(petiole.__all__) == {*petiole.tasks.__all__, 'app', 'testing'}\n"
        "assert set(petiole.__all__) <= set(dir(petiole))\n"
        "for name in petiole.tasks.__all__: assert getattr(petiole, name) is getattr(petiole.tasks, name)"
    )


def test_type_checkers_see_the_names_that_are_imported_later() -> None:
    """Names are listed for Python and, under TYPE_CHECKING, for type checkers and the test of circles."""
    tree = parsed((REPOSITORY / "tasks" / "__init__.py").read_text())
    seen = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for guarded in tree.body
        if isinstance(guarded, ast.If)
        for node in ast.walk(guarded)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("petiole.")
        for alias in node.names
    }
    assert seen.pop("_App") == "petiole.tasks.app.application:App"
    assert {name: home for name, home in tasks._HOMES.items() if name != "celery_app"} == seen

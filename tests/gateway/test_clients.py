"""Each client's program against a gateway with two models. `make clients` says where clients are installed:
PETIOLE_CLIENTS is a folder with uv. Without it the programs run whose packages the tests' environment has."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.fleet import models
from tests.gateway.conftest import REAL
from tests.support.clients import HERE, PROGRAMS, RECORD, STEPS
from tests.support.gateway import Gateway
from tests.support.scripted import CONTEXT, scripted
from tests.support.site import REPOSITORY, Site, eventually

CLIENTS = os.environ.get("PETIOLE_CLIENTS")
ABSENT = re.compile(r"(?:No module named '|metadata was found for |No such file or directory: ')([\w.@/-]+)")
NPM = re.compile(r"^(?:#|//) npm: (.+)", re.M)
_RUN_S = 1500
_READY_S = 600.0
"""The first worker may compile its kernels."""


@contextmanager
def served(folder: Path) -> Iterator[Gateway]:
    """A gateway, a worker on petiole-tiny-tools, and one on a model that is told what to say."""
    files = folder / "files"
    files.mkdir()
    common = {
        **REAL,
        "PETIOLE_GATEWAY_FILES": files,
        "PETIOLE_GATEWAY_UNREAD_S": 3,
        "PETIOLE_GATEWAY_STORED_STAY": False,
    }
    with Site(folder, **{**common, "PETIOLE_MODEL": "petiole-tiny-tools"}) as site:
        site.start_worker()
        site.start_worker(
            PETIOLE_ENGINE_FACTORY="tests.support.scripted:ScriptedEngine",
            PETIOLE_MODEL=scripted(folder),
            PETIOLE_SERVED_NAMES="scripted",
            PETIOLE_NUM_PAGES=2 * CONTEXT,
        )
        for worker in site.workers:
            worker.ready(_READY_S)
        eventually(lambda: len(models.models(site.redis)) == 2, "both workers have said what they serve")
        with Gateway(folder, PETIOLE_BROKER_URL=site.url, **common) as gateway:
            yield gateway


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with served(tmp_path_factory.mktemp("clients")) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def installing(request: pytest.FixtureRequest) -> Iterator[Mapping[str, Future[None]]]:
    """By program: its environment, made while the programs before it run."""
    with ThreadPoolExecutor(1) as pool:
        names = [item.callspec.id for item in request.session.items if hasattr(item, "callspec")]
        wanted = [program for program in PROGRAMS if CLIENTS and program.name in names]
        yield {program.name: pool.submit(install, program) for program in wanted}
        pool.shutdown(cancel_futures=True)


@pytest.mark.e2e
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_client_gets_what_it_asks_for(
    installing: Mapping[str, Future[None]], gateway: Gateway, program: Path, tmp_path: Path
) -> None:
    if CLIENTS:
        installing[program.name].result()
    ran = run(program, gateway.url, tmp_path)
    if ran.returncode and not CLIENTS and (absent := ABSENT.search(ran.stderr)):
        pytest.skip(f"needs {absent[1]}")
    said = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith(('{"client"', '{"step"'))]
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    client, *steps = said
    failed = {one["step"]: one["failed"] for one in steps if "failed" in one}
    assert not failed, "\n".join(f"{step}: {why}" for step, why in failed.items()) + ran.stderr[-4000:]
    lacks = {one["step"]: one.get("lacks") for one in steps}
    assert [*lacks][: len(STEPS)] == [*STEPS]
    if CLIENTS:
        _recorded(program, {**client, "steps": lacks})


def test_the_record_has_each_client() -> None:
    assert [*json.loads(RECORD.read_text())] == [path.name for path in PROGRAMS], "run: make clients"


def run(program: Path, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a folder in `folder`, which is empty, beside a home of its own."""
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    command = [sys.executable, str(program), url]
    environment = {
        **os.environ,
        "HOME": str(home),
        "PWD": str(work),
        "PETIOLE_SITE": sysconfig.get_path("purelib"),
    }
    if CLIENTS:
        command, environment = installed(program, url, environment)
    elif program.suffix == ".mjs":
        pytest.skip("needs packages of npm")
    with subprocess.Popen(
        command, cwd=work, env=environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, errors = process.communicate(timeout=_RUN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # and all that the program has started
            said, errors = process.communicate()
            errors += f"\nIt had not ended after {_RUN_S} s, and was killed."
    return subprocess.CompletedProcess(command, process.returncode, said, errors)


def install(program: Path) -> None:
    """The packages that its head names: those of npm into a folder of its own, those of Python by uv."""
    root = Path(CLIENTS or "")
    commands = [[str(root / "bin" / "uv"), "sync", "--quiet", "--script", str(program)]]
    if program.suffix == ".mjs":
        commands = []
    if (packages := NPM.search(program.read_text())) and shutil.which("npm"):
        commands.append(["npm", "install", "--silent", "--prefix", str(root / program.stem), *packages[1].split()])
    for command in commands:
        subprocess.run(command, cwd=root, env=os.environ | surroundings(program), check=True, timeout=_RUN_S)


def surroundings(program: Path) -> dict[str, str]:
    """Where a program's packages are."""
    root = Path(CLIENTS or "")
    paths = [str(folder / "node_modules" / ".bin") for folder in (root / program.stem, root)]
    return {"PATH": os.pathsep.join([*paths, os.environ["PATH"]]), "UV_CACHE_DIR": str(root / "uv")}


def installed(program: Path, url: str, environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """The command of a program, and its surroundings, with the packages that its head names."""
    root, where = Path(CLIENTS or ""), Path(CLIENTS or "") / program.stem
    environment |= surroundings(program)
    if NPM.search(program.read_text()) and shutil.which("npm") is None:
        pytest.skip("needs npm")
    if program.suffix == ".py":
        return [str(root / "bin" / "uv"), "run", "--quiet", "--script", str(program), url, str(where)], environment
    for name in ("steps.mjs", program.name):  # Node looks for packages beside a program
        shutil.copy(HERE / name, where / name)
    return ["node", str(where / program.name), url], environment


def _recorded(program: Path, row: dict[str, Any]) -> None:
    """The row of a program in the record, in place of its last one."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.strip()
    rows = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    registry = "npm" if NPM.search(program.read_text()) else "PyPI"
    rows[program.name] = {
        **row,
        "registry": registry,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit,
    }
    known = [path.name for path in PROGRAMS]
    text = json.dumps({name: rows[name] for name in known if name in rows}, indent=1, ensure_ascii=False)
    RECORD.write_text(text + "\n")

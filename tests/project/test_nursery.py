"""A process that the nursery forks is as the command itself would be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nursery import Forked, Nursery

SAYS = """
import atexit, json, os, signal, sys, time
atexit.register(print, "at the end")
print(json.dumps([sys.argv[1:], os.environ["PETIOLE_SAID"], os.getcwd(), sys.path[0], __name__, [
    str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
]]))
print("an error", file=sys.stderr)
if sys.argv[1] == "wait":
    print("waiting")
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nursery")
    (folder / "says.py").write_text(SAYS)
    return folder


@pytest.fixture(scope="module")
def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(folder), *sys.path])
    return {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "PETIOLE_SAID": "this"}


@pytest.fixture(scope="module")
def nursery(folder: Path, environment: dict[str, str]) -> Iterator[Nursery]:
    nursery = Nursery(environment, folder, libraries=())
    yield nursery
    nursery.close()


def forked(nursery: Nursery, environment: dict[str, str], *arguments: str) -> Forked:
    with (nursery.folder / "output").open("wb") as output:
        return nursery.start(["says", *arguments], environment, nursery.folder, output)


def test_arguments_environment_folder_output_signals_and_status(
    nursery: Nursery, environment: dict[str, str]
) -> None:
    command = [sys.executable, "-m", "says", "3", "more"]
    itself = subprocess.run(
        command,
        cwd=nursery.folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a background run ignores
        check=False,
    )
    process = forked(nursery, environment, "3", "more")
    assert process.wait(60) == process.poll() == process.returncode == itself.returncode == 3
    assert (nursery.folder / "output").read_bytes() == itself.stdout
    assert json.loads(itself.stdout.splitlines()[0])[:2] == [["3", "more"], "this"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal(nursery: Nursery, environment: dict[str, str], number: int) -> None:
    process = forked(nursery, environment, "wait")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(number)
    assert process.wait(60) == -number
    assert not Path(f"/proc/{process.pid}").exists()
    process.kill()


def test_what_an_import_may_read_must_be_the_same(nursery: Nursery, environment: dict[str, str]) -> None:
    assert nursery.suits({**environment, "PETIOLE_SAID": "that"})
    assert not nursery.suits({**environment, "OMP_NUM_THREADS": "7"})


def test_what_libraries_draw_is_not_the_same_in_two_processes(folder: Path, environment: dict[str, str]) -> None:
    (folder / "draws.py").write_text("import numpy, torch; print(numpy.random.rand(), torch.rand(1).item())")
    nursery = Nursery(environment, folder, libraries=("numpy.random", "torch"))
    said = []
    for k in range(2):
        with (folder / f"drawn{k}").open("wb") as output:
            assert nursery.start(["draws"], environment, folder, output).wait(60) == 0
        said.append((folder / f"drawn{k}").read_text().split())
    nursery.close()
    assert not set(said[0]) & set(said[1])

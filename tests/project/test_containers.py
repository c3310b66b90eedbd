"""The container files, checked against the compose specification's schema and a Dockerfile linter.

No container engine is needed: what is tested is that the files say what the documentation promises.
`tests/e2e/test_images.py` builds and runs them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_profile_monitoring_has_what_it_mounts() -> None:
    services = compose()["services"]
    assert {name for name, service in services.items() if service.get("profiles") == ["monitoring"]} == {
        "metrics",
        "prometheus",
        "grafana",
    }
    mounts = [volume for service in services.values() for volume in service.get("volumes", ()) if volume[0] == "."]
    assert mounts
    for mount in mounts:
        assert (ROOT / mount.partition(":")[0]).exists(), mount


def test_redis_persists_never_evicts_queued_tasks_and_has_a_limit() -> None:
    command = " ".join(compose()["services"]["redis"]["command"])
    for option in ("--appendonly yes", "--maxmemory-policy noeviction", "--maxmemory ${REDIS_MAXMEMORY:-1gb}"):
        assert option in command


def test_no_container_has_more_rights_or_memory_than_it_needs() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name


def test_no_password_is_in_the_environment_or_on_a_command_line() -> None:
    services = compose()["services"]
    assert {name for name, service in services.items() if "broker_url" not in service.get("secrets", ())} == {
        "prometheus",
        "grafana",
    }
    for name, service in services.items():
        assert "PETIOLE_BROKER_URL" not in service.get("environment", {}), name
    default = compose()["secrets"]["broker_url"]["file"].partition(":-")[2].removesuffix("}")
    assert (ROOT / default).read_text() == "redis://redis:6379/0\n"


def test_kernels_that_were_compiled_are_kept_for_the_next_container() -> None:
    volumes = compose()["services"]["worker"]["volumes"]
    assert "kernels:/home/petiole/.cache" in volumes
    assert "kernels" in compose()["volumes"]


def dockerfile() -> list[str]:
    return (ROOT / "Dockerfile").read_text().splitlines()


def test_the_cpu_image_has_no_compiler() -> None:
    text = "\n".join(dockerfile())
    image = text[text.index(" AS cpu\n") : text.index("# --- gpu")]
    assert "apt-get install" in image
    assert "gcc" not in image


def locked(name: str) -> dict[str, list[str]]:
    """The versions of each distribution in images/NAME.txt. Fails if one has no hash."""
    found: dict[str, list[str]] = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / "images" / f"{name}.txt").read_text().strip()):
        requirement, *hashes = entry.split("--hash=")
        assert hashes, requirement
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}[\s\\]*", value) for value in hashes), requirement
        parsed = Requirement(requirement.strip(" \\\n"))
        [pin] = parsed.specifier
        assert pin.operator == "=="
        found.setdefault(canonicalize_name(parsed.name), []).append(pin.version)
    return found


def declared(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]
    return [one for one in map(Requirement, lines) if one.name != "petiole"]


@pytest.mark.parametrize(("image", "extra"), [("cpu", ()), ("gpu", ("gpu", "nvml"))])
def test_an_image_installs_what_is_declared_with_hashes(image: str, extra: tuple[str, ...]) -> None:
    """Run `make lock` after a change of the dependencies."""
    versions = locked(image)
    if image == "cpu":
        torch = re.match(r"torch==([\d.]+)", (ROOT / "images" / "torch.txt").read_text())
        assert torch
        versions["torch"] = [torch[1]]
    for requirement in declared("worker", "video", "cli", "metrics", "gateway", "jwt", "otel", *extra):
        found = versions[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(version) for version in found), requirement


def test_both_images_install_the_same_versions() -> None:
    cpu, gpu = locked("cpu"), locked("gpu")
    assert {name: gpu[name] for name in cpu} == cpu


def test_the_gateways_image_has_the_workers_versions_and_no_torch() -> None:
    gateway, gpu = locked("gateway"), locked("gpu")
    assert {name: gpu[name] for name in gateway} == gateway
    assert not {"torch", "numpy", "tokenizers"} & gateway.keys()
    for requirement in declared("gateway", "jwt", "cli", "otel"):
        assert all(requirement.specifier.contains(one) for one in gateway[canonicalize_name(requirement.name)])


def test_the_gateway_is_reached_from_this_machine_alone() -> None:
    """It asks nobody for a key until there is one."""
    gateway = compose()["services"]["gateway"]
    assert "profiles" not in gateway
    assert gateway["build"]["target"] == "gateway"
    assert [port.partition(":")[0] for port in gateway["ports"]] == ["127.0.0.1"]


def test_the_build_backend_has_hashes() -> None:
    assert {"hatchling", "editables"} <= locked("build").keys()


def test_every_base_image_can_get_a_digest(tmp_path: Path) -> None:
    """`make pin`, with a registry's client that knows one digest. It changes the base images and nothing else."""
    digest = f"sha256:{'0' * 63}1"
    (tmp_path / "images").mkdir()
    for name in ("Dockerfile", "docker-compose.yml", "images/pin.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    client = tmp_path / "skopeo"
    client.write_text(f"#!/bin/sh\necho {digest}\n")
    client.chmod(0o755)
    for _ in range(2):  # a second run finds images that have a digest already
        subprocess.run(
            ["sh", "images/pin.sh"], cwd=tmp_path, check=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        )
        changed = (tmp_path / "Dockerfile").read_text() + (tmp_path / "docker-compose.yml").read_text()
        assert changed.count(f"@{digest}") == 5
        before = (ROOT / "Dockerfile").read_text() + (ROOT / "docker-compose.yml").read_text()
        assert re.sub("@sha256:[0-9a-f]{64}", "", changed) == re.sub("@sha256:[0-9a-f]{64}", "", before)


def test_every_build_target_exists_in_the_dockerfile() -> None:
    stages = {line.split()[-1] for line in dockerfile() if line.startswith("FROM ")}
    targets = {service["build"]["target"] for service in compose()["services"].values() if "build" in service}
    assert targets <= stages


def test_a_worker_gets_longer_to_stop_than_it_drains() -> None:
    worker = compose()["services"]["worker"]
    assert int(worker["stop_grace_period"].removesuffix("s")) > 20

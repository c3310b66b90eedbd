"""The images for CPUs and for the gateway, and the compose file, built and run by podman under all restrictions.

It is skipped where podman, podman-compose or the two base images are not there: no image is downloaded. The test
runs the health checks of the compose file: podman runs them by itself only under systemd.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tests.support.rabbitmq import free_port
from tests.support.site import REPOSITORY, eventually

PROJECT = f"petiole-test-{os.getpid()}"
WORKER, GATEWAY, REDIS = (f"{PROJECT}_{service}_1" for service in ("worker-cpu", "gateway", "redis"))
TARGETS = {"cpu": "worker-cpu", "gateway": "gateway"}
"""Of the Dockerfile, and the services that they are for."""
PASSWORD = "kept-in-a-file"

TASKS = """
import json
from tasks import chat, generate
text = generate.delay(prompt="1 2 3", max_tokens=4).get(timeout=120)
said = chat.delay(messages=[{"role": "user", "content": "Hello"}], max_tokens=4).get(timeout=120)
print(json.dumps([text["finish_reason"], said["finish_reason"]]))
"""
# In the gateway's container: what a client of OpenAI's interface does.
ASKED = """
import json, urllib.request
said = {"model": "petiole-tiny", "messages": [{"role": "user", "content": "Count from 1 to 5."}], "temperature": 0}
asked = urllib.request.Request(
    "http://127.0.0.1:8000/v1/chat/completions", json.dumps(said).encode(), {"Content-Type": "application/json"}
)
print(json.load(urllib.request.urlopen(asked, timeout=120))["choices"][0]["message"]["content"])
"""


def podman(*arguments: str, ok: bool = True) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, check=False)
    assert not ok or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def missing() -> str:
    """What this machine lacks; empty: nothing."""
    for tool in ("podman", "podman-compose"):
        if not shutil.which(tool):
            return f"no {tool}"
    files = (REPOSITORY / "Dockerfile").read_text() + (REPOSITORY / "docker-compose.yml").read_text()
    for name in ("PYTHON_IMAGE=", "REDIS_IMAGE:-"):
        image = files.partition(name)[2].split()[0].rstrip("}")
        if subprocess.run(["podman", "image", "exists", image], check=False).returncode:
            return f"podman has no image {image}"
    started = subprocess.run(
        ["podman", "run", "--rm", "--init", "--pull=never", image, "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"podman starts no container: {started.stderr.strip()}" if started.returncode else ""


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(missing()), reason=missing())]


def folders_of_packages() -> list[str]:
    """The folders in which pip looks for packages here, if any. The files of an index lie beside it."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    words = re.split(r"[\s'=]+|\\n", done.stdout)
    paths = {Path(unquote(urlsplit(word).path)) for word in words if word.startswith(("/", "file:///"))}
    folders = {path.parent if path.name == "simple" else path for path in paths if path.is_dir()}
    return sorted(str(folder) for folder in folders)


@pytest.fixture(scope="module")
def images() -> Iterator[None]:
    volumes = [f"--volume={folder}:{folder}:ro" for folder in folders_of_packages()]
    build = ["build", "--isolation=chroot", "--network=host", "--pull=never", *volumes]
    names = {target: f"localhost/{PROJECT}_{service}:latest" for target, service in TARGETS.items()}
    for target, name in names.items():
        podman(*build, f"--target={target}", f"--tag={name}", str(REPOSITORY))
    yield
    podman("rmi", "--force", *names.values(), ok=False)


def compose(*arguments: str, **environment: str) -> None:
    command = ["podman-compose", "--project-name", PROJECT, "--profile", "cpu", *arguments]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=["no password", "a password"])
def running(request: pytest.FixtureRequest, images: None, tmp_path: Path) -> Iterator[bool]:
    """The compose file's Redis, CPU worker and gateway. Gives whether they have a password."""
    has_password = request.param == "a password"
    secret = tmp_path / "broker-url"
    secret.write_text(f"redis://:{PASSWORD}@redis:6379/0\n")
    environment = {"GATEWAY_PORT": str(free_port())}
    if has_password:
        environment["BROKER_URL_FILE"] = str(secret)
    try:
        compose("up", "-d", "--no-build", "redis", "worker-cpu", "gateway", **environment)
        wait_until_ready()
        yield has_password
    finally:
        compose("down", "--volumes", **environment)


def wait_until_ready() -> None:
    """Read the worker's log until it says so, or until the container ends."""
    follow = ["podman", "logs", "--follow", WORKER]
    with subprocess.Popen(follow, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as log:
        assert log.stdout
        lines = []
        for line in log.stdout:
            lines.append(line)
            if " ready." in line:
                log.terminate()
                return
    raise AssertionError("".join(lines))


def within(container: str, *command: str, ok: bool = True) -> str:
    return podman("exec", container, *command, ok=ok)


def is_healthy(service: str, container: str) -> bool:
    """Whether the service's health check passes. `$$` is a dollar of the container's shell."""
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]
    kind, *command = (word.replace("$$", "$") for word in services[service]["healthcheck"]["test"])
    command = ["sh", "-c", *command] if kind == "CMD-SHELL" else command
    return (
        subprocess.run(["podman", "exec", container, *command], capture_output=True, check=False).returncode == 0
    )


def test_the_images_serve_under_their_restrictions(running: bool) -> None:
    for container, folder in ((WORKER, "/srv/petiole"), (GATEWAY, "/srv/petiole"), (REDIS, "/usr/local")):
        assert re.search(r"CapEff:\s+0+\n", within(container, "cat", "/proc/1/status"))
        assert re.search(r"NoNewPrivs:\s+1\n", within(container, "cat", "/proc/1/status"))
        assert "Read-only file system" in within(container, "touch", f"{folder}/anything", ok=False)
        assert int(podman("inspect", "--format", "{{.HostConfig.Memory}}", container)) >= 2**30
        assert PASSWORD not in within(container, "sh", "-c", "cat /proc/[0-9]*/cmdline")
        assert PASSWORD not in podman("inspect", container)
    for container in (WORKER, GATEWAY):
        assert within(container, "id", "-u").strip() == "10001"

    assert ("NOAUTH" in within(REDIS, "redis-cli", "get", "anything", ok=False)) is running
    if not running:
        assert within(REDIS, "redis-cli", "config", "get", "maxmemory").split() == ["maxmemory", str(2**30)]

    assert json.loads(within(WORKER, "python", "-c", TASKS).splitlines()[-1]) == ["length", "length"]
    assert "petiole-tiny" in within(WORKER, "petiole", "status")

    for service, container in (("redis", REDIS), ("worker-cpu", WORKER), ("gateway", GATEWAY)):
        eventually(partial(is_healthy, service, container), f"{service} is healthy")
    assert within(GATEWAY, "python", "-c", ASKED).strip() == "1, 2, 3, 4, 5"
    within(WORKER, "python", "-c", "import av")  # which reads files of videos
    within(WORKER, "touch", "/home/petiole/.cache/huggingface/model", "/home/petiole/.cache/kernel")

    log = podman("logs", WORKER)
    assert "CPU kernels: those compiled ahead" in log
    assert "no C compiler" not in log
    within(WORKER, "sh", "-c", "! command -v cc gcc clang")

    for container in (GATEWAY, WORKER):
        podman("stop", container)
        assert podman("inspect", "--format", "{{.State.ExitCode}}", container).strip() == "0"

"""The producer side in a web app with a Celery of its own, and the oldest kombu and redis-py that it may have.

For each version an environment is made, once, from the package registry, and kept beside the one that runs the
tests. It has the pinned packages, gevent, and what `pyproject.toml` declares for producers, which must accept the
pins.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from petiole.tasks.app.application import App
from petiole.tasks.app.configuration import configuration
from petiole.tasks.settings import Settings
from tests.support import rabbitmq
from tests.support.site import REPOSITORY, Site
from tests.support.trials import rest

pytestmark = pytest.mark.e2e

DECLARED: list[str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
PINNED = {
    "5.4": ("celery==5.4.0", "kombu==5.4.0", "redis==4.5.2"),
    "5.4-redis-py-5": ("celery==5.4.0", "redis==5.0.8"),  # pip picks the kombu, 5.6.2
    "5.5": ("celery==5.5.3", "kombu==5.5.2", "redis==5.2.1"),
    "5.6": ("celery==5.6.0", "kombu==5.6.0", "redis==6.4.0"),
    "5.7": ("celery==5.7.0", "kombu==5.7.0"),  # and the newest redis-py
}
PORT = rabbitmq.free_port()
FEATURES = (
    "delay_and_get",
    "get_gives_up",
    "many_threads_get",
    "groups",
    "chains",
    "chords",
    "streams",
    "asyncio_streams",
    "conversations",
    "cancelling",
    "a_stored_failure",
    "an_error_at_submission",
    "countdown",
    "priority",
)


def environment(version: str) -> Path:
    """The interpreter of an environment with this version. Skips the test where it cannot be installed."""
    wanted = [*PINNED[version], *DECLARED, "gevent"]
    digest = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:12]
    folder = Path(sys.prefix) / "producers" / f"celery-{version}-{digest}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:  # other test processes want it, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _made(folder, version, wanted)


def _made(folder: Path, version: str, wanted: list[str]) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=False)
        command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *wanted]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if "ResolutionImpossible" in installed.stderr:
            pytest.fail(f"what Petiole declares is not content with Celery {version}:\n{installed.stderr}")
        if installed.returncode:
            pytest.skip(f"pip cannot install {' '.join(PINNED[version])} here: {installed.stderr[-500:]}")
        (folder / "complete").touch()
    return python


def run_web_app(python: Path, site: Site, **settings: str) -> dict[str, str]:
    ran = subprocess.run(
        [python, REPOSITORY / "tests" / "support" / "web_app.py"],
        env={**os.environ, **site.environment, **settings, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    results: dict[str, str] = json.loads(ran.stdout)
    return results


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), options=("--port", str(PORT))) as site:
        site.worker()
        yield site


@pytest.fixture(scope="module", params=rest(PINNED))
def outcomes(request: pytest.FixtureRequest, site: Site) -> dict[str, str]:
    """Over TCP: redis-py 4.5.2 cannot use a socket file with a time limit, which Celery sets as well."""
    return run_web_app(environment(request.param), site, PETIOLE_BROKER_URL=f"redis://127.0.0.1:{PORT}/0")


@pytest.mark.parametrize("feature", FEATURES)
def test_a_web_app_with_a_celery_of_its_own(outcomes: dict[str, str], feature: str) -> None:
    assert outcomes[feature] == "", outcomes[feature]


def test_every_feature_is_looked_at(outcomes: dict[str, str]) -> None:
    assert set(outcomes) == set(FEATURES)


# ------------------------------------------------------------ with nothing of Petiole's installed

BY_NAME = """
import json, sys
from celery import Celery

app = Celery("shop", broker=sys.argv[1], backend=sys.argv[1])
app.conf.task_routes = {name: {"queue": "petiole"} for name in ("tasks.generate", "tasks.chat")}
result = app.send_task("tasks.generate", kwargs={"prompt": "hello", "max_tokens": 3}).get(timeout=60)
try:
    app.send_task("tasks.chat", kwargs={"messages": []}).get(timeout=60)
except Exception as error:
    print(json.dumps([result["usage"]["completion_tokens"], type(error).__name__]))
"""


@pytest.mark.parametrize("version", rest(PINNED))
def test_by_name_from_any_celery(site: Site, version: str, tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{PORT}/0"
    ran = subprocess.run(
        [environment(version), "-c", BY_NAME, url], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [3, "InvalidRequest"]


# ------------------------------------------------------------ with RabbitMQ as broker


@pytest.fixture(scope="module")
def rabbit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not rabbitmq.INSTALLED:
        pytest.skip("rabbitmq-server is not installed")
    server = rabbitmq.RabbitServer(tmp_path_factory.mktemp("rabbit"))
    try:
        with Site(tmp_path_factory.mktemp("site")) as site:
            site.environment |= {"PETIOLE_BROKER_URL": server.url, "PETIOLE_REDIS_URL": site.url}
            site.app = App("petiole", set_as_current=False)
            site.app.conf.update(configuration(Settings(broker_url=server.url, redis_url=site.url)))
            site.worker()
            yield site
    finally:
        server.close()


def test_rabbitmq_is_refused_where_celery_cannot_use_it_well() -> None:
    code = "from petiole.tasks import generate; generate.delay(prompt='hello')"
    ran = subprocess.run(
        [environment("5.4"), "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PETIOLE_BROKER_URL": "amqp://127.0.0.1//"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "PETIOLE_BROKER_URL: RabbitMQ needs Celery 5.5.3 or later, and this is 5.4.0" in ran.stderr


@pytest.mark.parametrize("version", rest(["5.5", "5.6", "5.7"]))
def test_with_rabbitmq(rabbit: Site, version: str) -> None:
    failures = {name: why for name, why in run_web_app(environment(version), rabbit).items() if why}
    assert not failures, "\n".join(failures.values())

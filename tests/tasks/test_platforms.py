"""The producer side where there is no POSIX: what Windows lacks cannot be imported, or is not there.

The nearest to a Windows that can be had on Linux. It is about Petiole's own modules: the standard library, Celery
and redis-py have chosen what is Linux's before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import rabbitmq
from tests.support.site import REPOSITORY, Site

pytestmark = pytest.mark.e2e
PORT = rabbitmq.free_port()

WITHOUT_POSIX = """
import os, signal, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {"fcntl", "grp", "posix", "pwd", "readline", "resource", "syslog", "termios", "tty"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import asyncio, multiprocessing.util, subprocess, tempfile  # these are as Linux has them, and so is Celery
import celery.app.base, celery.backends.redis, celery.canvas, celery.result, kombu.transport.redis
for name in [name for name in sys.modules if name in {"fcntl", "grp", "pwd", "readline", "resource", "termios"}]:
    del sys.modules[name]
sys.meta_path.insert(0, Absent())
absent = {
    os: ["fork", "getuid", "geteuid", "getgid", "getpgid", "register_at_fork", "setsid"],
    signal: ["SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "setitimer"],
}
for module, names in absent.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)

from petiole.tasks.app import result_consumer
result_consumer.select = object()  # has no poll()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), options=("--port", str(PORT))) as site:
        site.worker()
        yield site


def run(site: Site, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX + code],
        env={
            **os.environ,
            **site.environment,
            "PETIOLE_BROKER_URL": f"redis://127.0.0.1:{PORT}/0",
            "PYTHONPATH": str(REPOSITORY),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_web_app(site: Site) -> None:
    ran = run(site, "import tests.support.web_app as app, json; print(json.dumps(app.outcomes()))")
    assert ran.returncode == 0, ran.stderr
    assert {name: why for name, why in json.loads(ran.stdout).items() if why} == {}


def test_the_commands_that_a_producer_has(site: Site) -> None:
    ran = run(
        site, "from petiole.tasks.commands.cli import main; print(main(['settings']), main(['status', '--once']))"
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "0 0"


def test_the_embedded_redis_is_refused_with_what_to_set(site: Site) -> None:
    code = """
os.environ["PETIOLE_BROKER_URL"] = "embedded://"
from petiole.tasks import generate
generate.delay(prompt="x")
"""
    assert "embedded:// needs Linux or macOS; name a Redis (redis://host)" in run(site, code).stderr

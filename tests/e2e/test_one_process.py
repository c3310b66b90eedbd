"""docs/existing-app.md in a web app and in a worker that have two Celery apps in one process: with threads, with
greenlets, with forks, and with each version of Celery that a team may have. Petiole's worker has its own.

The environments are those of `tests/tasks/test_celery_versions.py`: made once, from the package registry.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import rabbitmq
from tests.support.site import PATIENCE_S, REPOSITORY, Site, Worker, eventually
from tests.tasks.test_celery_versions import PINNED, environment

pytestmark = pytest.mark.e2e

PORT = rabbitmq.free_port()
BOTH_APPS = str(REPOSITORY / "tests" / "support" / "both_apps.py")
POOLS = {"prefork": ("-c", "3"), "threads": ("-c", "4"), "gevent": ("-c", "20")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Petiole's worker. The shop's queue has a name of its own. Over TCP: see `test_celery_versions`."""
    with Site(tmp_path_factory.mktemp("site"), options=("--port", str(PORT)), PETIOLE_LINKED_QUEUE="shop") as site:
        url = f"redis://127.0.0.1:{PORT}/0"
        site.use(url)
        site.environment |= {"SHOP_URL": url, "SHOP_SETTINGS": json.dumps({"task_default_queue": "shop"})}
        site.worker()
        yield site


@pytest.fixture(scope="module", params=PINNED)
def python(request: pytest.FixtureRequest) -> Path:
    return environment(request.param)


def run(site: Site, python: Path, *command: str) -> Any:
    ran = subprocess.run(
        [python, *command],
        env={**os.environ, **site.environment, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-5000:]
    return json.loads(ran.stdout)


@contextmanager
def shop_worker(site: Site, python: Path, pool: str) -> Iterator[Worker]:
    """The shop's worker. It has used Petiole's app before its pool forks."""
    options = ("-P", pool, *POOLS[pool])
    worker = site.start_worker(*options, app="tests.support.shop", python=python, SHOP_SUBMITS_FIRST="1")
    try:
        yield worker.ready()
    finally:
        worker.stop()


FEATURES = """
import json
import tests.support.shop
from tests.support.web_app import outcomes
print(json.dumps({name: why for name, why in outcomes().items() if why}))
"""


def test_a_web_app_with_threads_greenlets_and_forks(site: Site, python: Path) -> None:
    with shop_worker(site, python, "prefork"):
        assert run(site, python, BOTH_APPS, "threads", "40", "3")["wrong"] == {}
        assert run(site, python, BOTH_APPS, "forked", "3", "8", "13")["wrong"] == {}
        assert run(site, python, "-m", "gevent.monkey", BOTH_APPS, "threads", "40", "3")["wrong"] == {}
        assert run(site, python, "-c", FEATURES) == {}


IN_TASKS = """
import json
from tests.support.shop import *
found = [canvases.delay(7), canvases.delay(11)]
print(json.dumps([why for one in found for why in one.get(timeout=900).values()]))
"""
"""Each of the 68 canvases gives up by itself. The last word is for a worker that has died."""

TRY_AGAIN = """
from tests.support.shop import *
request = {"prompt": [1] * 100_000, "max_tokens": 1}
generate.apply_async(kwargs=request, link_error=try_again.s(request, 2))
print("[]")
"""


@pytest.mark.parametrize("pool", POOLS)
def test_tasks_of_the_shop_that_submit_to_both_apps(site: Site, python: Path, pool: str) -> None:
    with shop_worker(site, python, pool) as worker:
        assert set(run(site, python, "-c", IN_TASKS)) == {""}
        run(site, python, "-c", TRY_AGAIN)
        eventually(lambda: "0 left" in worker.output, "it has been tried three times", PATIENCE_S)
        assert len(re.findall(r"\d left$", worker.output, re.MULTILINE)) == 3

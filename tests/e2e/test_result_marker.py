"""A process that looks for results where no worker stores them is told, however the URLs are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from petiole.tasks.wire.keys import MARKER_PREFIX
from petiole.tasks.worker.reports import marker
from tests.support.client import printed
from tests.support.site import Site, eventually

SHOP = ("-P", "solo", "-c", "1")
WRONG = "PETIOLE_RESULT_BACKEND: must be the result backend of the workers, got "
WRONG_IN_SHOP = "result_backend of the app 'shop': must be the result backend of the workers, got "


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A worker of each app, whose results go to database 0. The server has two names."""
    with Site(tmp_path_factory.mktemp("site")) as site:
        site.environment["SHOP_URL"] = site.url
        started = [site.start_worker(*SHOP, app="tests.support.shop"), site.start_worker()]
        for worker in started:
            worker.ready()
        (site.folder / "alias.sock").symlink_to(site.folder / "r.sock")
        marked(site)
        yield site


def marked(site: Site) -> bytes:
    found: list[bytes] = eventually(lambda: site.redis.keys(f"celery-task-meta-{MARKER_PREFIX}*"), "a marker")
    name = found[0].removeprefix(b"celery-task-meta-")
    eventually(lambda: name in b"".join(site.redis.hvals("petiole:workers")), "its name is in the report")
    return name


def named_otherwise(site: Site, database: int) -> str:
    return f"redis+socket://{site.folder / 'alias.sock'}?virtual_host={database}"


def said(site: Site, code: str, **environment: str) -> list[str]:
    """The errors that a producer logs."""
    program = f"""
import logging, sys, threading
from tests.support.shop import *
from celery import chord
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)

def looked():
    for thread in threading.enumerate():
        if thread.name in ("petiole-markers", "petiole-watch"):
            thread.join()

{code}
looked()
"""
    lines = printed(site, "-c", program, **environment).splitlines()
    return [line.removeprefix("ERROR ") for line in lines if line.startswith("ERROR ")]


SUBMIT = "for _ in range(2): generate.delay(prompt='x', max_tokens=1); looked()"
WAIT = """
from celery.exceptions import TimeoutError as GaveUp
try:
    generate.AsyncResult("another-process").get(timeout=4)
except GaveUp:
    pass
"""


@pytest.mark.parametrize("code", [SUBMIT, WAIT])
def test_a_producer_is_told_once(site: Site, code: str) -> None:
    worker = site.workers[1].node
    [line] = said(site, code, PETIOLE_RESULT_BACKEND=named_otherwise(site, 1))
    assert line == f"{WRONG}{named_otherwise(site, 1)}: the results of {worker} are not there"
    assert said(site, code, PETIOLE_RESULT_BACKEND=named_otherwise(site, 0)) == []


def test_the_status_tells(site: Site) -> None:
    command = ("-m", "petiole.tasks.commands.cli", "status")
    for database, wrong in ((0, False), (1, True)):
        setting = {"PETIOLE_RESULT_BACKEND": named_otherwise(site, database)}
        assert (WRONG in printed(site, *command, "--once", **setting)) == wrong
        [worker] = json.loads(printed(site, *command, "--json", **setting))["workers"]
        assert worker["results_elsewhere"] == wrong


@pytest.mark.parametrize(
    "canvas",
    [
        "chord([generate.s(prompt='x', max_tokens=1)])(send_digest.s())",
        "chord([fetch_article.s(1), generate.s(prompt='x', max_tokens=1)])(send_digest.s())",
        "chord([fetch_article.s(1)])(generate.s(prompt='x', max_tokens=1))",
    ],
)
def test_who_submits_a_chord_of_both_apps_is_told_that_it_never_ends(site: Site, canvas: str) -> None:
    for database, wrong in ((0, False), (1, True)):
        settings = json.dumps({"result_backend": named_otherwise(site, database)})
        lines = said(site, canvas, SHOP_SETTINGS=settings)
        assert [line.startswith(WRONG_IN_SHOP) for line in lines] == [True] * wrong


def test_a_marker_that_the_backend_has_lost_comes_again_and_goes_with_its_worker(
    own_site: Site, tmp_path: Path
) -> None:
    worker = own_site.worker()
    name = marked(own_site)
    own_site.redis.delete(f"celery-task-meta-{name.decode()}")
    eventually(lambda: own_site.redis.exists(f"celery-task-meta-{name.decode()}"), "it is stored again")
    assert marked(own_site) == name
    assert own_site.redis.ttl(f"celery-task-meta-{name.decode()}") > marker.AGAIN_S
    worker.stop()
    assert own_site.redis.keys(f"celery-task-meta-{MARKER_PREFIX}*") == []

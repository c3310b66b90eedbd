"""Chains and chords of a team's own app and Petiole's, as anybody would write them: no queue is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from petiole.tasks.app import interop
from tests.support.client import client
from tests.support.fake_engine import expected, word
from tests.support.site import REPOSITORY, Site, eventually

SHOP = ("-P", "solo", "-c", "1")
FIRST = "from tests.support.shop import *; from celery import chain, chord, group"


def text(prompt: str, seed: int, max_tokens: int) -> str:
    return "".join(map(word, expected(prompt, seed, max_tokens)))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A worker of each app, on one Redis."""
    with Site(tmp_path_factory.mktemp("site")) as site:
        site.environment["SHOP_URL"] = site.url
        started = [site.start_worker(*SHOP, app="tests.support.shop"), site.start_worker()]
        for worker in started:
            worker.ready()
        yield site


def run(site: Site, canvas: str, **settings: Any) -> Any:
    """What the canvas gives, submitted by a web app that has both apps."""
    site.environment["SHOP_SETTINGS"] = json.dumps(settings)
    return client(site, f"print(json.dumps({canvas}))", FIRST)


DIGEST = {"texts": [text("Summarize: article 3", 1, 4)]}


@pytest.mark.parametrize(
    "canvas",
    [
        "digest.delay().get(timeout=60)",
        "chain(fetch_article.s(3), generate.s(prompt='Summarize: ', max_tokens=4, seed=1), send_digest.s())"
        ".apply_async().get(timeout=60)",
        "chain(generate.s(prompt='Summarize: article 3', max_tokens=4, seed=1), send_digest.s())"
        ".delay().get(timeout=60)",
        "chord([generate.s(prompt='Summarize: article 3', max_tokens=4, seed=1)])(send_digest.s())"
        ".get(timeout=60)",
        "chord([fetch_article.s(3)])(generate.s(prompt='Summarize: ', max_tokens=4, seed=1) | send_digest.s())"
        ".get(timeout=60)",
    ],
)
def test_a_canvas_of_both_apps(both: Site, canvas: str) -> None:
    assert run(both, canvas) == DIGEST


def test_a_chord_of_both_in_its_header(both: Site) -> None:
    header = "[generate.s(prompt='a', max_tokens=2, seed=1), fetch_article.s(7)]"
    canvas = f"chord({header})(send_digest.s()).get(timeout=60)"
    assert run(both, canvas) == {"texts": [text("a", 1, 2), "article 7"]}


def test_callbacks_of_the_other_app(both: Site) -> None:
    canvas = (
        "[generate.apply_async(kwargs={'prompt': 'hello', 'max_tokens': 2}, link=send_digest.s()).get(timeout=60)"
        "['finish_reason'], fetch_article.apply_async([1], link=generate.s(prompt='linked', max_tokens=3)).id,"
        "app.send_task('tasks.generate', kwargs={'prompt': 'x', 'max_tokens': 0}, queue='petiole',"
        "link_error=note_error.s()).id]"
    )
    reason, _, failing = run(both, canvas)
    assert reason == "length"
    shop, petiole = both.workers
    eventually(lambda: "shop.send_digest" in shop.output, "the callback ran in its own app")
    eventually(lambda: petiole.output.count("tasks.generate") >= 2, "the generation ran in Petiole's")
    eventually(lambda: f"noted {failing}" in shop.output, "the error's callback ran in its own app")


# ------------------------------------------------------------ every canvas, in every order


def wrong(site: Site, *arguments: str) -> dict[str, str]:
    """What `both_apps.py` finds wrong."""
    command = [sys.executable, str(REPOSITORY / "tests" / "support" / "both_apps.py"), *arguments]
    environment = {**os.environ, **site.environment, "SHOP_SETTINGS": "{}", "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found["tried"] > 0
    return found["wrong"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_every_canvas_in_every_order_from_forty_threads(both: Site) -> None:
    assert wrong(both, "threads", "40", "1") == {}


@pytest.mark.slow
def test_the_same_in_forked_processes(both: Site) -> None:
    assert wrong(both, "forked", "3", "8", "11") == {}


ELSEWHERE = """
from tests.support import both_apps
shapes = [("group", "P0", "S1"), ("group", "S0", "P1"), ("group", ("chain", "P0", "P1"), ("chain", "S2", "S3"))]
print(json.dumps([both_apps.attempt(shape) for shape in shapes]))
"""


@pytest.mark.parametrize("settings", [{}, {"result_backend": "1"}])
@pytest.mark.slow
def test_members_of_a_group_go_to_the_broker_of_their_own_app(own_site: Site, settings: dict[str, str]) -> None:
    """Or share a broker, and have a result backend each. Nothing passes from one app to the other."""
    first, second = own_site.url, own_site.url.replace("virtual_host=0", "virtual_host=1")
    own_site.environment["SHOP_URL"] = first if settings else second
    own_site.environment["SHOP_SETTINGS"] = json.dumps(dict.fromkeys(settings, second))
    own_site.start_worker(*SHOP, app="tests.support.shop").ready()
    own_site.worker()
    assert client(own_site, ELSEWHERE, FIRST) == ["", "", ""]


def test_a_group_that_is_not_complete_in_time_raises(both: Site) -> None:
    code = """
from celery.exceptions import TimeoutError as GaveUp
late = generate.s(prompt="x", max_tokens=1).set(queue="nobodys")
for members in ([late, note.s(label=1)], [note.s(label=1), late]):
    try:
        print(group(members)().get(timeout=0.5))
    except GaveUp:
        continue
print("[]")
"""
    assert client(both, code, FIRST) == []


def test_the_failure_of_a_member_is_raised(both: Site) -> None:
    code = """
failing = [generate.s(prompt=[1] * 100_000, max_tokens=1), generate.s(prompt="x", max_tokens=1)]
said = []
for members in ([note.s(label=1), *failing], [*failing, note.s(label=1)]):
    try:
        group(members)().get(timeout=60)
    except InvalidRequest as error:
        said.append(error.field)
    results = group(members)().get(timeout=60, propagate=False)
    said.append([type(one).__name__ for one in results])
print(json.dumps(said))
"""
    kinds = [["str", "InvalidRequest", "dict"], ["InvalidRequest", "dict", "str"]]
    assert client(both, code, FIRST) == ["prompt", kinds[0], "prompt", kinds[1]]


# ------------------------------------------------------------ in the threads of a web server

THREAD = """
import threading
said = []
def thread():
    {body}
one = threading.Thread(target=thread)
one.start()
one.join()
print(json.dumps(said))
"""


@pytest.mark.slow
def test_a_thread_knows_the_routes_of_the_users_app(own_site: Site) -> None:
    own_site.environment["SHOP_URL"] = own_site.url
    own_site.environment["SHOP_SETTINGS"] = json.dumps({"task_routes": {"tasks.generate": {"queue": "gpu-a"}}})
    body = (
        "linked = fetch_article.s(1) | generate.s(prompt='x'); linked.freeze();"
        "said.append(linked.tasks[1].options['queue'])"
    )
    assert client(own_site, THREAD.format(body=body), FIRST) == ["gpu-a"]


@pytest.mark.slow
def test_a_thread_reports_no_mistake_where_there_is_none(own_site: Site) -> None:
    own_site.environment["SHOP_URL"] = own_site.url
    body = "(fetch_article.s(1) | generate.s(prompt='x')).delay(); said.extend(interop._reported)"
    assert client(own_site, "from petiole.tasks.app import interop\n" + THREAD.format(body=body), FIRST) == []


# ------------------------------------------------------------ which queue


def queue_of(site: Site, canvas: str, **settings: Any) -> str:
    """Where the generation behind an article goes, in a shop whose worker has sent it."""
    worker = site.worker(*SHOP, app="tests.support.shop", SHOP_SETTINGS=json.dumps(settings))
    try:
        run(site, f"({canvas}).apply_async().id", **settings)
        queues = ("petiole", "petiole.acme", "gpu-a", "mine", "celery")
        waiting: list[str] = eventually(lambda: [queue for queue in queues if site.redis.llen(queue)], "it waits")
        assert len(waiting) == 1
        site.redis.delete(*waiting)
        return waiting[0]
    finally:
        worker.kill()


@pytest.fixture
def shop(own_site: Site) -> Site:
    own_site.environment |= {"SHOP_URL": own_site.url, "PETIOLE_TENANT_WEIGHTS": "acme=1"}
    return own_site


@pytest.mark.slow
def test_which_queue_a_linked_generation_goes_to(shop: Site) -> None:
    linked = "fetch_article.s(1) | generate.s(prompt='x')"
    by_name = {"task_routes": {"tasks.generate": {"queue": "gpu-a"}}}
    assert queue_of(shop, linked) == "petiole"
    assert queue_of(shop, f"{linked}.set(headers={{'tenant': 'acme'}})") == "petiole.acme"
    assert queue_of(shop, f"{linked}.set(queue='mine', headers={{'tenant': 'acme'}})") == "mine"
    assert queue_of(shop, linked, **by_name) == "gpu-a"
    assert queue_of(shop, f"{linked}.set(queue='mine')", **by_name) == "mine"
    assert queue_of(shop, linked, task_routes={"tasks.*": {"queue": "celery"}}) == "petiole"


def test_a_task_of_petioles_app_stays_on_its_queue_and_others_go_where_the_setting_says(own_site: Site) -> None:
    site = own_site
    site.environment["SHOP_URL"] = site.url
    site.worker("-I", "tests.support.foreign_tasks", PETIOLE_LINKED_QUEUE="shop")
    header = site.signature("hello", max_tokens=1)
    known = header | site.app.signature("foreign.add", args=(2, 3), immutable=True)
    assert site.get(known.apply_async()) == 5
    site.get((site.signature("hello", max_tokens=1) | site.app.signature("shop.send_digest")).apply_async().parent)
    eventually(lambda: site.redis.llen("shop") == 1, "it is the other app's")


def test_signatures_at_the_top_of_a_module_read_no_setting_and_connect_to_nothing(tmp_path: Path) -> None:
    code = """
from petiole.tasks import chat, generate
from petiole.tasks.app.application import app
generate.s(prompt="x") | chat.s(messages=[]).set(headers={"tenant": "acme"}) | generate.si(prompt="y")
assert not app.is_configured
"""
    environment = {**os.environ, "PETIOLE_BROKER_URL": "nonsense", "PETIOLE_TENANT_WEIGHTS": "nonsense"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# ------------------------------------------------------------ what both apps must have in common

SUBMITTED_BY_PETIOLE = "chord([generate.s(prompt='x')])(send_digest.s())"
SUBMITTED_BY_THE_SHOP = "(fetch_article.s(1) | generate.s(prompt='x')).delay()"
CHORD_OF_THE_SHOP = "chord([fetch_article.s(1)])(generate.s(prompt='x'))"


def said(site: Site, canvas: str, shop_url: str, **settings: Any) -> str:
    """What a web app is told when it submits this."""
    code = f"""
import logging
logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
logging.getLogger("kombu").disabled = logging.getLogger("celery").disabled = True
app.conf.task_publish_retry = False
try:
    {canvas}
except Exception as error:
    print(type(error).__name__, error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; {FIRST}\n{code}"],
        env={
            **os.environ,
            **site.environment,
            "SHOP_URL": shop_url,
            "SHOP_SETTINGS": json.dumps(settings),
            "PYTHONPATH": str(REPOSITORY),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
def test_an_error_says_what_to_set(own_site: Site) -> None:
    url = own_site.url
    other_database = url.replace("virtual_host=0", "virtual_host=1")
    backend = {"result_backend": other_database}
    broker = "PETIOLE_BROKER_URL: must be the broker of the app 'shop'"
    assert said(own_site, SUBMITTED_BY_PETIOLE, other_database).startswith(f"InvalidSettings {broker}")
    assert f"ERROR a generation of this chain or chord will not run: {broker}" in said(
        own_site, SUBMITTED_BY_THE_SHOP, other_database
    )
    results = "PETIOLE_RESULT_BACKEND: must be the result backend of the app 'shop'"
    assert said(own_site, SUBMITTED_BY_PETIOLE, url, **backend).startswith(f"InvalidSettings {results}")
    assert results in said(own_site, CHORD_OF_THE_SHOP, url, **backend)
    assert said(own_site, SUBMITTED_BY_THE_SHOP, url, **backend) == ""
    assert said(own_site, SUBMITTED_BY_THE_SHOP, url) == said(own_site, CHORD_OF_THE_SHOP, url) == ""


@pytest.mark.parametrize("is_chord", [False, True])
@pytest.mark.parametrize("transport", ["broker_transport_options", "result_backend_transport_options"])
def test_an_error_says_which_prefix_differs(transport: str, is_chord: bool) -> None:
    one, other = (
        Celery(name, broker="redis://redis", backend="redis://redis", set_as_current=False) for name in "ab"
    )
    assert list(interop._different(one, other, is_chord)) == []
    other.conf[transport] = {"global_keyprefix": "portal-"}
    whose = "of the app 'b', 'portal-', whose tasks are in one chain or chord with a generation"
    matters = is_chord or transport == "broker_transport_options"
    found = list(interop._different(one, other, is_chord))
    assert found == [f"global_keyprefix of {transport}: must be that {whose}, got ''"] * matters
    assert (interop._lists(one) != interop._lists(other)) == (transport == "broker_transport_options")


@pytest.mark.slow
def test_queues_that_the_app_would_not_declare_or_not_so(own_site: Site) -> None:
    missing = said(
        own_site, SUBMITTED_BY_THE_SHOP, own_site.url, task_create_missing_queues=False, task_queues={"celery": {}}
    )
    assert (
        "task_create_missing_queues of the app 'shop': must be True, or task_queues must have 'petiole'" in missing
    )
    own_site.environment |= {"PETIOLE_BROKER_URL": "amqp://127.0.0.1:1//", "PETIOLE_REDIS_URL": own_site.url}
    quorum = {"task_create_missing_queue_type": "quorum", "task_create_missing_queue_exchange_type": "topic"}
    there_and_back = "(generate.s(prompt='x') | fetch_article.si(1) | generate.s(prompt='y')).delay()"
    for canvas in (SUBMITTED_BY_THE_SHOP, there_and_back):
        said_of = [
            said(own_site, canvas, "amqp://127.0.0.1:1//", result_backend=own_site.url, **settings)
            for settings in ({}, quorum)
        ]
        assert ["task_create_missing_queue_type of the app 'shop'" in one for one in said_of] == [True, False]


@pytest.mark.parametrize(
    ("one", "other", "elsewhere"),
    [
        ("redis://localhost:6379/0", "redis://127.0.0.1", False),
        ("redis://localhost", "rediss://user:secret@localhost:6379/", False),
        ("redis://redis/0", "redis://10.0.0.3/0", False),  # may be the same
        ("redis://redis/0", "redis://redis/1", True),
        ("redis://redis:6379", "redis://redis:6380", True),
        ("redis://redis/0", "amqp://rabbit//", True),
        ("redis+socket:///a?virtual_host=0", "redis+socket:///a", False),
        ("amqp://localhost//", "pyamqp://127.0.0.1:5672", False),
    ],
)
def test_whether_two_urls_name_the_same_place(one: str, other: str, elsewhere: bool) -> None:
    assert interop._elsewhere(one, other) == elsewhere

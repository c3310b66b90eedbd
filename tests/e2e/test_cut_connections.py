"""A connection is cut before or after any command of a completion: what follows the end of a task happens once.

The commands are counted in the worker (`tests/support/cutting.py`), so these tests know none of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from celery import chord
from celery.result import AsyncResult

from petiole.tasks.app.application import BACKENDS, App
from petiole.tasks.app.configuration import configuration
from petiole.tasks.settings import Settings
from tests.support.fake_engine import expected
from tests.support.proxy import Proxy
from tests.support.rabbitmq import INSTALLED, RabbitServer, free_port
from tests.support.site import RedisServer, Site, Worker, eventually

CUTTING = "tests.support.cutting:CuttingEngine"


class Submitted(NamedTuple):
    """A task whose completion is cut, what must be noted once, and how it all ends."""

    task: AsyncResult
    notes: list[str]
    verify: Callable[[], object]


NOTES = "petiole.notes"


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitServer]:
    server = RabbitServer(tmp_path_factory.mktemp("rabbit"))
    yield server
    server.close()


@pytest.fixture(
    params=["redis", pytest.param("rabbitmq", marks=pytest.mark.skipif(not INSTALLED, reason="missing"))]
)
def site(own_site: Site, request: pytest.FixtureRequest) -> Site:
    site = own_site
    if request.param == "rabbitmq":
        server = request.getfixturevalue("rabbitmq")
        site.environment |= {"PETIOLE_BROKER_URL": server.url, "PETIOLE_REDIS_URL": site.url}
        site.app = App("petiole", set_as_current=False)
        site.app.conf.update(configuration(Settings(broker_url=server.url, redis_url=site.url)))
    with_notes(site)
    return site


def with_notes(site: Site) -> Worker:
    """Start a worker whose connections are cut, and another one for the tasks that note that they run."""
    cut = site.start_worker(PETIOLE_ENGINE_FACTORY=CUTTING)
    site.start_worker("-Q", NOTES, "-I", "tests.support.foreign_tasks")
    for worker in site.workers:
        worker.ready()
    return cut


def note(site: Site, name: str) -> Any:
    return site.app.signature("foreign.note", kwargs={"name": name}, options={"queue": NOTES})


def right(site: Site, task: AsyncResult, prompt: str, tokens: int) -> None:
    assert site.get(task)["token_ids"] == expected(prompt, 1, tokens)


def plain(site: Site, prompt: str) -> Submitted:
    task = site.generate(prompt, max_tokens=3, seed=1)
    return Submitted(task, [], lambda: right(site, task, prompt, 3))


def linked(site: Site, prompt: str) -> Submitted:
    """With two callbacks, without ids of their own, and a next step."""
    names = [f"{prompt} {what}" for what in ("first", "second", "next")]
    first, second, after = (note(site, name) for name in names)
    one = site.signature(prompt, max_tokens=3, seed=1).on_error(note(site, "none"))
    for callback in (first, second):
        one.link(callback)
    last = (one | after).apply_async()
    return Submitted(last.parent, names, lambda: (right(site, last.parent, prompt, 3), site.get(last)))


def last_of_chord(site: Site, prompt: str) -> Submitted:
    return in_chord(site, prompt, 40, 2)


def first_of_chord(site: Site, prompt: str) -> Submitted:
    return in_chord(site, prompt, 2, 80)


def in_chord(site: Site, prompt: str, tokens: int, others: int) -> Submitted:
    name = f"{prompt} body"
    header = [
        site.signature(prompt, max_tokens=tokens, seed=1),
        site.signature("other", max_tokens=others, seed=1),
        note(site, f"{prompt} header").clone(args=(0,)),
    ]
    body = chord(header, app=site.app)(note(site, name))
    task = body.parent.results[0]
    notes = [name, f"{prompt} header"]
    return Submitted(task, notes, lambda: (right(site, task, prompt, tokens), site.get(body)))


def failing_in_chord(site: Site, prompt: str) -> Submitted:
    body = note(site, "none").on_error(note(site, f"{prompt} chord fails"))
    failing = site.signature(prompt, max_tokens=-1).on_error(note(site, f"{prompt} fails"))
    # The other worker's: this one stands still at a command, maybe before it has acknowledged another task.
    other = note(site, f"{prompt} other").clone(args=(0,))
    result = chord([failing, other], app=site.app)(body)

    def verify() -> None:
        with pytest.raises(Exception, match="max_tokens"):
            site.get(result.parent.results[0])
        with pytest.raises(Exception, match=r"Dependency .*max_tokens"):
            site.get(site.app.AsyncResult(result.id))

    notes = [f"{prompt} {what}" for what in ("other", "fails", "chord fails")]
    return Submitted(result.parent.results[0], notes, verify)


def timed_out(site: Site, prompt: str) -> Submitted:
    """Celery reports it on the thread of the consumer."""
    submission = {"time_limit": 0.05, "link_error": note(site, f"{prompt} late")}
    task = site.generate(prompt, max_tokens=4000, submission=submission)

    def verify() -> None:
        with pytest.raises(Exception, match="TimeLimitExceeded"):
            site.get(task)

    return Submitted(task, [f"{prompt} late"], verify)


def ignored(site: Site, prompt: str) -> Submitted:
    submission = {"ignore_result": True, "link": note(site, f"{prompt} ignored")}
    task = site.generate(prompt, max_tokens=3, submission=submission)
    return Submitted(task, [f"{prompt} ignored"], lambda: None)


KINDS = [plain, linked, last_of_chord, first_of_chord, failing_in_chord, timed_out, ignored]


@pytest.mark.parametrize("submit", KINDS, ids=lambda submit: submit.__name__)
def test_wherever_the_connection_is_cut(site: Site, submit: Callable[[Site, str], Submitted]) -> None:
    completed(site, submit(site, "never cut"))
    for when in ("before", "after"):
        for n in count(1):
            case = submit(site, f"{when} {n} of them")
            completed(site, case, unconfirmed=when == "after" and site.app.conf.broker_url != site.url)
            if f"cut {when} {n} of {case.task.id}" not in site.workers[0].output:
                break
        assert n > 2
    assert noted(site, "none") == 0


@pytest.mark.parametrize("submit", [linked, last_of_chord, failing_in_chord], ids=lambda submit: submit.__name__)
def test_whenever_redis_fails_over(tmp_path: Path, submit: Callable[[Site, str], Submitted]) -> None:
    """The address moves to the replica. The old master becomes one, refuses writes, and keeps its connections."""
    ports = [free_port(), free_port()]
    (tmp_path / "replica").mkdir()
    with Site(tmp_path, options=("--port", str(ports[0])), CUTTING_FOLDER=tmp_path) as site:
        replica = RedisServer(
            tmp_path / "replica", "--port", str(ports[1]), "--replicaof", "127.0.0.1", str(ports[0])
        )
        address = Proxy(tmp_path / "p.sock", site.server.socket)
        site.use(address.url)
        site.app.loader.override_backends = BACKENDS
        worker = with_notes(site)
        servers = [redis.Redis(unix_socket_path=str(one.socket)) for one in (site.server, replica)]
        completed(site, submit(site, "never cut"))
        for n in count(1):
            case = submit(site, f"failover {n} of them")
            met, done = f"cut failover {n} of {case.task.id}", f"completed {case.task.id}"
            eventually(lambda met=met, done=done: met in worker.output or done in worker.output, "it is there")
            if met not in worker.output:
                break
            master, promoted = servers[(n + 1) % 2], servers[n % 2]
            eventually(lambda: site.unfinished(NOTES) == 1, "no other task is at work: its writes would be lost")
            in_step(master, promoted)
            promoted.replicaof("NO", "ONE")
            address.upstream = [site.server, replica][n % 2].socket
            master.replicaof("127.0.0.1", ports[n % 2])
            (tmp_path / case.task.id).touch()
            completed(site, case)
        assert n > 3
        replica.kill()


def in_step(master: redis.Redis, replica: redis.Redis) -> None:
    eventually(lambda: replica.info("replication")["master_link_status"] == "up", "linked")
    offset = master.info("replication")["master_repl_offset"]
    eventually(lambda: replica.info("replication")["slave_repl_offset"] >= offset, "in step")


def completed(site: Site, case: Submitted, *, unconfirmed: bool = False) -> None:
    """`unconfirmed`: RabbitMQ may have a message without the worker's knowing."""
    case.verify()
    eventually(lambda: f"completed {case.task.id}" in site.workers[0].output, "completed")
    eventually(lambda: site.unfinished(NOTES) == 0, "acknowledged")
    for name in case.notes:
        eventually(lambda name=name: noted(site, name), name)  # `unfinished` does not see RabbitMQ's queues
        assert noted(site, name) == 1 or (unconfirmed and noted(site, name) == 2), name


def noted(site: Site, name: str) -> int:
    return int(site.redis.get(f"noted:{name}") or 0)

"""What web servers do to a producer: many threads or greenlets, and forks after the app is loaded."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from billiard import util
from celery.result import GroupResult

from petiole.tasks import Unavailable
from petiole.tasks.app import result_consumer
from petiole.tasks.app.application import make_app
from petiole.tasks.fleet import control
from petiole.tasks.settings import settings
from tests.support.client import client
from tests.support.fake_engine import expected
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), PETIOLE_MAX_NUM_SEQS=32) as site:
        site.worker()
        yield site


@pytest.fixture
def app(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
    settings.cache_clear()
    app = make_app()
    yield app
    app.close()
    settings.cache_clear()


@pytest.fixture
def consumer(app: Any) -> Any:
    return app.backend.result_consumer


@pytest.fixture
def fork(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process what a forked child is: the same, with another id."""
    process = os.getpid()
    return lambda: monkeypatch.setattr(os, "getpid", lambda: process + 1)


# ---------------------------------------------------------------- threads and greenlets

REQUESTS = """
import threading

answers, backends = [], {}

def request(n):
    answers.append(generate.delay(prompt="hello", max_tokens=2, seed=n).get(timeout=60)["finish_reason"])
    backends[id(generate.app.backend)] = generate.app.backend

def serve(numbers):
    threads = [threading.Thread(target=request, args=(n,)) for n in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_all_threads_wait_for_results_with_one_backend(site: Site) -> None:
    code = REQUESTS + "serve(range(20))\nprint(json.dumps([answers, len(backends)]))"
    assert client(site, code) == [["length"] * 20, 1]


def test_with_gevent_no_request_leaves_a_greenlet_or_a_connection(site: Site) -> None:
    pytest.importorskip("gevent")
    code = f"""
import gc, gevent, os
{REQUESTS}
def left():
    gc.collect()
    alive = [one for one in gc.get_objects() if isinstance(one, gevent.Greenlet) and not one.dead]
    gevent.joinall(alive, timeout=30)  # one whose thread was joined may have a turn to go
    alive = [one for one in alive if not one.dead]
    return [len(alive), len(os.listdir("/proc/self/fd"))]
serve(range(1))
before = left()
for n in range(10):
    serve([n])
grown = [max(0, now - then) for now, then in zip(left(), before)]
serve(range(20))
print(json.dumps([len(answers), left()[0], grown]))
"""
    assert client(site, code, "from gevent import monkey; monkey.patch_all()") == [31, 0, [0, 0]]


def test_more_threads_than_redis_py_has_connections_by_default(app: Any) -> None:
    pool = app.backend.client.connection_pool
    held = [pool.get_connection() for _ in range(120)]
    for connection in held:
        pool.release(connection)
    pool.disconnect()


def test_one_thread_reconnects_for_all_that_wait(consumer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def in_vain() -> None:
        attempts.append(1)
        raise redis.ConnectionError("refused")

    monkeypatch.setattr(consumer, "_reconnect", in_vain)
    for _ in range(5):
        with pytest.raises(Unavailable), consumer.reconnect_on_error():
            raise redis.ConnectionError("closed")
    assert len(attempts) == 1
    consumer._failed_at -= result_consumer.FAILED_FOR_ALL_S
    with pytest.raises(Unavailable), consumer.reconnect_on_error():
        raise redis.ConnectionError("closed")
    assert len(attempts) == 2


def test_a_result_whose_message_was_missed_is_found_although_others_are_heard(app: Any, consumer: Any) -> None:
    result = app.AsyncResult("missed")
    app.backend.add_pending_result(result)
    stored = app.backend._get_result_meta({"text": "hello"}, "SUCCESS", None, None)
    app.backend.client.set(
        app.backend.get_key_for_task("missed"), app.backend.encode({**stored, "task_id": "missed"})
    )
    consumer._received = True
    consumer._poll_results()
    assert result._cache["status"] == "SUCCESS"


def test_on_message_hears_of_its_own_results_whoever_else_waits(site: Site, app: Any, consumer: Any) -> None:
    heard: list[str] = []
    first, second = (
        app.send_task("tasks.generate", kwargs={"prompt": "hello", "max_tokens": tokens}) for tokens in (20, 60)
    )
    app.backend.add_pending_result(first)
    waiting = consumer._wait_for_pending(first, on_message=lambda meta: heard.append(meta["task_id"]), timeout=60)
    next(waiting, None)
    second.get(timeout=60)
    list(waiting)
    assert set(heard) == {first.id}
    assert set(result_consumer.nodes(GroupResult("g", [first, GroupResult("h", [second])]))) == {first, second}
    assert consumer._listeners == []


def test_a_result_that_another_thread_receives_as_a_group_begins_to_wait(
    app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, members = app.backend, [app.AsyncResult(name) for name in ("first", "second")]
    waiting = GroupResult("g", members, app=app)
    collect = backend._collect_into

    def received_before(node: Any, bucket: Any) -> None:
        meta = backend._get_result_meta({"text": node.id}, "SUCCESS", None, None) | {"task_id": node.id}
        backend.result_consumer.on_state_change(meta, None)
        collect(node, bucket)

    monkeypatch.setattr(backend, "_collect_into", received_before)
    assert waiting.get(timeout=10) == [{"text": "first"}, {"text": "second"}]


def test_as_many_connect_to_the_broker_at_once_as_a_web_server_has_threads(app: Any) -> None:
    held = [app.pool.acquire() for _ in range(64)]
    for connection in held:
        connection.release()


def test_a_command_is_sent_with_the_last_connection_of_the_pool(app: Any) -> None:
    """As many callers as the pool has connections, each in need of two, would wait for ever."""
    held = [app.pool.acquire(block=True) for _ in range(app.pool.limit - 1)]
    cancelling = threading.Thread(target=control.cancel, args=("nobody", app), daemon=True)
    cancelling.start()
    try:
        eventually(lambda: not cancelling.is_alive(), "the command is sent", 20)
    finally:
        for connection in held:
            connection.release()


# ---------------------------------------------------------------- forks


@pytest.mark.parametrize("first", ["pool", "producer_pool"])
def test_a_child_has_connections_of_its_own_and_leaves_the_parents_alone(app: Any, fork: Any, first: str) -> None:
    app.send_task("tasks.generate", kwargs={"prompt": "hello", "max_tokens": 1})
    parents = [app.pool, app.producer_pool]
    connection = parents[0].acquire(block=True)
    connection.release()
    known = [weakref.ref(pool) for pool in parents]
    fork()
    assert all(getattr(app, first) is not pool for pool in parents)
    assert app.pool is not parents[0]
    assert app.producer_pool is not parents[1]
    assert app.producer_pool.connections is app.pool
    with app.pool.acquire(block=True) as own:
        assert own is not connection
    del parents
    gc.collect()
    assert all(ref() is not None for ref in known)  # not collected, which would close them for the parent


def test_a_fork_of_billiards_closes_nothing_of_its_parents(app: Any) -> None:
    """What billiard calls in a child of Celery's prefork pool."""
    with app.pool.acquire(block=True) as connection:
        connection.ensure_connection()
    util._run_after_forkers()
    with app.pool.acquire(block=True) as connection:
        assert connection.connected


def test_a_result_that_a_child_drops_is_still_its_parents(consumer: Any, fork: Any) -> None:
    """Nor does that make the child's locks: gevent may replace them after it."""
    consumer.consume_from("a")
    parents, lock = consumer._pubsub, consumer._pubsub_lock
    fork()
    consumer.cancel_for("a")
    assert set(parents.channels) == {b"celery-task-meta-a"}
    assert parents.pending_unsubscribe_channels == set()
    assert consumer._pubsub_lock is lock
    consumer.consume_from("b")
    assert consumer._pubsub_lock is not lock
    assert set(consumer._pubsub.channels) == {b"celery-task-meta-b"}


FORK = """
import os

reader = generate.stream(prompt="hello", max_tokens=200, seed=1, cancel_on_disconnect=True)
tokens = list(next(reader).token_ids)

def child(run):
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(run())
        finally:
            os._exit(99)
    return pid

def rest():
    return tokens + [token for delta in reader for token in delta.token_ids]
"""


def test_a_stream_that_a_child_drops_goes_on_for_its_parent(site: Site) -> None:
    code = f"""{FORK}
pid = child(lambda: reader.close() or 0)
status = os.waitpid(pid, 0)[1]
print(json.dumps([status, rest()]))
"""
    assert client(site, code) == [0, expected("hello", 1, 200)]


def test_parent_and_child_both_read_the_whole_stream(site: Site) -> None:
    code = f"""{FORK}
held, wanted = reader._pubsub, {expected("hello", 1, 200)}

def read_in_child():
    return 0 if rest() == wanted and reader._pubsub is not held else 1  # some came before the fork

pid = child(read_in_child)
read = rest()
print(json.dumps([os.waitpid(pid, 0)[1], read]))
"""
    assert client(site, code) == [0, expected("hello", 1, 200)]

"""Petiole's connections beside those of another app, whose limit is kombu's limit for the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.client import client
from tests.support.site import Site

pytestmark = pytest.mark.e2e

BOTH = """
import threading
from celery import Celery, chord
from kombu import pools

def shop(limit):
    app = Celery("shop", broker=URL, backend=URL, set_as_current=False)
    app.conf.broker_pool_limit = limit
    @app.task(name="shop.count", shared=False)
    def count(text):
        return len(text)

    return count

def submit(*tasks):
    errors = []
    def one(task):
        try:
            task()
        except Exception as error:
            errors.append(repr(error))
    threads = [threading.Thread(target=one, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors

def ask():
    generate.delay(prompt="x", max_tokens=1)

def by_each_other(limit):
    count = shop(limit)
    errors = submit(*[ask, lambda: count.delay("ab")] * 20)
    errors += submit(lambda: chord([generate.s(prompt="x", max_tokens=1), count.s("ab")])(count.s()))
    return [errors, pools.get_limit(), generate.app.pool.limit]
"""


def test_neither_app_sets_the_limit_of_the_other(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        code = f"URL = {site.url!r}\n{BOTH}\nprint(json.dumps([by_each_other(n) for n in (10, 2, 1, None, 200)]))"
        assert client(site, code) == [[[], limit or 0, 64] for limit in (10, 2, 1, None, 200)]


def test_petioles_own_limit_is_kept(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        code = f"""URL = {site.url!r}
{BOTH}
generate.app.conf.broker_pool_limit = 3
print(json.dumps([submit(*[ask] * 20), by_each_other(10)]))"""
        assert client(site, code) == [[], [[], 10, 3]]


HELD = """
from celery import Celery

shop = Celery("shop", broker=URL, set_as_current=False)
held = {"visibility_timeout": 12 * 3600}
with shop.connection(transport_options=held) as connection, connection.SimpleQueue("celery") as queue:
    queue.put("a task of ten hours")
    queue.get(timeout=30)
    with connection.channel().conn_or_acquire() as redis:
        tags = redis.zrange("unacked_index", 0, -1)
        redis.zadd("unacked_index", dict.fromkeys(tags, time.time() - 2 * 3600))
        generate.app.control.ping(timeout=0.1)
        print(json.dumps([redis.hlen("unacked"), redis.llen("celery")]))
"""


def test_a_command_gives_back_nothing_that_a_worker_of_the_other_app_holds(tmp_path: Path) -> None:
    """The other app lets its workers hold a message for twelve hours; Celery's default is one."""
    with Site(tmp_path) as site:
        assert client(site, f"import time\nURL = {site.url!r}\n{HELD}") == [1, 0]

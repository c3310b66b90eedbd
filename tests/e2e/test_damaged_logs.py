"""Keys of a task that somebody else has written into: it fails, and says why; no other notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery.result import AsyncResult

from petiole.tasks.errors import GenerationFailed
from petiole.tasks.wire.keys import stream_keys
from tests.support.fake_engine import expected
from tests.support.site import Site, eventually

LONG = 1500
GARBAGE = '{"index": 7'


def test_a_task_whose_log_cannot_be_read_fails_when_it_is_resumed(own_site: Site) -> None:
    site = own_site
    first = site.worker()
    result = site.generate("resumed", max_tokens=LONG, seed=1)
    site.streaming(result, 5)
    first.kill()
    written = site.tokens(result)
    site.redis.rpush(stream_keys(result.id).log, GARBAGE)
    second = site.worker()
    with pytest.raises(GenerationFailed, match=f"its log cannot be read after {len(written)} tokens"):
        site.get(result, 30)
    *_, last = site.redis.lrange(stream_keys(result.id).log, 0, -1)
    assert f'"index":{len(written)},"token_ids":[],"text":"","finish_reason":"error"' in last.decode()
    eventually(lambda: site.unfinished() == 0, "it is acknowledged")
    assert second.output.count(f"[{result.id}] received") == 1


@pytest.mark.usefixtures("worker")
def test_a_log_that_is_damaged_while_it_is_written_holds_up_no_other(site: Site) -> None:
    results = [site.generate(f"r{i}", max_tokens=LONG, seed=i) for i in range(3)]
    for result in results:
        site.streaming(result)
    site.redis.rpush(stream_keys(results[1].id).log, GARBAGE)
    with pytest.raises(GenerationFailed, match=r"its log cannot be read after \d+ tokens"):
        site.get(results[1], 30)
    for i in (0, 2):
        assert site.get(results[i])["token_ids"] == expected(f"r{i}", i, LONG) == site.tokens(results[i])
    eventually(lambda: site.unfinished() == 0, "all are acknowledged")


def as_somebody(key: Callable[[str], str], **hash_fields: Any) -> Callable[[Site, str], Any]:
    """A damage: the key has these fields, or is a string."""

    def damage(site: Site, task_id: str) -> None:
        if hash_fields:
            site.redis.hset(key(task_id), mapping=hash_fields)
        else:
            site.redis.set(key(task_id), "somebody's", ex=600)

    return damage


def log(task_id: str) -> str:
    return stream_keys(task_id).log


def state(task_id: str) -> str:
    return stream_keys(task_id).state


def fails_alone(site: Site, damaged: AsyncResult, message: str, others: list[AsyncResult]) -> None:
    with pytest.raises(GenerationFailed, match=message):
        site.get(damaged, 30)
    for i, result in enumerate(others):
        assert site.get(result)["token_ids"] == expected(f"r{i}", i, LONG) == site.tokens(result)
    eventually(lambda: site.unfinished() == 0, "all are acknowledged")
    assert all(worker.alive() for worker in site.workers)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("ignore_result", [False, True])
@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("log", as_somebody(log), "its stream in Redis is damaged: .*:log must be a list"),
        ("state", as_somebody(state), "its stream in Redis is damaged"),
        ("attempt", as_somebody(state, attempt="x"), "its stream in Redis is damaged"),
        ("record", as_somebody(state, attempt=1, done="x"), "the record of its end in Redis cannot be read"),
    ],
)
def test_a_task_whose_keys_are_damaged_before_it_begins_fails_alone(
    site: Site, name: str, damage: Callable[[Site, str], Any], message: str, ignore_result: bool
) -> None:
    task_id = f"damaged-{name}-{ignore_result}"
    damage(site, task_id)
    submission = {"task_id": task_id, "ignore_result": ignore_result}
    first = site.generate("r0", max_tokens=LONG, seed=0)
    damaged = site.generate("damaged", max_tokens=5, submission=submission)
    others = [first, site.generate("r1", max_tokens=LONG, seed=1)]
    if ignore_result:
        eventually(lambda: site.unfinished() == 0, "all are acknowledged")
        assert len(site.tokens(others[1])) == LONG
    else:
        fails_alone(site, damaged, message, others)


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize(
    ("key", "damage"),
    [(log, as_somebody(log)), (state, as_somebody(state)), (state, as_somebody(state, attempt="x"))],
)
def test_a_task_whose_keys_are_damaged_while_it_runs_fails_alone(
    site: Site, key: Callable[[str], str], damage: Callable[[Site, str], Any]
) -> None:
    results = [site.generate(f"r{i}", max_tokens=LONG, seed=i) for i in range(3)]
    for result in results:
        site.streaming(result)
    damage(site, results[2].id)
    fails_alone(site, results[2], "its stream in Redis is damaged", results[:2])
    site.redis.expire(key(results[2].id), 600)

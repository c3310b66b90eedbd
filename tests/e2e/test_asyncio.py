"""Submitting, waiting and reading as asyncio programs do; what a submission takes beside the task's options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client import client
from tests.support.fake_engine import expected
from tests.support.site import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Site(tmp_path_factory.mktemp("site"), PETIOLE_MAX_NUM_SEQS=32) as site:
        site.worker("-Q", "petiole,other")
        yield site


def test_submit_wait_and_read(site: Site) -> None:
    code = """
async def main():
    result = await generate.adelay(prompt="hello", max_tokens=20, seed=1)
    tokens = [token async for delta in generate.astream(prompt="hello", max_tokens=20, seed=1)
              for token in delta.token_ids]
    again = await generate.AsyncResult(result.id).aget(timeout=60)
    return [(await result.aget(timeout=60))["token_ids"], tokens, again["token_ids"], result.submitted_to]

print(json.dumps(asyncio.run(main())))
"""
    tokens = expected("hello", 1, 20)
    assert client(site, code) == [tokens, tokens, tokens, "petiole"]


def test_many_wait_at_once_and_take_no_thread_each(site: Site) -> None:
    """More than asyncio's pool has threads: one that has begun later and ends sooner is not behind them."""
    code = """
import time

async def main():
    slow = [await generate.adelay(prompt=f"s{n}", max_tokens=4000) for n in range(20)]
    waiting = [asyncio.create_task(result.aget()) for result in slow for _ in range(3)]
    quick = await generate.adelay(prompt="quick", max_tokens=2, queue="other")
    reason = (await quick.aget())["finish_reason"]
    unfinished = sum(not task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    for result in slow:
        await asyncio.to_thread(cancel, result)
    return [reason, unfinished]

print(json.dumps(asyncio.run(main())))
"""
    assert client(site, code) == ["length", 60]


def test_what_goes_wrong_is_the_error_of_get(site: Site) -> None:
    code = """
from celery.exceptions import TaskRevokedError, TimeoutError as GaveUp

async def error(awaitable):
    try:
        await awaitable
    except Exception as error:
        return type(error).__name__

async def main():
    failing = celery_app.send_task("tasks.generate", kwargs={"prompt": "hello", "max_tokens": 0})
    revoked = await generate.adelay(prompt="x", max_tokens=4000)
    async for _ in astream(revoked):
        break
    await asyncio.to_thread(cancel, revoked)
    late = await generate.adelay(prompt="x", queue="nobodys")
    return [
        await error(generate.adelay(prompt="hello", max_tokens=0)),
        await error(failing.aget(timeout=60)),
        type(await failing.aget(timeout=60, propagate=False)).__name__,
        await error(revoked.aget(timeout=60)),
        await error(late.aget(timeout=0.2)),
        await error(generate.adelay(prompt="x", queue="nobodys", require_worker=True)),
    ]

print(json.dumps(asyncio.run(main())))
"""
    assert client(site, code) == [
        "InvalidRequest",
        "InvalidRequest",
        "InvalidRequest",
        "TaskRevokedError",
        "TimeoutError",
        "NoWorker",
    ]


def test_a_submission_takes_its_options_beside_the_tasks(site: Site) -> None:
    code = """
import time

async def main():
    began = time.monotonic()
    submission = dict(countdown=1.0, priority=3, headers={"who": "me"}, task_id="mine")
    later = generate.delay(prompt="x", max_tokens=2, **submission)
    await later.aget(timeout=60)
    waited = time.monotonic() - began >= 1.0
    with generate.stream(prompt="x", max_tokens=2, queue="other", timeout_s=60) as deltas:
        queue = deltas.result.submitted_to
        reasons = [delta.finish_reason for delta in deltas]
    async for delta in generate.astream(prompt="x", max_tokens=2, priority=9, timeout_s=60):
        reasons.append(delta.finish_reason)
    return [later.id, waited, reasons[-1]]

print(json.dumps(asyncio.run(main())))
"""
    assert client(site, code) == ["mine", True, "length"]


def test_an_eager_task_can_be_awaited(site: Site) -> None:
    code = """
celery_app.conf.task_always_eager = True

async def main():
    result = await generate.adelay(prompt="hello", max_tokens=2)
    return (await result.aget())["usage"]["completion_tokens"]

print(json.dumps(asyncio.run(main())))
"""
    assert client(site, code) == 2

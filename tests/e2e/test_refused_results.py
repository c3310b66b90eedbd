"""Results that the backend refuses, or that nobody could store: they hold up no other task, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from celery import states
from celery.exceptions import TimeLimitExceeded
from celery.result import AsyncResult

from petiole.tasks.servers.connections import connect
from petiole.tasks.worker.completion.threads import THREADS
from tests.support.fake_engine import expected
from tests.support.proxy import Proxy
from tests.support.site import RedisServer, Site, eventually

MORE = THREADS + 3


class Results:
    """A Redis for results only, which workers reach by an address that can answer garbage."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.server = RedisServer(folder)
        self.address = Proxy(folder / "p.sock", self.server.socket)

    def refuse(self, *, full: bool = False) -> None:
        """Everything, or writes only."""
        if full:
            self._limit_memory("1")
        else:
            self.address.garble(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")

    def take(self) -> None:
        self._limit_memory("0")
        self.address.garble(None)

    def _limit_memory(self, size: str) -> None:
        with closing(connect(self.server.url)) as client:
            client.config_set("maxmemory", size)


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Results]:
    results = Results(tmp_path / "results")
    yield results
    results.address.close()
    results.server.kill()


@pytest.fixture
def site(tmp_path: Path, results: Results) -> Iterator[Site]:
    """The producer reaches the results directly."""
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=60) as site:
        site.app.conf.result_backend = results.server.url
        site.environment["PETIOLE_RESULT_BACKEND"] = results.address.url
        yield site


def end(site: Site, *tasks: AsyncResult) -> None:
    for task in tasks:
        eventually(lambda task=task: [one for one in site.log(task) if one["finish_reason"]], "the stream's end")


def test_what_nobody_can_store_fails_at_once_and_holds_up_no_other(own_site: Site) -> None:
    site = own_site
    worker = site.worker()
    strange = [
        site.generate("strange", max_tokens=3, submission={"headers": {"_children": 5}}) for _ in range(MORE)
    ]
    others = [site.generate(f"o{i}", max_tokens=3, seed=i) for i in range(MORE)]
    for i, other in enumerate(others):
        assert site.get(other)["token_ids"] == expected(f"o{i}", i, 3)
    for one in strange:
        one.get(propagate=False, timeout=90)
        assert one.state in states.READY_STATES
    eventually(lambda: site.unfinished() == 0, "acknowledged")
    assert worker.alive()


def test_error_callbacks_that_nobody_can_send_hold_up_no_other_task(own_site: Site) -> None:
    """Of tasks that take too long: more than a worker may hold."""
    site = own_site
    worker = site.worker(PETIOLE_MAX_NUM_SEQS=2)
    for number in range(10):
        callback = site.app.signature("tasks.generate", kwargs={"prompt": "x"}, immutable=True)
        callback.options["queue" if number % 2 else "expires"] = 5 if number % 2 else "soon"
        submission = {"link_error": callback, "time_limit": 0.05, "task_id": f"slow-{number}"}
        site.generate("slow", max_tokens=4000, submission=submission)
    for number in range(10):
        with pytest.raises(TimeLimitExceeded):
            site.get(site.app.AsyncResult(f"slow-{number}"))
    assert site.get(site.generate("other", max_tokens=3, seed=1))["token_ids"] == expected("other", 1, 3)
    eventually(lambda: site.unfinished() == 0, "acknowledged")
    assert worker.alive()


@pytest.mark.parametrize("full", [False, True], ids=["garbage", "full"])
def test_a_backend_that_refuses_results_holds_up_no_thread_and_gets_each_later(
    site: Site, results: Results, full: bool
) -> None:
    worker = site.worker()
    results.refuse(full=full)
    link = site.app.signature("tasks.generate", kwargs={"prompt": "linked", "max_tokens": 1}, immutable=True)
    link.set(task_id="linked")
    plain = [site.generate(f"p{i}", max_tokens=3, seed=i) for i in range(MORE)]
    failing = site.generate("fails", max_tokens=-1)
    linking = site.generate("links", max_tokens=3, seed=1, submission={"link": link, "link_error": link})
    end(site, *plain, failing, linking)
    everything = MORE + 2 + full  # what is linked is sent before the result is stored, if the backend answers
    eventually(lambda: _parked(site, worker.node) == everything, "all are parked")
    results.take()
    for i, one in enumerate(plain):
        assert site.get(one)["token_ids"] == expected(f"p{i}", i, 3)
    assert site.get(linking)["token_ids"] == expected("links", 1, 3)
    failing.get(propagate=False, timeout=90)
    assert failing.state == states.FAILURE
    assert site.app.AsyncResult("linked").get(timeout=90)["finish_reason"] == "length"
    assert worker.output.count("Task tasks.generate[linked] received") == 1, "what is linked is sent once"
    eventually(lambda: site.unfinished() == 0, "acknowledged")


def test_a_shutdown_gives_back_what_is_parked_and_the_next_worker_stores_it(site: Site, results: Results) -> None:
    worker = site.worker()
    results.refuse()
    task = site.generate("parked", max_tokens=3, seed=2)
    end(site, task)
    eventually(lambda: _parked(site, worker.node) == 1, "it is parked")
    assert worker.stop() == 0
    assert "finishing" not in worker.output, "a drain does not wait for what is parked"
    assert site.queued() == 1
    results.take()
    site.worker()
    assert site.get(task)["token_ids"] == expected("parked", 2, 3)
    assert len(site.log(task)) == len([one for one in site.log(task) if one["attempt"] == 1])


def _parked(site: Site, node: str) -> int:
    stats = site.app.control.inspect([node], timeout=5.0).stats() or {}
    return int(stats.get(node, {"pool": {"parked": -1}})["pool"]["parked"])

"""A worker dies, stops for longer than its lease, or meets what should never happen at a step of a task's way.

Whatever the step, the task comes to its one end, there or at another worker, and stream, result and readers agree
on it. A worker that goes on afterwards changes nothing any more, and serves. Some of the steps; all of them with
`PETIOLE_CHAOS_MINUTES` of 10 or more.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery.result import AsyncResult

from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from tests.support.doomed import MET, OF_A_REVOCATION, POINTS
from tests.support.fake_engine import expected
from tests.support.reader import Reader
from tests.support.site import PATIENCE_S, Site, Worker, eventually

AT_A_TIME = 4
TOKENS = {"runs": 60, "is revoked": 1000}
STEP_MS = {"runs": 2, "is revoked": 50}
"""Of the doomed. The revocation must come before the end."""

OF_WHAT_IS_REVOKED = ("end on its way", "end written")
STEPS = [
    *((name, "runs") for name in POINTS),
    *((name, "is revoked") for name in (*OF_A_REVOCATION, *OF_WHAT_IS_REVOKED)),
]
WRITTEN_BY_THE_FIRST = [*list(POINTS)[list(POINTS).index("end on its way") :], "to be stored", "stored"]
WITHOUT_A_NET = (
    "announcement on its way",
    "first token written",
    "end on its way",
    "end written",
)
"""On a thread that a worker cannot do without."""

FAILS_ITS_TASKS = ("to be begun", "begun", "announcement written", "end known")
"""An error of the intake, or of a task's output, is that of the tasks at hand: they fail, and the worker goes on
(see `test_intake`, `test_publisher`)."""

FULL = float(os.environ.get("PETIOLE_CHAOS_MINUTES", "1")) >= 10


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0) as site:
        monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
        settings.cache_clear()
        site.worker()
        yield site
    connections._streams.cache_clear()
    settings.cache_clear()


@pytest.mark.parametrize(("how", "first"), [("KILL", 0), ("STOP", 1), ("RAISE", 2)])
def test_at_any_step_the_task_comes_to_its_end(site: Site, how: str, first: int) -> None:
    steps = STEPS if FULL else STEPS[first::3]
    go_on_elsewhere(site, [step for step in steps if how != "RAISE" or step[0] not in FAILS_ITS_TASKS], how)


def test_what_should_never_happen_ends_the_worker(site: Site) -> None:
    go_on_elsewhere(site, [(point, "runs") for point in WITHOUT_A_NET], "RAISE")
    assert [worker.ended() for worker in site.workers[1:]] == [70] * len(WITHOUT_A_NET)


def go_on_elsewhere(site: Site, steps: list[tuple[str, str]], how: str) -> None:
    for first in range(0, len(steps), AT_A_TIME):
        cases = [Case(site, point, what, how) for point, what in steps[first : first + AT_A_TIME]]
        for case in cases:
            case.begin()
        for case in cases:
            case.meet_doom()
        settle(site, [case.queue for case in cases])
        for case in cases:
            case.goes_on()
        settle(site, [case.queue for case in cases])
        for case in cases:
            case.verify()


class Case:
    """One task, and the worker that is doomed at one step of it: alone on a queue of its own."""

    def __init__(self, site: Site, point: str, what: str, how: str) -> None:
        self.site, self.point, self.what, self.how = site, point, what, how
        self.name = self.queue = f"{point} {what}".replace(" ", "-")
        self.seed = len(site.workers)
        self.worker: Worker = site.start_worker(
            "-Q",
            self.queue,
            PETIOLE_ENGINE_FACTORY="tests.support.doomed:DoomedEngine",
            PETIOLE_FAKE_STEP_MS=STEP_MS[what],
            DOOM=f"{point} {how}",
        )

    def begin(self) -> None:
        self.worker.ready()
        self.submit(self.name, TOKENS[self.what])
        self.reader = Reader(self.site, self.name, 0.0)

    def submit(self, name: str, length: int) -> AsyncResult:
        submission = {"task_id": name, "queue": self.queue}
        return self.site.generate(name, max_tokens=length, seed=self.seed, submission=submission)

    def meet_doom(self) -> None:
        if self.what == "is revoked":
            eventually(lambda: len(self.site.tokens(self.name)) > 5, f"{self.name} streams")
            self.site.app.control.revoke(self.name, terminate=True, destination=[self.worker.node])
        doomed: dict[str, Callable[[], bool]] = {
            "KILL": lambda: not self.worker.alive(),
            "STOP": self.worker.stopped,
            "RAISE": lambda: MET in self.worker.output,
        }
        eventually(doomed[self.how], f"the worker of {self.name} {MET}")

    def goes_on(self) -> None:
        if self.how == "STOP":
            self.worker.signal(signal.SIGCONT)
            after = self.submit(f"{self.name}-after", 3)
            value = self.site.get(after)
            assert value["token_ids"] == expected(f"{self.name}-after", self.seed, 3)
            assert self.worker.alive()

    def verify(self) -> None:
        truth, written = expected(self.name, self.seed, TOKENS[self.what]), self.site.tokens(self.name)
        result = AsyncResult(self.name, app=self.site.app)
        ends = [delta for delta in self.site.log(self.name) if delta["finish_reason"] is not None]
        assert len(ends) == 1, self.name
        if self.what == "is revoked" and ends[0]["finish_reason"] == "cancelled":
            assert result.state == "REVOKED", self.name
            assert written == truth[: len(written)], self.name
        else:
            assert result.state == "SUCCESS", f"{self.name} is {result.state}: {result.result!r}"
            assert result.result["token_ids"] == written == truth, self.name
        if self.point in WRITTEN_BY_THE_FIRST:
            assert ends[0]["attempt"] == 1, self.name
        self.reader.join(PATIENCE_S)
        assert self.reader.error is None, f"{self.name}: {self.reader.error!r}"
        assert (self.reader.tokens, self.reader.reason) == (written, ends[0]["finish_reason"]), self.name


def settle(site: Site, queues: list[str]) -> None:
    """What the doomed have lost is for the others; until nobody has anything to do."""

    def idle() -> bool:
        for queue in queues:
            if not any(worker.alive() and queue in worker.arguments for worker in running(site)):
                site.redis.lmove(queue, "petiole", "RIGHT", "LEFT")
        return site.unfinished(*queues) == 0

    eventually(idle, "all work is done")


def running(site: Site) -> list[Worker]:
    return [worker for worker in site.workers if worker.alive() and not worker.stopped()]

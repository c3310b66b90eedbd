"""Workers come and go with the work, down to none; a new model takes over a queue, as docs/deploying.md says."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from celery.result import AsyncResult

from petiole.tasks.fleet.reports import workers as reports
from tests.support.fake_engine import expected
from tests.support.site import REPOSITORY, Site, Worker, eventually

TASKS_A_WORKER = 6
MOST = 3


def run(site: Site, *command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", *command], cwd=REPOSITORY, env=site.environment, capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_new_model_takes_over_a_queue(tmp_path: Path) -> None:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=5) as site:
        old = site.worker(PETIOLE_MODEL="old")
        begun = [site.generate(f"old {i}", max_tokens=1_000, seed=1) for i in range(2)]
        for task in begun:
            site.streaming(task, 5)
        new = site.worker("-Q", "petiole.next", PETIOLE_MODEL="new")
        tried = site.generate("try", max_tokens=3, seed=1, submission={"queue": "petiole.next"})
        assert site.get(tried)["token_ids"] == expected("try", 1, 3)
        run(site, "celery", "-A", "petiole", "control", "cancel_consumer", "petiole", "-d", old.node)
        waiting = [site.generate(f"new {i}", max_tokens=20, seed=1) for i in range(3)]

        def holds_nothing() -> bool:
            [report] = [one for one in reports(site.redis) if one.worker == old.node]
            return report.held_messages == 0

        eventually(holds_nothing, "the old worker holds nothing")
        assert site.queued() == len(waiting)
        run(site, "celery", "-A", "petiole", "control", "add_consumer", "petiole", "-d", new.node)
        for i, task in enumerate(waiting):
            assert site.get(task)["token_ids"] == expected(f"new {i}", 1, 20)
        run(site, "petiole.tasks.commands.cli", "drain", old.node, "--wait", "60")
        assert old.ended() == 0
        assert [site.state(task)["model"] for task in begun] == ["fake:old"] * 2
        assert [site.state(task)["model"] for task in (*waiting, tried)] == ["fake:new"] * 4
        for i, task in enumerate(begun):
            value = site.get(task)
            assert (value["token_ids"], value["attempt"]) == (expected(f"old {i}", 1, 1_000), 1)


class Scaler:
    """What KEDA does with the chart's query: as many workers as tasks wait or are held, for each
    `TASKS_A_WORKER` one."""

    def __init__(self, site: Site) -> None:
        self.site, self.most, self.starts_s = site, 0, list[float]()
        self._begun: dict[str, float] = {}

    @property
    def alive(self) -> list[Worker]:
        return [one for one in self.site.workers if one.alive()]

    def look(self) -> None:
        site = self.site
        wanted = min(MOST, math.ceil(site.unfinished() / TASKS_A_WORKER))
        for _ in range(wanted - len(self.alive)):
            started = site.start_worker()
            self._begun[started.node] = time.monotonic()
        for worker in self.alive[wanted:]:
            worker.process.terminate()
        self.most = max(self.most, len(self.alive))
        for worker in self.alive:
            if worker.node in self._begun and f"{worker.node} ready." in worker.output:
                self.starts_s.append(time.monotonic() - self._begun.pop(worker.node))


@pytest.mark.slow
def test_a_days_load_from_no_worker_to_three_and_back(tmp_path: Path) -> None:
    """A morning's first task, a noon with more than one worker does, an evening without any, and another task."""
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=5, PETIOLE_DRAIN_SECONDS=1, PETIOLE_MAX_NUM_SEQS=4) as site:
        scaler = Scaler(site)
        sent: list[tuple[AsyncResult, str, int]] = []
        for hour in (1, 2, 8, 16, 8, 2):
            for task in range(hour):
                prompt, tokens = f"{hour} {task}", 200 + 40 * (task % 5)
                sent.append((site.generate(prompt, max_tokens=tokens, seed=1), prompt, tokens))
            until = time.monotonic() + 4
            while time.monotonic() < until:
                scaler.look()
                time.sleep(0.2)
        deadline = time.monotonic() + 900
        while scaler.alive or site.unfinished():
            assert time.monotonic() < deadline, f"{site.unfinished()} tasks, {len(scaler.alive)} workers"
            scaler.look()
            time.sleep(0.2)
        assert scaler.most == MOST
        for result, prompt, tokens in sent:
            assert site.get(result)["token_ids"] == site.tokens(result) == expected(prompt, 1, tokens)
        late = site.generate("late", max_tokens=3, seed=1)
        while not late.ready():
            scaler.look()
            time.sleep(0.2)
        assert site.get(late)["token_ids"] == expected("late", 1, 3)

"""Tasks of the same app that are no generations, on threads beside the engine."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from petiole.tasks.errors import WorkersLost
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker.pool.foreign_tasks import THREADS
from tests.support.fake_engine import expected
from tests.support.site import Site, eventually

FOREIGN = ("-I", "tests.support.foreign_tasks")


def test_foreign_tasks_run_beside_the_engine(own_site: Site) -> None:
    site = own_site
    site.worker("-I", "tests.support.foreign_tasks")
    running = site.generate("beside", max_tokens=300, seed=1)
    assert site.get(site.app.send_task("foreign.add", args=[2, 3])) == 5
    failing = site.app.send_task("foreign.fail")
    with pytest.raises(RuntimeError, match="as it should"):
        site.get(failing)
    assert site.get(running)["token_ids"] == expected("beside", 1, 300)


def test_a_foreign_task_that_would_end_its_process_fails_and_the_worker_goes_on(own_site: Site) -> None:
    site = own_site
    worker = site.worker("-I", "tests.support.foreign_tasks")
    with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
        site.get(site.app.send_task("foreign.exit"))
    with pytest.raises(MemoryError, match="no room"):
        site.get(site.app.send_task("foreign.too_big"))
    eventually(lambda: site.held() == 0, "both are acknowledged")
    assert site.get(site.generate("on", max_tokens=2, seed=1))["token_ids"] == expected("on", 1, 2)
    assert worker.alive()


def waiting(site: Site, gate: Path) -> AsyncResult:
    """A task that runs, and notes each run, until its gate is opened."""
    gate.mkdir()
    result = site.app.send_task("foreign.wait", args=[str(gate)])
    eventually(lambda: runs(gate) == 1, "it runs")
    return result


def runs(gate: Path) -> int:
    return len(list(gate.glob("run-*")))


def unmarked(site: Site, task: AsyncResult) -> bool:
    return not site.redis.exists(stream_keys(task.id).runs)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_shutdown_cuts_off_a_long_foreign_task_and_gives_it_back(
    own_site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    site, gate = own_site, tmp_path / "gate"
    first = site.worker(*FOREIGN, "--pidfile", str(tmp_path / "pid"))
    result = waiting(site, gate)
    first.signal(number)
    assert first.ended(30) == 0
    assert "gave 1 task back" in first.output
    assert not (tmp_path / "pid").exists()
    assert (site.queued(), site.held()) == (1, 0)
    site.worker(*FOREIGN, PETIOLE_MAX_ATTEMPTS=1)  # a shutdown is no death
    eventually(lambda: runs(gate) == 2, "it runs again")
    (gate / "open").touch()
    assert site.get(result) == "opened"
    eventually(lambda: unmarked(site, result) and site.unfinished() == 0, "nothing is left of it")


def test_a_foreign_task_that_kills_its_workers_is_given_up(own_site: Site) -> None:
    site = own_site
    result = site.app.send_task("foreign.die")
    for _ in range(2):
        victim = site.start_worker(*FOREIGN, PETIOLE_MAX_ATTEMPTS=2)
        assert victim.ended() == -signal.SIGKILL
    last = site.worker(*FOREIGN, PETIOLE_MAX_ATTEMPTS=2)
    with pytest.raises(WorkersLost, match=r"2 workers died while they worked on this task$"):
        site.get(result)
    eventually(lambda: site.unfinished() == 0, "it is acknowledged")
    assert last.alive()


def test_a_lost_connection_does_not_run_a_foreign_task_twice(own_site: Site, tmp_path: Path) -> None:
    site, gate = own_site, tmp_path / "gate"
    worker = site.worker(*FOREIGN)
    result = waiting(site, gate)
    for times in (2, 3):
        site.redis.client_kill_filter(_type="normal", skipme=True)
        eventually(lambda n=times: worker.output.count(f"[{result.id}] received") == n, "it came again")
    (gate / "open").touch()
    assert site.get(result) == "opened"
    eventually(lambda: site.unfinished() == 0, "it is acknowledged")
    inspect = site.app.control.inspect(timeout=10, limit=1)
    assert inspect.active() == {worker.node: []}
    assert runs(gate) == 1


def test_a_retry_and_a_replacement_have_the_id_of_the_task_and_are_not_taken_for_it(own_site: Site) -> None:
    own_site.worker(*FOREIGN)
    assert own_site.get(own_site.app.send_task("foreign.try_again")) == 2
    assert own_site.get(own_site.app.send_task("foreign.count_down", args=[3])) == "done"


def test_a_foreign_task_that_was_revoked_before_a_thread_was_free_never_runs(
    own_site: Site, tmp_path: Path
) -> None:
    site = own_site
    worker = site.worker(*FOREIGN)
    busy = [waiting(site, tmp_path / f"busy-{i}") for i in range(THREADS)]
    (late := tmp_path / "late").mkdir()
    revoked = site.app.send_task("foreign.wait", args=[str(late)])
    eventually(lambda: f"[{revoked.id}] received" in worker.output, "it waits for a thread")
    revoked.revoke()
    eventually(lambda: f"revoked: {revoked.id}" in worker.output, "the worker knows")
    for i in range(THREADS):
        (tmp_path / f"busy-{i}" / "open").touch()
    assert [site.get(result) for result in busy] == ["opened"] * THREADS
    with pytest.raises(TaskRevokedError):
        site.get(revoked)
    eventually(lambda: site.unfinished() == 0, "it is acknowledged")
    assert runs(late) == 0

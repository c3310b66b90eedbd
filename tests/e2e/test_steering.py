"""The engine of a running worker is paused, goes on, and gets other weights."""

from __future__ import annotations

import pytest

from petiole.tasks.commands import cli
from petiole.tasks.fleet import control, reports
from tests.support.fake_engine import expected
from tests.support.site import Site, eventually

LONG = 400
LEASE_S = 2
QUEUES = ["petiole", "petiole.model.petiole-tiny"]
OPTIONS = {"PETIOLE_VISIBILITY_TIMEOUT_S": LEASE_S, "PETIOLE_FAKE_STEP_MS": 15}


def states(site: Site) -> dict[str, tuple[str, list[str]]]:
    return {worker.worker: (worker.state, worker.queues) for worker in reports.workers(site.redis)}


def test_a_paused_worker_keeps_its_tasks_and_takes_no_more(own_site: Site) -> None:
    site = own_site
    worker = site.worker(**OPTIONS)
    running = site.generate("running", max_tokens=LONG, seed=1)
    site.streaming(running)
    assert control.pause(app=site.app) == {"w0@test": {"ok": "pause begins"}}
    eventually(lambda: "Canceling queue" in worker.output, "it consumes no more")
    waiting = site.generate("waiting", max_tokens=3, seed=2)
    before = len(site.tokens(running))
    other = site.worker(**OPTIONS)
    assert site.get(waiting)["token_ids"] == expected("waiting", 2, 3), "the other worker takes it"
    assert control.engines(["w0@test"], site.app)["w0@test"]["state"] == "paused"
    eventually(lambda: states(site)["w0@test"] == ("paused", QUEUES), "its report still names its queues")
    assert len(site.tokens(running)) - before <= 1
    assert control.resume(["w0@test"], site.app) == {"w0@test": {"ok": "resume begins"}}
    value = site.get(running)
    assert value["token_ids"] == site.tokens(running) == expected("running", 1, LONG)
    assert value["attempt"] == 1
    other.stop()
    assert site.get(site.generate("next", max_tokens=3, seed=3))["token_ids"] == expected("next", 3, 3)


def test_a_worker_that_has_just_begun_is_paused_too(own_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports before it listens to commands: first it asks other workers what they know."""
    site, known = own_site, reports.workers
    monkeypatch.setattr(reports, "workers", lambda client=None: known(site.redis))
    worker = site.start_worker(gossip=True)
    eventually(reports.workers, "its first report")
    assert control.pause(app=site.app) == {worker.node: {"ok": "pause begins"}}
    eventually(lambda: states(site)[worker.node][0] == "paused", "it is paused")


def test_a_reload_of_three_leases_under_load_loses_and_repeats_nothing(own_site: Site) -> None:
    site = own_site
    site.worker(**OPTIONS)
    running = [site.generate(f"running {seed}", max_tokens=LONG, seed=seed) for seed in range(8)]
    site.streaming(running[0])
    control.pause(["w0@test"], site.app)  # the generations do not end while the other worker starts
    site.worker(**OPTIONS)
    control.resume(["w0@test"], site.app)
    new = f"slow:{3 * LEASE_S}"
    assert control.reload(new, ["w0@test"], site.app) == {"w0@test": {"ok": "reload begins"}}
    eventually(lambda: control.engines(["w0@test"], site.app)["w0@test"]["model"] == new, "the new weights serve")
    values = [site.get(result) for result in running]
    for seed, (result, value) in enumerate(zip(running, values, strict=True)):
        assert value["token_ids"] == site.tokens(result) == expected(f"running {seed}", seed, LONG)
        assert value["attempt"] == 1
    assert {site.state(result)["model"] for result in running if site.state(result)["attempt"] == "1"} == {
        f"fake:{new}"
    }


def test_a_reload_that_makes_no_progress_is_a_hang(own_site: Site) -> None:
    site = own_site
    worker = site.worker(**OPTIONS)
    running = site.generate("running", max_tokens=2 * LONG, seed=1)
    site.streaming(running)
    site.worker(**OPTIONS)
    control.reload(f"stuck:{4 * LEASE_S}", ["w0@test"], site.app)
    value = site.get(running)
    assert value["token_ids"] == site.tokens(running) == expected("running", 1, 2 * LONG)
    assert value["attempt"] == 2
    assert "the engine hangs" in worker.output


def test_a_worker_that_stops_does_not_wait_for_what_it_finds_for_a_reload(own_site: Site) -> None:
    site = own_site
    worker = site.worker(**OPTIONS)
    running = site.generate("running", max_tokens=100, seed=1)
    site.streaming(running)
    assert control.reload("download", app=site.app) == {"w0@test": {"ok": "reload begins"}}
    assert worker.stop() == 0
    site.worker(**OPTIONS)
    assert site.get(running)["token_ids"] == site.tokens(running) == expected("running", 1, 100)


@pytest.mark.parametrize("command", ["pause", "reload"])
def test_a_worker_that_stands_still_hands_its_tasks_back_at_once_when_it_stops(
    own_site: Site, command: str
) -> None:
    site = own_site
    worker = site.worker(PETIOLE_DRAIN_SECONDS=60, PETIOLE_FAKE_STEP_MS=15)
    running = site.generate("running", max_tokens=LONG, seed=1)
    site.streaming(running)
    site.worker()
    if command == "pause":
        control.pause(["w0@test"], site.app)
    else:
        control.reload("slow:3", ["w0@test"], site.app)
    eventually(lambda: control.engines(["w0@test"], site.app)["w0@test"]["state"] != "ready", "it stands still")
    worker.stop()
    assert site.get(running)["token_ids"] == site.tokens(running) == expected("running", 1, LONG)


def test_a_reload_from_the_command_line(
    own_site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = own_site
    worker = site.worker()
    monkeypatch.setattr(control, "celery_app", site.app)
    for function in (control.reload, control.engines):
        monkeypatch.setattr(function, "__defaults__", (*(function.__defaults__ or ())[:-1], site.app))
    assert cli.main(["reload", "refused"]) == 1
    assert "w0@test: refused has another shape" in capsys.readouterr().out
    assert cli.main(["reload", "slow:0.1", "w0@test"]) == 0
    assert "w0@test: serves slow:0.1" in capsys.readouterr().out
    assert cli.main(["reload", "slow:0.1", "nobody@test"]) == 1
    assert "no answer from nobody@test" in capsys.readouterr().err
    assert site.get(site.generate("next", max_tokens=3, seed=3))["model"] == "slow:0.1"
    assert worker.alive()

"""`petiole batch --detach`: the workers run it, whoever dies."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.fleet import control
from tests.e2e.test_batch import check, lines, rows_in
from tests.support import nursery
from tests.support.site import Site, Worker, eventually

LEASE: dict[str, Any] = {"PETIOLE_VISIBILITY_TIMEOUT_S": 4, "PETIOLE_DRAIN_SECONDS": 0}


def petiole(site: Site, *arguments: object) -> tuple[int, str]:
    ran = nursery.petiole("batch", *map(str, arguments), **site.environment)
    return ran.returncode, ran.stdout + ran.stderr


def shown(site: Site, output: Path) -> dict[str, Any]:
    code, said = petiole(site, "show", output, "--json")
    assert code in (0, 1), said
    found: dict[str, Any] = json.loads(said)
    return found


def detached(site: Site, folder: Path, *more: object, name: str = "out.jsonl") -> dict[str, Any]:
    code, said = petiole(site, folder / "in.jsonl", "-o", folder / name, "--detach", "--json", *more)
    assert code == 0, said
    found: dict[str, Any] = json.loads(said)
    return found


def record(site: Site, name: str) -> dict[str, str]:
    raw: dict[bytes, bytes] = site.redis.hgetall(f"petiole:batches:{{all}}:batch:{name}")
    return {key.decode(): value.decode() for key, value in raw.items()}


def ended(site: Site, name: str) -> Callable[[], bool]:
    return lambda: record(site, name)["status"] in ("completed", "failed", "cancelled", "expired")


def any_result(site: Site) -> bool:
    keys = site.redis.keys("celery-task-meta-b-*")
    return any(b"SUCCESS" in (raw or b"") for raw in site.redis.mget(keys)) if keys else False


def written(folder: Path) -> int:
    """The rows in pages."""
    pages = (folder / "out.jsonl.pages").glob("0*-*")
    return sum(page.read_bytes().count(b"\t+\t") for page in pages if "." not in page.name)


def test_it_goes_on_without_its_client_and_the_same_command_finds_it(
    site: Site, worker: Worker, tmp_path: Path
) -> None:
    rows_in(tmp_path, 60)
    batch = detached(site, tmp_path)
    again = detached(site, tmp_path, "--wait")
    assert (again["id"], again["status"], again["rows"], again["ended"]) == (batch["id"], "completed", 60, 60)
    assert again["completion_tokens"] == 240
    check(tmp_path, 60)
    assert petiole(site, "show", batch["id"])[0] == 0
    _, said = petiole(site, "list", "--json")
    assert batch["id"] in [one["id"] for one in json.loads(said)], said
    eventually(lambda: not site.redis.keys("celery-task-meta-b-*"), "no result is left")
    keys = site.redis.keys("petiole:batches:*")
    assert sum(site.redis.memory_usage(key) or 0 for key in keys) < 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.pages"]


@contextlib.contextmanager
def paused(site: Site) -> Iterator[None]:
    """No row ends in the context."""
    control.pause(app=site.app)
    try:
        yield
    finally:
        control.resume(app=site.app)


def test_cancelled_it_has_what_has_ended_and_resumed_it_has_all(
    site: Site, worker: Worker, tmp_path: Path
) -> None:
    count = 1000
    rows_in(tmp_path, count, tokens=60)
    with paused(site):
        batch = detached(site, tmp_path)
    eventually(lambda: any_result(site), "some rows have ended")
    with paused(site):
        assert petiole(site, "cancel", batch["id"], "--json")[0] == 0
        eventually(ended(site, batch["id"]), "a runner has ended it")
    assert record(site, batch["id"])["status"] == "cancelled"
    found = lines(tmp_path / "out.jsonl")
    assert len(found) == count
    not_run = [line for line in found if line.get("error")]
    assert 0 < len(not_run) < count
    assert {line["error"]["type"] for line in not_run} == {"NotRun"}
    code, said = petiole(site, "resume", tmp_path / "out.jsonl", "--wait", "--json")
    assert code == 0, said
    check(tmp_path, count, tokens=60)


def runners(name: str) -> list[int]:
    """The processes that run this batch."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if {b"run", name.encode(), b"--leased"} <= {*command}:
                found.append(int(folder.name))
    return found


def trial(site: Site, folder: Path, seed: int, count: int, disturbances: list[str], tokens: int = 20) -> None:
    """Rows run while workers, runners and Redis die: each row is once in the output."""
    print(f"PETIOLE_TRIAL_SEED={seed}")
    random_ = random.Random(seed)
    rows_in(folder, count, tokens)
    speed = {**LEASE, "PETIOLE_FAKE_STEP_MS": 5}
    for _ in range(2):
        site.start_worker(**speed)
    for worker in site.workers:
        worker.ready()
    name = detached(site, folder)["id"]
    for disturbance in disturbances:
        goal = written(folder) + random_.randrange(1, max(2, count // (2 * len(disturbances))))
        eventually(lambda goal=goal: written(folder) >= goal or ended(site, name)(), f"{goal} rows are written")
        match disturbance:
            case "worker":
                living = [worker for worker in site.workers if worker.alive()]
                random_.choice(living).kill()
                site.worker(**speed)
            case "runner":
                for process in runners(name):
                    os.kill(process, signal.SIGKILL)
            case "redis":
                site.server.restart()
    eventually(ended(site, name), "the batch has ended", 1800.0 if count > 1000 else 120.0)
    assert record(site, name)["status"] == "completed", record(site, name)
    check(folder, count, tokens)
    eventually(lambda: site.unfinished() == 0, "no message is left")
    eventually(lambda: not runners(name), "no runner is left")


def seed_of() -> int:
    return int(os.environ.get("PETIOLE_TRIAL_SEED") or random.randrange(10**6))


@pytest.mark.slow
def test_killed_workers_and_runners_and_a_restart_of_redis(own_site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "batch"
    folder.mkdir()
    seed = seed_of()
    kinds = random.Random(seed).sample(["worker", "runner", "redis"], 3)
    trial(own_site, folder, seed, 300, kinds)


@pytest.mark.slow
def test_twenty_thousand_rows_once_each(own_site: Site, tmp_path: Path) -> None:
    folder = tmp_path / "batch"
    folder.mkdir()
    seed = seed_of()
    kinds = random.Random(seed).choices(["worker", "runner", "redis"], k=30)
    trial(own_site, folder, seed, 20_000, kinds, tokens=4)

"""`petiole batch --detach`: the workers run it, whoever dies."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from petiole.tasks.fleet import control
from tests.e2e.test_batch import check, lines, rows_in
from tests.support import nursery
from tests.support.site import Site, Worker, eventually


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
    found: dict[str, Any] = json.loads(said.partition("\n")[0])  # on a busy machine a note may follow
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

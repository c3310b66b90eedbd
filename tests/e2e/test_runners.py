"""Runners of detached batches that are killed, that outlive everything, and whose batch names what they must not
open."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.settings import settings
from petiole.tasks.submission.batches import segments
from petiole.tasks.submission.batches.durable import current_row, records, runner
from petiole.tasks.submission.batches.durable.current_row import CurrentRow
from petiole.tasks.submission.batches.durable.records import Spec
from tests.e2e.test_batch import lines, rows_in
from tests.e2e.test_batch_trials import runners
from tests.e2e.test_detached_batch import detached, ended, paused, petiole, record
from tests.support.site import Site, Worker, eventually

SECRET = "a-password-of-the-worker"
SLOW_LINE = b'{"prompt": "x", "y": [' + b"1.23456789012345678901234567890e-300," * (2**19 - 8) + b"0]}"
"""As many values as a row may have. Reading them takes about a second, in which no other thread of the process
runs."""


def alive(process: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def in_hand(process: int) -> int | None:
    """The row that a runner handles."""
    for one in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            if "memfd:petiole-row" in os.readlink(one):
                file = os.open(one, os.O_RDWR)
                try:
                    return CurrentRow(file).row
                finally:
                    os.close(file)
    return None


KILLER = """
import os, signal, sys
if "--leased" in sys.orig_argv:
    from petiole.tasks.submission.batches.durable.current_row import CurrentRow
    take = CurrentRow.take
    def taken(current, row):
        take(current, row)
        if row.number == {row} and not row.fault:
            os.kill(os.getpid(), signal.SIGKILL)
    CurrentRow.take = taken
"""
"""Python's `sitecustomize`: in a runner, this row kills the process that handles it."""


def test_a_line_that_kills_two_runners_is_set_aside_and_the_rest_goes_on(
    own_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    row = random.Random(seed).randrange(30)
    rows_in(tmp_path, 30)
    (code := tmp_path / "code").mkdir()
    (code / "sitecustomize.py").write_text(KILLER.format(row=row))
    monkeypatch.setenv("PYTHONPATH", str(code))
    worker = own_site.worker()
    name = detached(own_site, tmp_path)["id"]
    killed = f"by signal 9, at row {row}"
    for deaths in range(1, records.DEATHS_OF_A_ROW + 1):
        eventually(lambda deaths=deaths: worker.output.count(killed) == deaths, f"row {row} has killed {deaths}")
    eventually(ended(own_site, name), "the batch has ended")
    found = lines(tmp_path / "out.jsonl")
    assert record(own_site, name)["status"] == "completed"
    assert [line["row"] for line in found if "error" in line] == [row]
    [line] = [line for line in found if "error" in line]
    assert line["error"]["message"].startswith(f"row: {current_row.SET_ASIDE}"), line
    assert len(found) == 30
    assert worker.output.count(killed) == records.DEATHS_OF_A_ROW


def test_a_batch_whose_runners_are_killed_fails_with_the_reason(own_site: Site, tmp_path: Path) -> None:
    own_site.worker()
    rows_in(tmp_path, 30)
    killed: list[int] = []
    with paused(own_site):
        name = detached(own_site, tmp_path)["id"]

        def kill() -> bool:
            for process in set(runners(name)) - {*killed}:
                killed.append(process)
                os.kill(process, signal.SIGKILL)
            return ended(own_site, name)()

        eventually(kill, "the batch has ended")
    found = record(own_site, name)
    [fault] = json.loads(found["errors"])
    assert (found["status"], fault["code"]) == ("failed", "runner_died")
    assert (
        "runners have died one after the other. The last one: a runner has ended by signal 9" in fault["message"]
    )
    assert len(killed) == runner.MOST_DEATHS
    code, said = petiole(own_site, "resume", name, "--wait", "--json")
    assert code == 0, said
    assert len(lines(tmp_path / "out.jsonl")) == 30


@pytest.mark.parametrize("gone", ["worker", "worker and redis", "redis"])
def test_a_runner_outlives_neither_its_worker_nor_redis(own_site: Site, tmp_path: Path, gone: str) -> None:
    """In the middle of a line of seconds."""
    worker = own_site.worker()
    (tmp_path / "in.jsonl").write_bytes((SLOW_LINE + b"\n") * 20)
    name = detached(own_site, tmp_path)["id"]

    def at_work() -> list[int]:
        return [process for process in runners(name) if in_hand(process) is not None]

    [process] = eventually(at_work, "a runner is in a line")
    if "worker" in gone:
        worker.kill()
    if "redis" in gone:
        own_site.server.kill()
    eventually(lambda: not alive(process), "the runner has ended")


# ------------------------------------------------------------ what a producer names


@pytest.fixture
def attacked(tmp_path: Path) -> Iterator[tuple[Site, Worker, Path]]:
    """A worker with a secret in its environment and beside the folder that it may read; and the folder."""
    root = tmp_path / "rows"
    root.mkdir()
    (tmp_path / "secret.jsonl").write_text(SECRET)
    (tmp_path / "secret.csv").write_text(f"{SECRET},{SECRET}\n")
    (root / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (root / "environ.jsonl").symlink_to("/proc/self/environ")
    (root / "out").symlink_to(tmp_path)
    os.mkfifo(root / "fifo.jsonl")
    rows_in(root, 3)
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, PETIOLE_BATCH_FILES=root) as site:
        yield site, site.start_worker(SECRET_OF_THE_WORKER=SECRET).ready(), root


@pytest.fixture
def as_producer(attacked: tuple[Site, Worker, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", attacked[0].url)
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


def attacks(root: Path) -> list[dict[str, Any]]:
    good, out = str(root / "in.jsonl"), str(root / "out.jsonl")
    inputs = [
        "/proc/self/environ", "/dev/zero", "/dev/stdin", "/etc/passwd", "-", f"{root}/../secret.jsonl",
        f"{root}/link.jsonl", f"{root}/environ.jsonl", f"{root}/fifo.jsonl", f"{root}/out/secret.jsonl", str(root),
        f"file://{root}/in.jsonl", f"file://{root.parent}/secret.jsonl", "http://169.254.169.254/latest/meta-data",
        f"local://{root.parent}/secret.jsonl", f"simplecache::file://{root.parent}/secret.jsonl",
        f"{root}-other/in.jsonl", "s3://rows/in.jsonl", "memory://rows/in.jsonl", f"{root}/*.jsonl",
        f"zip://secret.jsonl::file://{root.parent}/secret.zip",
    ]  # fmt: skip
    outputs = [
        str(root.parent / "out.jsonl"), f"{root}/out/out.jsonl", f"{root}/../out.jsonl", f"file://{root}/out.jsonl",
        "/dev/full", "memory://rows/out.jsonl", "http://169.254.169.254/out",
    ]  # fmt: skip
    return [
        *({"input": one, "output": out, "format": form} for one in inputs for form in ("jsonl", "csv")),
        *({"input": good, "output": one} for one in outputs),
        *({"input": good, "output": out, "failures": one} for one in outputs),
    ]


@pytest.mark.usefixtures("as_producer")
def test_a_producer_reads_and_writes_nothing_of_the_worker(attacked: tuple[Site, Worker, Path]) -> None:
    """Who may write batches into Redis writes each of these, with and without a marker."""
    site, worker, root = attacked
    before = {path for path in root.parent.rglob("*") if "r.sock" not in path.name}
    named = {f"batch_{k:024x}": Spec(**{"format": "jsonl", **one}) for k, one in enumerate(attacks(root))}
    for name, spec in named.items():
        assert records.create(name, spec)

    def judged() -> bool:
        found = {name: record(site, name) for name in named}
        return all(
            one["status"] == "failed" or any(key.startswith("blind:") for key in one) for one in found.values()
        )

    eventually(judged, "the worker has refused all of them")
    run = [spec.input for name, spec in named.items() if record(site, name).get("generation")]
    assert {*run} == {f"{root}/*.jsonl"}, "it is the name of a file that is not there"
    told = [site.redis.hgetall(key) for key in site.redis.keys("petiole:batches:*batch_*")]
    assert SECRET not in str(told)
    assert SECRET not in worker.output
    made = {path for path in root.parent.rglob("*") if "r.sock" not in path.name} - before
    assert not [path for path in made if "append" not in str(path) and path.suffix != ".log"], made
    segments.mark(str(root / "good.jsonl"), "token")
    good = Spec(str(root / "in.jsonl"), str(root / "good.jsonl"), format="jsonl", marker="token")
    assert records.create("batch_good", good)
    eventually(ended(site, "batch_good"), "the worker goes on")
    assert len(lines(root / "good.jsonl")) == 3


def test_the_refusal_has_the_line_that_is_missing(attacked: tuple[Site, Worker, Path], tmp_path: Path) -> None:
    site, _, root = attacked
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    rows_in(elsewhere, 3)
    code, said = petiole(site, elsewhere / "in.jsonl", "-o", root / "out.jsonl", "--detach")
    assert code == 1, said
    assert f"set PETIOLE_BATCH_FILES={elsewhere} for the workers" in said
    assert not (root / "out.jsonl.pages").exists()

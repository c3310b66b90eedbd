"""This version and the code of an earlier commit at the same tasks, in either order: an upgrade and a rollback.

    python -m tests.upgrade.beside COMMIT

A worker of one version is killed with a task in mid-sentence and another one that is prepared, and not admitted. A
worker of the other version goes on. Readers and callers of both versions follow all of it, from before the tasks
are submitted. It needs the repository's history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.fake_engine import expected
from tests.support.site import REPOSITORY, Site, eventually

LENGTHS = {"running": 200, "waiting": 30}

FOLLOW = """
import json, sys
from petiole import celery_app, stream
name = sys.argv[1]
deltas = list(stream(name, timeout_s=120))
result = celery_app.AsyncResult(name).get(timeout=120)
said = {
    "tokens": [token for delta in deltas for token in delta.token_ids],
    "text": "".join(delta.text for delta in deltas),
    "end": deltas[-1].finish_reason,
    "result": result["token_ids"],
    "result text": result["text"],
    "fields": sorted(result),
    "usage": result["usage"]["completion_tokens"],
}
print(json.dumps(said))
"""
"""What a reader and a caller see of a task."""


@contextmanager
def code_of(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="petiole-") as folder:
        where = Path(folder) / "code"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(where), commit], check=True)
        try:
            yield where
        finally:
            subprocess.run([*git, "remove", "--force", str(where)], check=True)


def follow(site: Site, repository: Path, name: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **site.environment, "PYTHONPATH": str(repository), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", FOLLOW, name]
    return subprocess.Popen(command, cwd=repository, env=environment, stdout=subprocess.PIPE, text=True)


def seen(reader: subprocess.Popen[str]) -> dict[str, Any]:
    said, _ = reader.communicate(timeout=180)
    assert reader.returncode == 0, f"a reader has failed: {reader.args!r}"
    found: dict[str, Any] = json.loads(said)
    return found


def trial(first: Path, second: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="petiole-") as folder, one_place(Path(folder)) as site:
        killed = site.start_worker(repository=first).ready()
        readers = {(name, code): follow(site, code, name) for name in LENGTHS for code in (first, second)}
        eventually(lambda: len(site.redis.pubsub_channels("petiole:*")) >= len(LENGTHS), "all read")
        for name, length in LENGTHS.items():
            submission = {"task_id": name}
            site.generate(name, max_tokens=length, seed=1, submission=submission)
            if name == "running":
                eventually(lambda: len(site.tokens("running")) >= 5, "it streams")
        eventually(lambda: site.state("waiting").get("attempt") == "1", "the other one has begun")
        if first == REPOSITORY:
            eventually(lambda: "prepared" in site.state("waiting"), "it is prepared")
        assert not site.log("waiting")
        killed.kill()
        site.start_worker(repository=second).ready()
        for (name, code), reader in readers.items():
            found, right = seen(reader), expected(name, 1, LENGTHS[name])
            assert found["tokens"] == found["result"] == right, (name, code)
            assert (found["text"], found["end"]) == (found["result text"], "length"), (name, code)
            assert found["usage"] == LENGTHS[name], (name, code)
        for name in LENGTHS:
            assert site.log(name)[-1]["attempt"] == 2, name
            assert site.state(name).get("deaths", "0") == ("1" if name == "running" else "0"), name


def one_place(folder: Path) -> Site:
    """Of a site whose worker runs one task, and has another one ready."""
    return Site(
        folder,
        PETIOLE_VISIBILITY_TIMEOUT_S=2,
        PETIOLE_MAX_NUM_SEQS=1,
        PETIOLE_FAKE_STEP_MS=25,
        PETIOLE_DRAIN_SECONDS=0,
    )


def main(commit: str) -> None:
    with code_of(commit) as that:
        for first, second in ((REPOSITORY, that), (that, REPOSITORY)):
            trial(first, second)
            print(f"{'this version' if second == REPOSITORY else commit} went on: every token once, right results")


if __name__ == "__main__":
    main(sys.argv[1])

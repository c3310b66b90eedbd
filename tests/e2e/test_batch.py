"""`petiole batch`: each row exactly once, whoever dies and whatever fills up."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.client import client, environment_of, run_python
from tests.support.fake_engine import expected, word
from tests.support.nursery import petiole
from tests.support.site import REPOSITORY, Site, Worker, eventually

COMMAND = [sys.executable, "-m", "petiole.tasks.commands.cli", "batch"]


def start(site: Site, *arguments: object, limit: int | None = None) -> subprocess.Popen[str]:
    """`limit`: how large the command's files may be."""
    limited = ["prlimit", f"--fsize={limit}"] if limit else []
    return subprocess.Popen(
        [*limited, *COMMAND, *map(str, arguments)],
        env=environment_of(site),
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run(site: Site, *arguments: object, limit: int | None = None) -> tuple[int, str]:
    if limit is None:
        done = petiole("batch", *map(str, arguments), **site.environment)
        return done.returncode, done.stderr
    ran = start(site, *arguments, limit=limit)
    _, said = ran.communicate(timeout=120)
    return ran.returncode, said


FAULTY = """
import sys
from petiole.tasks.commands import cli
from petiole.tasks.submission.batches.batch import Batch

def turn(self, now, whole=Batch._turn):
    whole(self, now)
    if self.progress.ended >= 20:  # perhaps all of a few, at once
        raise TypeError("of two\\nlines")

Batch._turn = turn
sys.exit(cli.main(sys.argv[1:]))
"""
"""`petiole`, with a fault in its code that shows after 20 rows."""


def rows_in(folder: Path, count: int, tokens: int = 4) -> Path:
    path = folder / "in.jsonl"
    rows = [{"id": f"r{k}", "prompt": f"row {k}", "seed": k, "max_tokens": tokens} for k in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def text_of(row: int, tokens: int = 4) -> str:
    return "".join(map(word, expected(f"row {row}", row, tokens)))


def journaled(folder: Path, output: str = "out.jsonl") -> int:
    """How many rows have ended."""
    path = folder / f"{output}.journal"
    return path.read_bytes().count(b"\t+\t") if path.exists() else 0


def check(folder: Path, count: int, tokens: int = 4) -> None:
    """The output is that of an undisturbed run."""
    found = lines(folder / "out.jsonl")
    assert [(line["row"], line["id"]) for line in found] == [(k, f"r{k}") for k in range(count)]
    assert [line["text"] for line in found] == [text_of(k, tokens) for k in range(count)]


BAD = [
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"text"',
    b"\xff\xfe",
    b"{}",
    b'{"prompt": null}',
    b'{"prompt": 3}',
    b'{"prompt": []}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": [-1]}',
    b'{"prompt": "a", "max_tokens": 0}',
    b'{"prompt": "a", "max_tokens": "x"}',
    b'{"prompt": "a", "max_tokens": 1e400}',
    b'{"prompt": "a", "temperature": -1}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "top_p": 0}',
    b'{"prompt": "a", "stop": [""]}',
    b'{"prompt": "a", "stop": 3}',
    b'{"prompt": "a", "tempreature": 0}',
    b'{"prompt": "a", "queue": "other"}',
    b'{"prompt": "a", "task_id": "mine"}',
    b'{"prompt": "a", "task": "nothing"}',
    b'{"prompt": "a", "task": 3}',
    b'{"prompt": "a", "task": "celery.backend_cleanup"}',
    b'{"prompt": "' + b"too long " * 4000 + b'"}',
    b'{"prompt": "a", "regex": "a", "choice": ["b"]}',
    b'{"prompt": "a", "json_schema": "{"}',
    b'{"prompt": "a", "logprobs": 99}',
    b'{"prompt": "a", "logprob_texts": true}',
    b'{"prompt": "a", "seed": "x"}',
    b'{"prompt": "a", "min_tokens": 9, "max_tokens": 3}',
    b'{"prompt": "a", "logit_bias": {"x": 1}}',
    b'{"prompt": "a", "deadline_s": -1}',
    b'{"prompt": "a\\ud800"}',
    b'{"messages": [{"role": "user", "content": "x"}]}',
    b'{"task": "chat", "messages": []}',
    b'{"task": "chat", "messages": [{"role": 3}]}',
    b'{"task": "chat", "prompt": "a"}',
    b'{"task": "query", "question": ""}',
    b"[" * 100_000,
]


def stopped_by_a_fault(site: Site, folder: Path, *asked: str) -> str:
    """The end of the one line that `petiole batch` says."""
    stopped = run_python(site, "-c", FAULTY, "batch", *asked, TMPDIR=str(folder))
    assert stopped.returncode == 1, stopped.stderr
    [log] = folder.glob("petiole-batch-*.log")
    *_, said = stopped.stderr.splitlines()  # on a busy machine a note of why nothing goes on may come before
    assert "Traceback" not in stopped.stderr
    assert "in turn" in log.read_text()
    known = f"petiole: stopped by a fault of the code, TypeError: of two. {log} has its traceback"
    assert said.startswith(known)
    return said.removeprefix(known)


def test_a_fault_of_the_code_is_one_line_and_the_same_command_goes_on(
    site: Site, worker: Worker, tmp_path: Path
) -> None:
    asked = (str(rows_in(tmp_path, 400)), "-o", str(tmp_path / "out.jsonl"))
    assert stopped_by_a_fault(site, tmp_path, *asked) == ". The same command goes on"
    assert 20 <= journaled(tmp_path) < 400
    code, said = run(site, *asked)
    assert code == 0, said
    check(tmp_path, 400)


def test_a_fault_of_the_code_in_a_dry_run_is_one_line(site: Site, worker: Worker, tmp_path: Path) -> None:
    asked = (str(rows_in(tmp_path, 60)), "--dry-run", "--sample", "60")
    assert stopped_by_a_fault(site, tmp_path, *asked) == ""


def test_bad_rows_are_rows_with_errors_among_good_ones(site: Site, worker: Worker, tmp_path: Path) -> None:
    good = [json.dumps({"prompt": f"row {k}", "seed": k, "max_tokens": 4}).encode() for k in range(len(BAD))]
    mixed = [line for pair in zip(BAD, good, strict=True) for line in pair]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(mixed))
    code, said = run(site, tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert code == 1, said
    assert f"{len(BAD)} of {2 * len(BAD)} failed" in said
    found = lines(tmp_path / "out.jsonl")
    assert [line["row"] for line in found] == list(range(2 * len(BAD)))
    assert [line["text"] for line in found[1::2]] == [text_of(k) for k in range(len(BAD))]
    wrong = [(bad, line) for bad, line in zip(BAD, found[::2], strict=True) if not line.get("error")]
    assert not wrong
    assert all(line["error"]["message"] for line in found[::2])


def test_a_prompt_for_a_csv_and_the_same_command_again(site: Site, worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,name\n" + "".join(f"r{k},{k}\n" for k in range(20)))
    arguments = (
        tmp_path / "in.csv",
        "-o",
        tmp_path / "out.jsonl",
        "--prompt",
        "row {name}",
        "--set",
        "max_tokens=4",
    )
    more = ("--column", "affinity=name", "--set", "seed=1", "--fields", "text", "--order", "ended")
    code, said = run(site, *arguments, *more)
    assert code == 0, said
    found = sorted(lines(tmp_path / "out.jsonl"), key=lambda line: line["row"])
    texts = ["".join(map(word, expected(f"row {k}", 1, 4))) for k in range(20)]
    assert found == [{"row": k, "id": f"r{k}", "text": texts[k]} for k in range(20)]
    before = (tmp_path / "out.jsonl").read_bytes()
    assert run(site, *arguments, *more) == (
        0,
        f"petiole: {tmp_path / 'out.jsonl'} is complete: 20 rows, 0 failed\n",
    )
    assert (tmp_path / "out.jsonl").read_bytes() == before
    (tmp_path / "in.csv").write_text("id,name\nr0,1\n")
    code, said = run(site, *arguments, *more)
    assert code == 1
    assert "is of other rows" in said


def test_a_dry_run_checks_all_rows_and_runs_some(site: Site, worker: Worker, tmp_path: Path) -> None:
    rows = rows_in(tmp_path, 90)
    with rows.open("a") as file:
        file.write('{"prompt": "a", "seed": "x"}\n[]\n')
    ran = start(site, rows, "--dry-run", "--sample", 30)
    printed, said = ran.communicate(timeout=120)
    assert (ran.returncode, said) == (1, "")
    assert printed.startswith("row 90: seed: must be an integer, got 'x'\nrow 91: row: must be a JSON object")
    assert (
        "92 rows, 2 of them refused\nof 30 sampled rows 0 failed\nabout 180 tokens in prompts, 360 made" in printed
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_from_python_results_come_as_rows_end_and_nothing_stays_in_redis(site: Site, worker: Worker) -> None:
    """An option of the whole batch that is wrong is no row's failure."""
    code = """
rows = ({"prompt": f"row {k}", "seed": k} for k in range(40))
batch = tasks.batch(rows, max_tokens=4)
found = {result.row: result.line["text"] for result in batch}
wrong = []
for options in ({"model": "nobody"}, {"countdown": 3}, {"priority": "x"}):
    try:
        tasks.batch([{"prompt": "x"}], **options).run()
    except InvalidRequest as error:
        wrong.append(error.field)
progress = batch.progress
name = batch._sender.batch_id
print(json.dumps([name, found, progress.ended, progress.completion_tokens, batch.complete, wrong]))
"""
    name, found, ended, tokens, complete, wrong = client(site, code)
    assert wrong == ["model", "countdown", "priority"]
    assert found == {str(k): text_of(k) for k in range(40)}
    assert (ended, tokens, complete) == (40, 160, True)
    eventually(lambda: not site.redis.keys(f"*b-{name}-*"), "no key of the batch is left")


def test_a_full_disk_ends_it_and_the_same_command_goes_on(site: Site, worker: Worker, tmp_path: Path) -> None:
    count = 300
    rows = rows_in(tmp_path, count)
    code, said = run(site, rows, "-o", tmp_path / "out.jsonl", limit=20_000)
    assert code == 1, said
    assert "out.jsonl.journal: File too large" in said
    assert 0 < journaled(tmp_path) < count
    code, said = run(site, rows, "-o", tmp_path / "out.jsonl")
    assert code == 0, said
    check(tmp_path, count)


def test_ctrl_c_stops_and_the_same_command_goes_on(site: Site, worker: Worker, tmp_path: Path) -> None:
    count = 400
    rows = rows_in(tmp_path, count, tokens=40)
    ran = start(site, rows, "-o", tmp_path / "out.jsonl")
    eventually(lambda: journaled(tmp_path) > 10, "some rows have ended")
    ran.send_signal(signal.SIGINT)
    _, said = ran.communicate(timeout=60)
    assert ran.returncode == 130, said
    assert "go on in the workers" in said
    code, said = run(site, rows, "-o", tmp_path / "out.jsonl")
    assert code == 0, said
    check(tmp_path, count, tokens=40)
    assert not (tmp_path / "out.jsonl.joining").exists()


def test_killed_clients_killed_workers_and_a_restart_of_redis(own_site: Site, tmp_path: Path) -> None:
    """The output is that of an undisturbed run."""
    seed, count = int(os.environ.get("PETIOLE_TRIAL_SEED") or random.randrange(10**6)), 300
    print(f"PETIOLE_TRIAL_SEED={seed}")
    random_ = random.Random(seed)
    folder = tmp_path / "batch"
    folder.mkdir()
    rows = rows_in(folder, count, tokens=20)
    doomed, _ = own_site.start_worker(PETIOLE_FAKE_STEP_MS=10), own_site.worker(PETIOLE_FAKE_STEP_MS=10)
    for disturbance in ("worker", "client", "redis"):
        ran = start(own_site, rows, "-o", folder / "out.jsonl")

        def further(rows: int, ran: subprocess.Popen[str] = ran) -> None:
            goal = journaled(folder) + rows
            eventually(lambda: journaled(folder) >= goal or ran.poll() is not None, f"{goal} rows have ended")

        further(random_.randrange(10, 60))
        match disturbance:
            case "worker":
                doomed.ready().kill()
                further(30)
            case "redis":
                own_site.server.restart()
                further(30)
        ran.kill()
        ran.communicate()
    code, said = run(own_site, rows, "-o", folder / "out.jsonl")
    assert code == 0, said
    check(folder, count, tokens=20)
    eventually(lambda: own_site.unfinished() == 0, "no message is left")
    assert [key for key in own_site.redis.keys("celery-task-meta-b-*") if own_site.redis.ttl(key) == -1] == []

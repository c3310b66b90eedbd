"""`petiole.batch` beside what people write for themselves: a hand-made loop, which keeps a number of tasks open
and reads each stream, and a Celery group of all rows. Same worker, same rows, in turns; tokens a second.

The loop is the client of `bench serving`: what a batch loses against it is what its journal and its collecting
cost. It leaves results and streams in Redis, and begins anew after a crash; a batch does neither.

Then: how much of what rows share a sorted batch finds in a cache that is too small for all of it; and what a batch
of `petiole batch` holds in Redis and in its own process, which must not grow with the rows that have ended. What a
batch costs chat is `bench beside`."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import load
from bench.harness.checkpoints.decoders import SMALL, TINY, checkpoint
from bench.harness.load import Case
from bench.harness.report import Report, arguments, progress
from bench.queue.serving import CLIENTS, PATIENCE_S, fleet, requests

LEAST = 0.95
"""The least share of the loop's rate."""
SEEDS = itertools.count()
"""No two rounds have the same prompts."""
CASES = [Case(TINY, 512, 32, 32, 64, 7, target=LEAST), Case(SMALL, 192, 32, 48, 32, 7, target=LEAST)]


def as_batch(case: Case, seed: int) -> float:
    """Tokens a second of a batch with a journal and an output."""
    from petiole.tasks import batch

    with tempfile.TemporaryDirectory() as folder:
        made = batch(requests(case, seed), Path(folder) / "out.jsonl")
        began = time.perf_counter()
        done = made.run()
        seconds = time.perf_counter() - began
    assert (done.ended, done.failed, done.completion_tokens) == (case.n, 0, case.tokens)
    return case.tokens / seconds


def as_loop(case: Case, seed: int) -> float:
    seen = CLIENTS["asyncio"](case, seed)
    assert seen.tokens == case.tokens
    return seen.tokens / seen.seconds


def as_group(case: Case, seed: int) -> float:
    from celery import group

    from petiole.tasks import generate

    began = time.perf_counter()
    asked: list[dict[str, Any]] = requests(case, seed)
    results = group(generate.s(**request) for request in asked).apply_async().get(timeout=PATIENCE_S)
    assert sum(result["usage"]["completion_tokens"] for result in results) == case.tokens
    return case.tokens / (time.perf_counter() - began)


SIDES: Mapping[str, Callable[[Case, int], float]] = {"batch": as_batch, "a loop": as_loop, "a group": as_group}


def rates(report: Report, case: Case, threads: int) -> None:
    with checkpoint(case.shape) as model, fleet(model, case.shape, case.concurrency, threads):
        for side in SIDES.values():
            side(Case(case.shape, 4, 8, 4, 4, 1), next(SEEDS))
        rounds = []
        for first in range(case.rounds):
            names = [*SIDES][first % len(SIDES) :] + [*SIDES][: first % len(SIDES)]
            rounds.append({name: SIDES[name](case, next(SEEDS)) for name in names})
    ours = statistics.median(one["batch"] for one in rounds)
    for peer, target in (("a loop", case.target), ("a group", None)):
        ratios = [one["batch"] / one[peer] for one in rounds]
        report.add(
            f"{case.name}, against {peer}",
            ours,
            "tokens/s",
            peer=statistics.median(one[peer] for one in rounds),
            spread=(min(ratios), max(ratios)),
            target=target,
        )


# ---------------------------------------------------------------- rows that begin alike


@dataclass(frozen=True)
class Alike:
    """`groups` of `rows` each, whose prompts share their first `shared` tokens; `own` follow. `pages`: of a KV
    cache, with one token each."""

    groups: int
    rows: int
    shared: int
    own: int
    output: int
    slots: int
    pages: int

    @property
    def ideal(self) -> float:
        """The share of all prompt tokens that a cache finds which computes each shared beginning once."""
        return (self.rows - 1) / self.rows * self.shared / (self.shared + self.own)

    def requests(self, seed: int) -> list[dict[str, Any]]:
        """In no order."""
        beginnings = load.prompts(self.groups, self.shared, seed=seed)
        own = load.prompts(self.groups * self.rows, self.own, seed=seed + 1)
        options = {"max_tokens": self.output, "temperature": 0, "ignore_eos": True}
        found = [{"prompt": beginnings[k % self.groups] + rest, **options} for k, rest in enumerate(own)]
        random.Random(seed).shuffle(found)
        return found


ALIKE = Alike(groups=32, rows=12, shared=256, own=16, output=8, slots=16, pages=16 * 280 + 1024)
"""The cache has room for what 16 rows compute, and for four beginnings."""
ALIKE_QUICK = Alike(groups=2, rows=3, shared=32, own=4, output=2, slots=2, pages=256)
OF_IDEAL = 0.9


def hit_rates(report: Report, alike: Alike, threads: int, strict: bool) -> None:
    from petiole.tasks import batch

    cache = {"PETIOLE_PREFIX_CACHE": "radix", "PETIOLE_NUM_PAGES": str(alike.pages)}
    name = f"{alike.groups} x {alike.rows} rows that share {alike.shared} of {alike.shared + alike.own} tokens"
    with fleet("petiole-tiny", TINY, alike.slots, threads, **cache):
        for sort, shown in (("prefix", f"{name}, sorted: of the prompts in the cache"), (None, "  not sorted")):
            with tempfile.TemporaryDirectory() as folder:
                rows = alike.requests(1000 + 2 * next(SEEDS))
                done = batch(rows, Path(folder) / "out.jsonl", sort=sort).run()  # type: ignore[arg-type]
            assert (done.ended, done.failed) == (len(rows), 0)
            found = done.cached_prompt_tokens / done.prompt_tokens
            target = OF_IDEAL if sort and strict else None
            report.add(shown, found, "", peer=alike.ideal, target=target, note="peer: the ideal")


# ---------------------------------------------------------------- what grows with rows

MANY = 5_000
REDIS_MB, CLIENT_MB, GROWTH = 50.0, 150.0, 1.1


class Held(NamedTuple):
    """At most, in MB, beside the rate."""

    redis: float
    client: float
    rows_per_s: float


def held(n: int) -> Held:
    """What `petiole batch` with `n` short rows holds in Redis and in its process."""
    from petiole.tasks.servers import connections

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        with source.open("w") as file:
            for k in range(n):
                file.write(json.dumps({"id": k, "prompt": f"Row {k}:", "max_tokens": 1, "temperature": 0}) + "\n")
        asked = ["batch", str(source), "-o", str(Path(folder) / "out.jsonl"), "--fields", "text"]
        began, redis, client = time.perf_counter(), 0.0, 0.0
        ran = subprocess.Popen(
            [sys.executable, "-m", "petiole.tasks.commands.cli", *asked], stderr=subprocess.PIPE
        )
        while ran.poll() is None:
            found: Any = connections.streams().info("memory")
            redis, client = max(redis, found["used_memory"] / 2**20), max(client, most_memory_mb(ran.pid))
            time.sleep(0.1)
        seconds = time.perf_counter() - began
        assert ran.stderr is not None
        assert ran.returncode == 0, ran.stderr.read().decode()
        with (Path(folder) / "out.jsonl").open() as lines:
            assert sum(1 for _ in lines) == n
    return Held(redis, client, n / seconds)


def most_memory_mb(process: int) -> float:
    """The most that a process has had in memory, in MB; 0 once it has ended."""
    try:
        said = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 2**10 for line in said.splitlines() if line.startswith("VmHWM:")), 0.0)


def growth(report: Report, few: int, many: int, threads: int, strict: bool) -> None:
    with fleet("petiole-tiny", TINY, 64, threads):
        before, after = held(few), held(many)
    for what, small, large, most in (
        (f"{many:,} short rows: Redis at most", before.redis, after.redis, REDIS_MB),
        ("  the client at most", before.client, after.client, CLIENT_MB),
    ):
        report.add(what, large, "MB", target=most if strict else None, better="lower")
        limit = GROWTH if strict else None
        report.add(f"    beside {few:,} rows", large, "MB", peer=small, target=limit, better="lower")
    report.add("  the rate", after.rows_per_s, "rows/s")


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: torch decides")
    parser.add_argument("--only", choices=["rates", "alike", "growth"], help="a part of it")
    parser.add_argument("--rows", type=int, default=MANY, help="of the batch whose memory is measured")
    options = parser.parse_args(argv)
    report = Report("petiole.batch beside a hand-made loop and a Celery group")
    quick, parts = options.quick, [options.only] if options.only else ["rates", "alike", "growth"]
    if "rates" in parts:
        for case in progress([Case(TINY, 8, 16, 8, 4, 1)] if quick else CASES, "batches"):
            rates(report, case, options.threads)
            report.save(options.json)
    if "alike" in parts:
        hit_rates(report, ALIKE_QUICK if quick else ALIKE, options.threads, not quick)
        report.save(options.json)
    if "growth" in parts:
        few, many = (8, 16) if quick else (options.rows // 10, options.rows)
        growth(report, few, many, options.threads, not quick)
    report.finish(options.json)


if __name__ == "__main__":
    main()

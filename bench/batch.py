"""`petiole.batch` beside what people write for themselves: a hand-made loop, which keeps a number of tasks open
and reads each stream, and a Celery group of all rows. Same worker, same rows, in turns; tokens a second.

The loop is the client of `bench serving`: what a batch loses against it is what its journal and its collecting
cost. It leaves results and streams in Redis, and begins anew after a crash; a batch does neither.

Then, on the engine itself, what a full batch costs chat: `bench.beside`."""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import beside
from bench.checkpoints import SMALL, TINY, checkpoint
from bench.load import Case
from bench.report import Report, arguments, progress
from bench.runs import Bench
from bench.serving import CLIENTS, PATIENCE_S, fleet, requests

LEAST = 0.95
"""Of the loop's rate."""
SEEDS = itertools.count()
"""No two rounds have the same prompts."""
CASES = [Case(TINY, 768, 32, 32, 64, 3, target=LEAST), Case(SMALL, 96, 32, 48, 32, 2, target=LEAST)]


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


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=0, help="of the engine; 0: torch decides")
    parser.add_argument("--no-chat", action="store_true", help="leave out chat beside a batch")
    options = parser.parse_args(argv)
    cases = [Case(TINY, 8, 16, 8, 4, 1)] if options.quick else CASES
    report = Report("petiole.batch beside a hand-made loop and a Celery group")
    for case in progress(cases, "batches"):
        with ExitStack() as stack:
            model = stack.enter_context(checkpoint(case.shape))
            stack.enter_context(fleet(model, case.shape, case.concurrency, options.threads))
            as_loop(Case(case.shape, 2, 8, 4, 2, 1), 99)
            for name, peer, target in (("a loop", as_loop, case.target), ("a group", as_group, None)):
                report.compare(
                    f"{case.name}, against {name}",
                    "tokens/s",
                    lambda case=case: as_batch(case, next(SEEDS)),  # type: ignore[misc]
                    lambda case=case, peer=peer: peer(case, next(SEEDS)),  # type: ignore[misc]
                    rounds=case.rounds,
                    target=target,
                )
        report.save(options.json)
    if not options.no_chat:
        beside.measure(Bench(report, threads=options.threads, quick=options.quick))
    report.finish(options.json)


if __name__ == "__main__":
    main()

"""How costs grow with numbers: no cost may grow faster than in proportion.

The numbers are those of sequences side by side, tokens of a prompt, tokens in the prefix cache, tasks in the
queue, and readers of a stream. Each cost is measured where it arises, with everything else held small. The
exponent of a curve is its slope on logarithmic axes over the larger half of the sizes, where constant costs no
longer hide the growth: 1 is linear. A prompt in a model is counted by its operations, because attention makes
these grow with the square of its length."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.harness import load
from bench.harness.checkpoints.decoders import SMALL_LONG, checkpoint
from bench.harness.report import progress
from bench.harness.runs import Bench, arguments, opened
from bench.harness.writer import writing
from bench.scheduler.costs import Harness, decoding
from petiole.cache import CacheTokens, PageTable, RadixPrefixCache

Point = tuple[float, float]
Count = Callable[[float], float]
LINEAR = 1.1
LONGEST_S = 90.0
PATIENCE_S = 600.0
SHAPE = replace(SMALL_LONG, max_positions=33_280)
SHARED, OWN = 256, 64
DELTAS = 40


def sequences(n: int) -> float:
    """Microseconds of a decode step of `n` sequences, in the scheduler."""
    return 1e6 * least(decoding(n).step, 40)


def least(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the calling thread's own time."""
    best = float("inf")
    for _ in range(rounds):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return best


def prompt_on_the_host(n: int) -> float:
    """Microseconds that the scheduler and the cache need for a prompt of `n` tokens and its first token."""
    harness = Harness(2, max_model_len=n + 16, n_pages=4 * n + 64)
    rng = np.random.default_rng(0)

    def one() -> None:
        harness.submit(rng.integers(1, 1000, n), 1)
        while harness.scheduler.state.has_work:
            harness.step()

    return 1e6 * least(one, 20)


def cached_tokens(n: int) -> float:
    """Microseconds to match and insert a prompt that shares 256 of its 320 tokens, in a cache of `n` tokens."""
    rng = np.random.default_rng(0)
    table = PageTable(n + 64 * OWN + SHARED + 1, 1, 4)
    cache = RadixPrefixCache(table)
    table.set_prefix_cache(cache)
    shared = rng.integers(0, 150_000, SHARED)

    def insert() -> None:
        tokens = CacheTokens.from_text(np.concatenate([shared, rng.integers(0, 150_000, OWN)]))
        found = cache.match_prefix(tokens)
        kv = found.matched_kv_length
        pages = np.concatenate([found.matched_pages, table.allocate_pages(SHARED + OWN - kv)])
        cache.insert(tokens, pages, None, found.last_node, found.matched_token_count, kv)

    while cache.total_cached_pages < n:
        insert()
    return 1e6 * least(insert, 50)


def waiting_tasks(n: int) -> float:
    """Microseconds to start and end a request of 16 tokens while `n` wait behind it."""
    harness = Harness(64, max_model_len=64, n_pages=1 << 14)
    for prompt in np.random.default_rng(0).integers(1, 1000, (n, 16)):
        harness.submit(prompt, 1)
    counters = harness.scheduler.state.counters
    start = time.thread_time()
    while counters.finished < min(n, 128):
        harness.step()
    return 1e6 * (time.thread_time() - start) / counters.finished


def prefill(bench: Bench, lengths: Sequence[int]) -> Iterator[Point]:
    """Milliseconds to the first token of a prompt, with a model; up to the length that would take too long."""
    with (
        checkpoint(SHAPE) as model,
        bench.engine(model, SHAPE, prefix_cache="off", max_num_seqs=2) as engine,
    ):
        for length, following in zip(lengths, [*lengths[1:], 0], strict=True):
            runs = [load.at_concurrency(engine, load.requests(1, length, 1, seed=i), 1) for i in range(2)]
            cost = min(run.ttft_ms(0.5) for run in runs)
            yield length, cost
            if cost * operations(following) / operations(length) > 1e3 * LONGEST_S:
                break


def operations(length: float) -> float:
    """The operations of the prefill of one prompt."""
    return SHAPE.operations(int(length), length / 2, 1)


# ---------------------------------------------------------------- readers


def readers(n: int) -> float:
    """Microseconds of this process for each reader and delta, with `n` readers of one stream in one event loop."""
    from petiole.tasks.servers import connections
    from petiole.tasks.streams import readers
    from petiole.tasks.wire.keys import stream_keys

    task_id = f"bench-readers-{n}"
    connections.streams().delete(stream_keys(task_id).log)

    async def follow(reader: readers.AsyncStream) -> int:
        return len([delta async for delta in reader])

    async def all_of_them() -> list[int]:
        opened = [readers.AsyncStream(task_id, timeout_s=PATIENCE_S) for _ in range(n)]
        await asyncio.gather(*(reader.open() for reader in opened))
        with writing(task_id, DELTAS):
            return await asyncio.gather(*(follow(reader) for reader in opened))

    start = time.process_time()
    seen = asyncio.run(all_of_them())
    seconds = time.process_time() - start
    assert all(count >= 1 for count in seen)
    return 1e6 * seconds / (n * DELTAS)


def with_redis(sizes: Sequence[int]) -> Iterator[Point]:
    import os

    from petiole.tasks.commands.demos import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    settings.cache_clear()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    for size in progress(sizes, "readers"):
        yield size, readers(size)


# ---------------------------------------------------------------- the workload


def exponent(points: Sequence[Point], counted: Count | None) -> float:
    """The exponent with which the total cost grows with the number: 1 is linear."""
    larger = points[len(points) // 2 - 1 :] if len(points) > 3 else points
    sizes = [(counted or float)(size) for size, _ in larger]
    costs = [cost if counted else cost * size for size, cost in larger]
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    bench = opened("What one more costs", options)
    curves: dict[str, tuple[str, Count | None, list[Point]]] = {}

    def measure(what: str, unit: str, points: Iterator[Point], counted: Count | None = None) -> None:
        """`counted`: what the cost should be proportional to; without it, the cost of one should be constant."""
        found = list(points)
        curves[what] = unit, counted, found
        for size, cost in found:
            one = cost / size if counted else cost
            note = f"{one * (1e3 if unit == 'ms' else 1):,.3g} us each" if counted else ""
            bench.report.add(f"{int(size):,} {what}", cost, unit, better="lower", note=note)
        if len(found) > 2:
            bench.report.add(
                f"  {what}: exponent",
                exponent(found, counted),
                "",
                better="lower",
                target=LINEAR,
                note="against its operations" if counted is operations else "",
            )

    def over(sizes: Sequence[int], cost: Callable[[int], float], what: str) -> Iterator[Point]:
        return ((size, cost(size)) for size in progress(sizes, what))

    pick = bench.pick
    table: tuple[tuple[str, str, Sequence[int], Sequence[int], Callable[[int], float], Count | None], ...] = (
        ("sequences", "us a step", (1, 8), (1, 4, 16, 64, 128, 256, 512), sequences, float),
        ("prompt tokens on the host", "us", (16, 256), (16, 128, 1024, 4096, 32_768), prompt_on_the_host, float),
        ("cached tokens", "us a prompt", (1000,), (1000, 10_000, 100_000, 1_000_000), cached_tokens, None),
        ("waiting tasks", "us a task", (100,), (100, 1000, 10_000, 100_000), waiting_tasks, None),
    )
    for what, unit, quick, full, cost, counted in table:
        measure(what, unit, over(pick(quick, full), cost, what), counted)
    lengths = pick((16, 128), (16, 64, 256, 1024, 4096, 16_384, 32_768))
    measure("prompt tokens, 6.8 M shape", "ms", prefill(bench, lengths), operations)
    measure("readers of a stream", "us a delta", with_redis(pick((1, 4), (1, 10, 100, 1000))))
    if options.plots and not options.quick:
        from bench.harness import plots

        plots.growth(Path(options.plots) / "growth.png", curves)
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()

"""Prefix caches and the page table: the cost of reuse, beside a plain radix cache with one object for each token.

    python -m bench.scheduler.cache --json cache.json

Each figure is the best of several rounds, in which ours and the peer's take turns. The figures without a peer are
costs that the engine pays in every step."""

from __future__ import annotations

import sys
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from bench.harness.report import Report, arguments
from bench.scheduler.cache_peer import PeerCache, PeerToken
from petiole.cache import BlockCache, CacheTokens, KVCacheManager, PageTable, RadixPrefixCache

MICRO = 1e6


def timed(work: Callable[[], object], calls: int = 1) -> float:
    """The least seconds of a few calls in a row."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def in_turn(ours: Callable[[], float], peer: Callable[[], float], rounds: int) -> tuple[float, float]:
    """The least seconds of each side over alternating rounds."""
    pairs = [(ours(), peer()) for _ in range(rounds)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def text(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.integers(0, 150_000, n, dtype=np.int64)


def radix(n_pages: int) -> RadixPrefixCache:
    table = PageTable(n_pages, 1, 4)
    cache = RadixPrefixCache(table)
    table.set_prefix_cache(cache)
    return cache


def match(report: Report, n: int, target: float | None, rounds: int) -> None:
    ids = text(np.random.default_rng(n), n)
    cache, tokens = radix(n + 1), CacheTokens.from_text(ids)
    cache.insert(tokens, cache.page_table.allocate_pages(n))
    peer, objects = PeerCache(n + 1), [PeerToken(i) for i in ids.tolist()]
    peer.insert(objects, peer.allocate(n))
    a, b = in_turn(
        lambda: timed(lambda: cache.match_prefix(tokens), 5), lambda: timed(lambda: peer.match(objects), 5), rounds
    )
    report.add(f"match {n:,} cached tokens", a * MICRO, "us", peer=b * MICRO, target=target, better="lower")


def insert(report: Report, n: int, target: float | None, rounds: int) -> None:
    ids = text(np.random.default_rng(n), n)
    tokens, objects = CacheTokens.from_text(ids), [PeerToken(i) for i in ids.tolist()]
    cache = radix(n + 1)

    def ours() -> float:
        pages = cache.page_table.allocate_pages(n)
        seconds = timed(lambda: cache.insert(tokens, pages))
        cache.flush()
        return seconds

    def theirs() -> float:
        peer = PeerCache(n + 1)
        pages = peer.allocate(n)
        return timed(lambda: peer.insert(objects, pages))

    a, b = in_turn(lambda: min(ours() for _ in range(5)), lambda: min(theirs() for _ in range(5)), rounds)
    report.add(f"insert {n:,} tokens", a * MICRO, "us", peer=b * MICRO, target=target, better="lower")


def pairs(report: Report, rounds: int, count: int) -> None:
    rng = np.random.default_rng(320)
    shared = text(rng, 256)
    prompts = [np.concatenate([shared, text(rng, 64)]) for _ in range(count)]
    sequences = [CacheTokens.from_text(ids) for ids in prompts]
    objects = [[PeerToken(i) for i in ids.tolist()] for ids in prompts]

    def ours() -> float:
        cache = radix(320 * count + 1)
        allocate = cache.page_table.allocate_pages

        def work() -> None:
            for tokens in sequences:
                found = cache.match_prefix(tokens)
                kv = found.matched_kv_length
                pages = np.concatenate([found.matched_pages, allocate(320 - kv)])
                cache.insert(tokens, pages, None, found.last_node, found.matched_token_count, kv)

        return timed(work)

    def theirs() -> float:
        peer = PeerCache(320 * count + 1)

        def work() -> None:
            for tokens in objects:
                node, pages, at = peer.match(tokens)
                peer.insert(tokens, pages + peer.allocate(320 - at), node, at)

        return timed(work)

    a, b = in_turn(ours, theirs, rounds)
    report.add("match and insert, 320 tokens sharing 256", count / a, "pairs/s", peer=count / b, target=3.0)


def evict(report: Report, rounds: int, leaves: int) -> None:
    rng = np.random.default_rng(1)
    shared = text(rng, 256)
    prompts = [np.concatenate([shared, [200_000 + i], text(rng, 63)]) for i in range(leaves)]

    def ours() -> float:
        cache = radix(320 * leaves + 1)
        for ids in prompts:
            cache.insert(ids, cache.page_table.allocate_pages(320))
        return timed(lambda: [cache.evict(64) for _ in range(leaves - 1)]) / (leaves - 1)

    def theirs() -> float:
        peer = PeerCache(320 * leaves + 1)
        for ids in prompts:
            peer.insert([PeerToken(i) for i in ids.tolist()], peer.allocate(320))
        return timed(lambda: [peer.evict(64) for _ in range(leaves - 1)]) / (leaves - 1)

    a, b = in_turn(ours, theirs, rounds)
    report.add("evict a leaf of 64 pages", a * MICRO, "us", peer=b * MICRO, target=1.0, better="lower")


def memory(report: Report, sequences: int) -> None:
    """Python memory of a tree of `sequences` sequences of 100 tokens that share nothing."""
    rng = np.random.default_rng(2)
    cache = radix(100 * sequences + 1)
    tracemalloc.start()
    for i in range(sequences):
        ids = text(rng, 100)
        ids[0] = i
        cache.insert(ids, cache.page_table.allocate_pages(100))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert cache.total_cached_pages == 100 * sequences
    scaled = size / sequences * 10_000 / 1e6
    report.add("tree of 1,000,000 tokens in 10,000 sequences", scaled, "MB", target=60.0, better="lower")


def page_table(report: Report, rounds: int) -> None:
    n, length = 256, 2048
    table = PageTable(n * (length + 64) + 8192 + 1, 1, n + 2, 8192)
    manager = KVCacheManager(table, RadixPrefixCache(table))
    rng = np.random.default_rng(3)
    running = [manager.start(text(rng, length)) for _ in range(n)]
    allocations = [a for a in running if a is not None]
    rows = np.array([a.row for a in allocations], np.int32)
    lengths = np.full(n, length, dtype=np.int64)
    long_row = table.allocate()
    table.reserve(long_row, 8192)

    def step() -> float:
        nonlocal lengths
        lengths = lengths + 1
        return timed(lambda: table.reserve_many(rows, lengths))

    def one_by_one() -> float:
        nonlocal lengths
        lengths = lengths + 1
        wanted = lengths.tolist()
        return timed(lambda: [a.reserve(kv) for a, kv in zip(allocations, wanted, strict=True)])

    figures: list[tuple[str, Callable[[], float], float, str, float | None]] = [
        ("page list of a row of 8,192", lambda: timed(lambda: table.get_pages(long_row, 0, 8192)), 1, "us", None),
        ("one more position each for 256 rows, batched", step, n, "us/sequence", 0.5),
        ("one more position each for 256 rows, singly", one_by_one, n, "us/sequence", None),
    ]  # fmt: skip
    for name, work, share, unit, target in figures:
        value = min(work() for _ in range(max(rounds, 3))) * MICRO / share
        report.add(name, value, unit, target=target, better="lower")


def sequences(report: Report, rounds: int, count: int) -> None:
    """A sequence's whole life in the manager: start, publish, ten decode steps, finish."""
    rng = np.random.default_rng(4)
    shared = text(rng, 1024)
    prompts = [np.concatenate([shared, text(rng, 128)]) for _ in range(count)]
    kinds = {"radix": (RadixPrefixCache, 1), "block": (BlockCache, 16)}
    for kind, (build, page_size) in kinds.items():

        def life(build: Callable[[PageTable], object] = build, page_size: int = page_size) -> float:
            table = PageTable(200_000 // page_size, page_size, 8, 2048)
            manager = KVCacheManager(table, build(table))  # type: ignore[arg-type]

            def work() -> None:
                for ids in prompts:
                    tokens = CacheTokens.from_text(ids)
                    allocation = manager.start(tokens)
                    assert allocation is not None
                    allocation.publish(tokens, 1152)
                    for token in range(10):
                        tokens.append(token)
                        allocation.reserve(tokens.kv_length)
                    allocation.finish(tokens, tokens.kv_length - 1)

            return timed(work) / count

        value = min(life() for _ in range(rounds)) * MICRO
        report.add(f"a sequence's life: 1,152 tokens sharing 1,024, {kind}", value, "us")


def blocks(report: Report, rounds: int) -> None:
    n = 8192
    table = PageTable(2 * n // 16 + 1, 16, 4)
    cache = BlockCache(table)
    table.set_prefix_cache(cache)
    tokens = CacheTokens.from_text(text(np.random.default_rng(5), n))
    cache.insert(tokens, table.allocate_pages(n // 16))
    report.add(
        "block cache: match 8,192 cached tokens",
        min(timed(lambda: cache.match_prefix(tokens)) for _ in range(10 * rounds)) * MICRO,
        "us",
    )


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    rounds, count = (1, 50) if options.quick else (5, 200)  # short rounds: a neighbour disturbs few of them
    report = Report("Prefix caches and the page table (one thread)")
    match(report, 8192, 0.1, rounds)
    insert(report, 8192, 0.1, rounds)
    match(report, 1024, None, rounds)
    pairs(report, 6 * rounds, count)
    evict(report, 6 * rounds, count)
    memory(report, 500 if options.quick else 10_000)
    page_table(report, 4 * rounds)
    sequences(report, 2 * rounds, count // 4)
    blocks(report, rounds)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())

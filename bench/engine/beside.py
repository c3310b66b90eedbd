"""Chat beside rows of the lowest priority that fill the engine, driven directly: what the rows cost the chat, and
what the chat leaves of the rows' rate.

    alone       the chat, and nothing else
    chat        an engine equally full of chat
    off, 1.25   rows, with that `batch_step_budget`

All in turns, on one engine for each budget. A quarter of the places chat, one answer after the other. The answers
differ in length. Otherwise all chats would begin and end together, and no prompt of a chat would fall between two
tokens of another, as it does wherever people chat, with a batch beside them or without."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from bench.harness import load
from bench.harness.checkpoints.decoders import QWEN3_06B, SMALL, TINY, Shape, checkpoint
from bench.harness.report import percentile, progress
from bench.harness.runs import Bench, arguments, opened
from petiole.gpu_worker import Engine, Request
from petiole.gpu_worker.request import Delta
from petiole.gpu_worker.request.handle import Handle

LOWEST = 9
FACTOR, GAP, TTFT = 1.25, 1.30, 1.10
"""The budget; with that, a gap between tokens beside one alone; and a TTFT, before one chunk and two steps."""


@dataclass(frozen=True)
class Mix:
    """`slots` places; `n` chats in each of `rounds` rounds. The tokens of prompts and answers; of the answers of
    chats, on average."""

    shape: Shape
    slots: int
    n: int
    rounds: int
    chat: tuple[int, int] = (32, 48)
    row: tuple[int, int] = (64, 32)

    @property
    def chatting(self) -> int:
        return max(1, self.slots // 4)


MIXES = [Mix(TINY, 32, 128, 3), Mix(SMALL, 16, 48, 3, (32, 32))]
LARGE = Mix(QWEN3_06B, 8, 8, 2)
QUICK = Mix(TINY, 4, 2, 1, (4, 4), (8, 4))


class Rows:
    """Requests of one priority that are always `open_` in number, until the context ends. `tokens`: that they have
    generated. Keeps nothing of those that have ended: the garbage collector would look through it in the middle of
    a chat, as it does in no worker."""

    def __init__(self, engine: Engine, mix: Mix, open_: int, priority: int) -> None:
        self._engine, self._mix, self._priority = engine, mix, priority
        self._free, self._ended = threading.Semaphore(open_), False
        self._open: dict[int, Handle] = {}
        self.tokens = 0
        self._feeder = threading.Thread(target=self._feed)

    def _feed(self) -> None:
        numbers = itertools.count()
        for seed in itertools.count(1000):
            for request in load.requests(16, *self._mix.row, seed=seed):
                self._free.acquire()
                if self._ended:
                    return
                self._submit(next(numbers), replace(request, priority=self._priority))

    def _submit(self, number: int, request: Request) -> None:
        def on_delta(_: Handle, delta: Delta) -> None:
            self.tokens += len(delta.token_ids)

        def on_done(_: Handle) -> None:
            self._open.pop(number, None)
            self._free.release()

        handle = self._engine.submit(request, on_delta=on_delta, on_done=on_done)
        if not handle.done():
            self._open[number] = handle

    def __enter__(self) -> Rows:
        self._feeder.start()
        while self.tokens < self._mix.slots:  # they generate
            time.sleep(0.01)
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._free.release()
        self._feeder.join()
        handles = list(self._open.values())
        for handle in handles:
            handle.cancel()
        for handle in handles:
            handle.result()


@dataclass
class Seen:
    ttfts_ms: list[float]
    gaps_ms: list[float]
    rows_per_s: float = 0.0

    @property
    def ttft_ms(self) -> float:
        return percentile(self.ttfts_ms, 0.99)

    @property
    def gap_ms(self) -> float:
        return percentile(self.gaps_ms, 0.99)


def chats(engine: Engine, mix: Mix, seed: int) -> Seen:
    """The answers have half to one and a half times the mix's tokens."""
    rng, (prompt, output) = random.Random(seed), mix.chat
    requests = [
        replace(request, sampling=load.greedy(rng.randint(output // 2, output + output // 2)))
        for request in load.requests(mix.n, prompt, output, seed=seed)
    ]
    run = load.at_concurrency(engine, requests, mix.chatting)
    return Seen(run.ttfts_ms, run.gaps_ms)


def beside(engine: Engine, mix: Mix, seed: int, priority: int) -> Seen:
    """Chats beside others that fill the engine. Rows of the lowest priority wait for places, too."""
    open_ = mix.slots + mix.chatting if priority else mix.slots - mix.chatting
    with Rows(engine, mix, open_, priority) as rows:
        before, began = rows.tokens, time.perf_counter()
        seen = chats(engine, mix, seed)
        seen.rows_per_s = (rows.tokens - before) / (time.perf_counter() - began)
    return seen


def rate_alone(engine: Engine, mix: Mix, seed: int) -> float:
    """Tokens a second of rows that have the engine for themselves."""
    asked = load.requests(2 * mix.slots, *mix.row, seed=seed)
    return load.at_concurrency(engine, asked, mix.slots).tokens_per_s


def measure(bench: Bench, mixes: Sequence[Mix]) -> None:
    for mix in progress(mixes, "chat beside rows"):
        with ExitStack() as stack:
            model = stack.enter_context(checkpoint(mix.shape))
            off, limited = (
                stack.enter_context(
                    bench.engine(model, mix.shape, max_num_seqs=mix.slots, batch_step_budget=budget)
                )
                for budget in ("off", FACTOR)
            )
            _measure(bench, mix, off, limited)


def _measure(bench: Bench, mix: Mix, off: Engine, limited: Engine) -> None:
    seen: dict[str, list[Seen]] = {"alone": [], "chat": [], "off": [], "limited": []}
    rates, chunks = list[float](), list[float]()
    for seed in range(mix.rounds):
        seen["alone"].append(chats(off, mix, seed))
        seen["off"].append(beside(off, mix, 100 + seed, LOWEST))
        load.rest()
        seen["limited"].append(beside(limited, mix, 200 + seed, LOWEST))
        load.rest()
        seen["chat"].append(beside(off, mix, 300 + seed, 0))
        rates.append(rate_alone(off, mix, 400 + seed))
        chunks += load.at_concurrency(off, load.requests(4, mix.row[0], 2, seed=500 + seed), 1).ttfts_ms
    name = f"{mix.shape.name}, {mix.chatting} chats, {mix.slots} places"
    strict = not bench.quick
    for kind, what in (("off", "rows, no budget"), ("limited", f"rows, a budget of {FACTOR}")):
        mine, alone = seen[kind], seen["alone"]
        step = statistics.median(percentile(one.gaps_ms, 0.5) for one in mine)
        bound = [TTFT * one.ttft_ms + statistics.median(chunks) + 2 * step for one in alone]
        peers = bound, [one.gap_ms for one in (alone if kind == "limited" else seen["chat"])]
        limits = 1.0, GAP if kind == "limited" else 1.0
        _add(bench, f"{name}, {what}: TTFT, 99 of 100", [one.ttft_ms for one in mine], peers[0], limits[0], strict)
        _add(bench, "  between tokens, 99 of 100", [one.gap_ms for one in mine], peers[1], limits[1], strict)
        kept = statistics.median(one.rows_per_s for one in mine)
        bench.report.add("  the rows' tokens", kept, "tokens/s", peer=statistics.median(rates), note="peer: alone")


def _add(bench: Bench, name: str, ours: list[float], theirs: list[float], most: float, strict: bool) -> None:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    bench.report.add(
        name,
        statistics.median(ours),
        "ms",
        peer=statistics.median(theirs),
        spread=(min(ratios), max(ratios)),
        target=most if strict else None,
        better="lower",
    )


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--large", action="store_true", help="with the Qwen3-0.6B shape alone")
    options = parser.parse_args(argv)
    bench = opened("Chat beside a batch that fills the engine", options)
    measure(bench, [QUICK] if bench.quick else [LARGE] if options.large else MIXES)
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()

"""Conversations on a fleet: how much of a prompt is in the prefix cache of the worker that gets it.

Several workers serve one queue, and each client holds a conversation: every turn sends all messages so far, as a
chat application does, and waits for the answer. The peer is the same fleet with `PETIOLE_AFFINITY_WAIT_MS=0`,
where any worker takes any turn. First turns do not count, because nothing of them can be cached.

Then a rolling deploy under this load: each of two workers drains once its successor has started. The peer has no
`PETIOLE_KV_TIER`, so each successor begins with an empty cache."""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from typing import NamedTuple

from bench.harness.report import Report, arguments

PATIENCE_S = 120.0
WORDS = ("what", "number", "follows", "from", "again", "please", "until", "backwards", "between", "every", "third")
QUESTION_WORDS, ANSWER_TOKENS, PAUSE_S = 40, 24, 0.4
names, openings = count(), count()


class Turn(NamedTuple):
    """`asked_s`: of `time.perf_counter`. `ttft_ms`: from its submission until its client has the first delta."""

    conversation: int
    prompt_tokens: int
    cached_tokens: int
    asked_s: float
    ttft_ms: float


NO_TURN = Turn(0, 0, 0, 0.0, float("nan"))


def converse(number: int, turns: int, told: Callable[[int], object] = lambda turn: None) -> list[Turn]:
    """The second and later turns of one conversation. told: called with the number of each turn after it."""
    from petiole.tasks import GenerationResult, chat

    draw = random.Random(number)
    messages: list[dict[str, str]] = []
    seen = []
    for turn in range(turns):
        question = f"{number} {turn}: " + " ".join(draw.choices(WORDS, k=QUESTION_WORDS))
        messages.append({"role": "user", "content": question})
        time.sleep(draw.uniform(0, PAUSE_S))  # the user reads the answer, and writes the next turn
        began = time.perf_counter()
        with chat.stream(
            messages=messages, timeout_s=PATIENCE_S, max_tokens=ANSWER_TOKENS, ignore_eos=True, seed=number
        ) as deltas:
            next(deltas)
            ttft_ms = 1e3 * (time.perf_counter() - began)
            answer = deltas.result.get(timeout=PATIENCE_S)
        result = GenerationResult.model_validate(answer)
        messages.append({"role": "assistant", "content": result.text})
        usage = result.usage
        seen.append(Turn(number, usage.prompt_tokens, usage.cached_prompt_tokens, began, ttft_ms))
        told(turn)
    return seen[1:]


@contextmanager
def fleet(size: int, **settings: str) -> Iterator[None]:
    from petiole.tasks.commands.demos import demo

    with ExitStack() as stack:
        for _ in range(size):
            stack.enter_context(demo.worker(f"bench{next(names)}", PETIOLE_NUM_THREADS="1", **settings))
        yield


def load(conversations: int, turns: int) -> list[Turn]:
    """All conversations at once. None repeats an earlier one."""
    numbers = [next(openings) for _ in range(conversations)]
    with ThreadPoolExecutor(conversations) as clients:
        return list(chain.from_iterable(clients.map(lambda number: converse(number, turns), numbers)))


def measure(report: Report, size: int, conversations: int, turns: int) -> None:
    sides: list[list[Turn]] = []
    for settings in ({}, {"PETIOLE_AFFINITY_WAIT_MS": "0"}):
        with fleet(size, **settings):
            sides.append(load(conversations, turns))
    shares = [shared(side) for side in sides]
    ttfts = [statistics.median(turn.ttft_ms for turn in side) for side in sides]
    title = f"{conversations} conversations on {size} {'worker' if size == 1 else 'workers'}"
    report.add(f"{title}: in the cache", shares[0], "of the prompt", peer=shares[1])
    report.add("  from delay() to the first delta, median", ttfts[0], "ms", peer=ttfts[1], better="lower")


def shared(turns: list[Turn]) -> float:
    return sum(turn.cached_tokens for turn in turns) / max(1, sum(turn.prompt_tokens for turn in turns))


def deploy(conversations: int, turns: int, **settings: str) -> tuple[list[Turn], list[Turn]]:
    """The turns before the first worker is told to end, and the first turn of each conversation after the last one
    has ended. Each conversation waits with its last turn for that."""
    numbers, done = [next(openings) for _ in range(conversations)], threading.Semaphore(0)
    deployed = threading.Event()

    def told(turn: int) -> None:
        done.release()
        if turn == turns - 2:
            deployed.wait(5 * PATIENCE_S)

    with ExitStack() as stack, ThreadPoolExecutor(conversations) as clients:
        old = [ExitStack() for _ in range(2)]
        for worker in old:
            worker.enter_context(fleet(1, **settings))
            stack.callback(worker.close)
        talks = [clients.submit(converse, number, turns, told) for number in numbers]
        for _ in range(conversations * turns // 2):
            done.acquire(timeout=PATIENCE_S)
        begin = time.perf_counter()
        for worker in old:
            stack.enter_context(fleet(1, **settings))
            worker.close()
        end = time.perf_counter()
        deployed.set()
        seen = [turn for talk in talks for turn in talk.result()]
    after: dict[int, Turn] = {}
    for turn in seen:
        if turn.asked_s > end:
            after.setdefault(turn.conversation, turn)
    return [turn for turn in seen if turn.asked_s < begin], list(after.values())


def measure_deploy(report: Report, conversations: int, turns: int) -> None:
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as folder:
        before, after = deploy(conversations, turns, PETIOLE_KV_TIER=folder)
    cold_before, cold_after = deploy(conversations, turns)
    title = f"{conversations} conversations, both workers are replaced"
    report.add(f"{title}: in the cache before", shared(before), "of the prompt", peer=shared(cold_before))
    report.add(f"  of {len(after)} first turns behind it", shared(after), "of the prompt", peer=shared(cold_after))
    ttfts = [statistics.median(turn.ttft_ms for turn in side or [NO_TURN]) for side in (after, cold_after)]
    report.add("  from delay() to their first delta, median", ttfts[0], "ms", peer=ttfts[1], better="lower")


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    settings.cache_clear()
    report = Report("Conversations on a fleet (embedded Redis, petiole-tiny, one thread a worker)")
    for size, conversations in [(2, 4)] if options.quick else [(1, 16), (2, 16), (4, 16), (4, 64)]:
        measure(report, size, conversations, turns=3 if options.quick else 6)
    measure_deploy(report, *((4, 6) if options.quick else (16, 8)))
    report.finish(options.json)


if __name__ == "__main__":
    main()

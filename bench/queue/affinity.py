"""Conversations on a fleet: how much of a prompt is in the prefix cache of the worker that gets it.

Several workers serve one queue, and each client holds a conversation: every turn sends all messages so far, as a
chat application does, and waits for the answer. The peer is the same fleet with `PETIOLE_AFFINITY_WAIT_MS=0`,
where any worker takes any turn. First turns do not count, because nothing of them can be cached."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator
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
    """`ttft_ms`: from its submission until its client has the first delta."""

    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float


def converse(number: int, turns: int) -> list[Turn]:
    """The second and later turns of one conversation."""
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
        seen.append(Turn(result.usage.prompt_tokens, result.usage.cached_prompt_tokens, ttft_ms))
    return seen[1:]


@contextmanager
def fleet(size: int, **settings: str) -> Iterator[None]:
    from petiole.tasks.commands import demo

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
    shares = [
        sum(turn.cached_tokens for turn in side) / sum(turn.prompt_tokens for turn in side) for side in sides
    ]
    ttfts = [statistics.median(turn.ttft_ms for turn in side) for side in sides]
    title = f"{conversations} conversations on {size} {'worker' if size == 1 else 'workers'}"
    report.add(f"{title}: in the cache", shares[0], "of the prompt", peer=shares[1])
    report.add("  from delay() to the first delta, median", ttfts[0], "ms", peer=ttfts[1], better="lower")


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    from petiole.tasks.commands import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    settings.cache_clear()
    report = Report("Conversations on a fleet (embedded Redis, petiole-tiny, one thread a worker)")
    for size, conversations in [(2, 4)] if options.quick else [(1, 16), (2, 16), (4, 16), (4, 64)]:
        measure(report, size, conversations, turns=3 if options.quick else 6)
    report.finish(options.json)


if __name__ == "__main__":
    main()

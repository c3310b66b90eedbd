"""What a caller may use: requests and tokens in a minute, tasks at a time, of its tenant and of its key. One
script looks and counts, so no two requests get what is left for one.

How many tokens a request takes is known at its end. So its limits hold an estimate for it, and the script that
writes the end corrects what was held (`enter`, before all scripts): whichever gateway has died meanwhile. A task
counts as running until then, or until `GIVE_UP_S`.

Beside the limits, a queue may be too long to join. Then, too, the answer is 429, with the time after which another
try makes sense."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from petiole.gateway.core.caller import Caller, Limits, caller, tell
from petiole.gateway.core.failures import Failure, invalid
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.task_plan import Plan
from petiole.gateway.serving.auth import budgets
from petiole.gateway.serving.retry import patiently
from petiole.tasks.app.thread_executor import LOOKUPS
from petiole.tasks.fleet import queues, reports
from petiole.tasks.servers import connections
from petiole.tasks.servers.connections import Commands
from petiole.tasks.settings import settings
from petiole.tasks.submission.message_templates import PreparedMessage
from petiole.tasks.wire.keys import HELD_HEADER, account_keys
from petiole.tasks.wire.record import scripts
from petiole.tasks.wire.record.ledger import SLOT_MS

GIVE_UP_S = 3600
"""A task without an end counts as running for this long, such as one that was lost with its queue."""

CHARACTERS_A_TOKEN = 4
UNKNOWN_OUTPUT = 512
"""Tokens that are held for an output without a limit of its own."""

_SOURCE = scripts.sources(Path(__file__).parent, {"admit": {"SLOT_MS": SLOT_MS}})["admit"]
_KINDS = ("requests", "input", "output")
_SHOWN = {"requests": "requests", "input": "input-tokens", "output": "output-tokens"}
_WHY = {
    "requests": "requests a minute",
    "input": "input tokens a minute",
    "output": "output tokens a minute",
    "concurrent": "requests at a time",
}


async def admit(plan: Plan, written: Commands = (), messages: Sequence[PreparedMessage] = ()) -> dict[str, Any]:
    """Count this request, carry out these commands, and submit what the messages say, all in one round trip.
    Returns the headers for its tasks if others submit them. Raises `Failure`: 429 beyond a limit. Then no command
    was carried out."""
    asks, record = caller(), plan.record
    await budgets.check(asks)
    if not record.patient:
        await _queue(record.queue, asks)
    if not _is_limited(asks):
        commands = [*written, *(message.command() for message in messages)]
        await patiently(lambda: connections.aperform(commands))
        return {}
    if (most := asks.most("concurrent")) is not None and len(record.tasks) > most:
        raise invalid("n", f"n: must be at most {most} choices in all, got {len(record.tasks)}", "invalid_value")
    most_tokens = [[*filter(None, of)] for of in zip(*map(_tokens, asks.of_both), strict=True)]
    guessed = estimated([call.options for call in plan.calls])
    held = [min([tokens, *most]) for tokens, most in zip(guessed, most_tokens, strict=True)]
    share = [tokens // len(record.tasks) for tokens in held]
    words = [word for command in written for word in (len(command), *command)]
    for message in messages:
        command = message.with_last(HELD_HEADER, [asks.key, *share])
        words += [-len(command), *command]
    slot = await _count(asks, held, record.tasks, words)
    return {HELD_HEADER: [asks.key, *share, slot]}


async def admit_brief(queue: str) -> None:
    """Count a request that generates nothing, such as one that counts tokens. Raises `Failure`: 429 beyond a
    limit."""
    asks = caller()
    await budgets.check(asks)
    await _queue(queue, asks)
    if _is_limited(asks):
        await _count(asks, (0, 0), ())


async def _count(asks: Caller, held: Sequence[int], tasks: Sequence[str], words: Sequence[Any] = ()) -> int:
    """The slot in which it counts. `words`: of commands that the script carries out, too, because a round trip of
    their own costs more than all that it does. Raises `Failure`."""
    keys = [*account_keys(asks.name), *account_keys(asks.name, asks.key)]
    limits = [one or -1 for of in asks.of_both for one in _of(of)]
    asked = [GIVE_UP_S, *held, *limits, len(tasks), *tasks, *words]
    wait_ms, what, slot, *report = await patiently(lambda: admission()(keys, asked))
    _tell(report)
    if wait_ms:
        why = _WHY[what.decode() if isinstance(what, bytes) else what]
        raise refused(f"the limit of {why} is reached", wait_ms / 1000)
    return int(slot)


async def release(record: RequestRecord) -> None:
    """The tasks of this request run no longer, although no worker has ended them."""
    asks = caller()
    if asks.name:
        running = [account_keys(asks.name)[1], account_keys(asks.name, asks.key)[1]]
        await patiently(lambda: connections.aperform([("ZREM", key, *record.tasks) for key in running]))


def refused(why: str, wait_s: float) -> Failure:
    after_s = max(1, math.ceil(wait_s))
    message = f"{why}; try again in {after_s} s"
    return Failure(429, message, code="rate_limit_exceeded", retry_after_s=after_s)


def estimated(options: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """About how many tokens, in and out, tasks with these options take."""
    tokens_in = sum(map(_asked, options)) // CHARACTERS_A_TOKEN
    return tokens_in, sum(map(_most_output, options))


_GENERATING = ("prompt", "messages")


def _asked(options: Mapping[str, Any]) -> int:
    """Characters of what is asked. A query stands before each of its documents."""
    documents = options.get("documents", ())
    query = _size(options.get("query")) * len(documents)
    return query + _size(documents) + sum(_size(options.get(name)) for name in (*_GENERATING, "texts", "pairs"))


def _most_output(options: Mapping[str, Any]) -> int:
    if not any(name in options for name in _GENERATING):
        return 0
    limit = options.get("max_tokens")
    return limit if isinstance(limit, int) else UNKNOWN_OUTPUT


def _size(told: Any) -> int:
    """Characters of text, four for a token's id. Images are not counted."""
    match told:
        case str():
            return 0 if told.startswith("data:") else len(told)
        case int():
            return CHARACTERS_A_TOKEN
        case dict():
            return sum(_size(value) for name, value in told.items() if name not in ("role", "type"))
        case list() | tuple():
            return sum(map(_size, told))
    return 0


def _is_limited(asks: Caller) -> bool:
    return any(map(any, map(_of, asks.of_both)))


def _of(limits: Limits) -> tuple[int | None, ...]:
    return limits.requests, limits.input_tokens, limits.output_tokens, limits.concurrent


def _tokens(limits: Limits) -> tuple[int | None, ...]:
    return limits.input_tokens, limits.output_tokens


def _tell(report: Sequence[int]) -> None:
    """`x-ratelimit-*`, as OpenAI has them: of the tenant or the key, whichever has less left. `tokens` are those
    in or out, whichever has the smaller share left."""
    found: dict[str, tuple[int, int, int]] = {}
    for place, kind in enumerate(_KINDS):
        of_both = [tuple(report[at : at + 3]) for at in (3 * place, 9 + 3 * place)]
        if limited := [(limit, left, full_ms) for limit, left, full_ms in of_both if limit >= 0]:
            found[_SHOWN[kind]] = min(limited, key=lambda one: one[1])
    if tokens := [found[name] for name in ("input-tokens", "output-tokens") if name in found]:
        found["tokens"] = min(tokens, key=lambda one: one[1] / max(1, one[0]))
    for name, (limit, left, full_ms) in found.items():
        tell(f"x-ratelimit-limit-{name}", str(limit))
        tell(f"x-ratelimit-remaining-{name}", str(max(0, left)))
        tell(f"x-ratelimit-reset-{name}", f"{full_ms / 1000:g}s")


class Admission:
    """The script, on an event loop's connections."""

    def __init__(self) -> None:
        self._script = connections.async_streams().register_script(_SOURCE)

    async def __call__(self, keys: Sequence[str], args: Sequence[Any]) -> list[Any]:
        reply: list[Any] = await self._script(keys=keys, args=args)
        return reply


admission = connections.PerLoop(Admission)
"""The running event loop's."""


# ---------------------------------------------------------------- the queue


async def _queue(queue: str, asks: Caller) -> None:
    """Raises `Failure`: 429 where the queue is too long, or would not be served in time."""
    known = settings()
    if not (known.gateway_most_queued or known.gateway_most_wait_s):
        return
    if queue == known.queue and asks.name in known.weights:
        queue = f"{queue}.{asks.name}"
    waiting, rate = await line().of(queue)
    wait_s = waiting / rate if rate else 0.0
    if known.gateway_most_queued and waiting >= known.gateway_most_queued:
        raise refused(f"{waiting} requests wait already", wait_s or 5.0)
    if known.gateway_most_wait_s and wait_s > known.gateway_most_wait_s:
        raise refused(f"{waiting} requests wait, for about {wait_s:.0f} s", wait_s - known.gateway_most_wait_s)


class QueueLength:
    """How many wait in a queue, and how many of its tasks end in a second, as the workers' reports show it."""

    def __init__(self) -> None:
        self._lengths: dict[str, tuple[float, int]] = {}
        self._rates: dict[str, float] = {}
        self._ended: dict[str, int] = {}
        self._read_at = float("-inf")

    async def of(self, queue: str) -> tuple[int, float]:
        now = time.monotonic()
        if now - self._read_at > 2 * reports.REPORT_INTERVAL_S:
            before, self._read_at = self._read_at, now
            self._note(await patiently(lambda: LOOKUPS.run(reports.workers)), now - before)
        read_at, length = self._lengths.get(queue, (float("-inf"), 0))
        if now - read_at > 0.25:
            length = await patiently(lambda: queues.aqueue_length(queue))
            self._lengths[queue] = now, length
        return length, self._rates.get(queue, 0.0)

    def _note(self, workers: Iterable[reports.WorkerReport], seconds: float) -> None:
        """A worker with several queues counts for each: the wait is estimated too short, not too long."""
        rates: dict[str, float] = {}
        for worker in workers:
            if worker.lost:
                continue
            ended = sum(worker.finished.values())
            new = max(0, ended - self._ended.get(worker.worker, ended))
            self._ended[worker.worker] = ended
            for queue in worker.queues:
                rates[queue] = rates.get(queue, 0.0) + new / seconds
        self._rates = rates


line = connections.PerLoop(QueueLength)
"""The running event loop's."""

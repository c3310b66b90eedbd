"""A real worker that gets thousands of hostile messages: it never ends, every message with an id has an end,
the valid tasks among them give what they always give, and no name in a message begins a line of the log.

`PETIOLE_FUZZ_SEED` repeats a run, `PETIOLE_FUZZ_E2E_MESSAGES` sets the number."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery.states import READY_STATES

from petiole import plain
from petiole.contract.requests.count import queue_of
from petiole.contract.tasks import COUNT
from petiole.tasks.worker.broker import gate, quarantine
from tests.support.fake_engine import expected
from tests.support.hostile import Hostile, message, raw, received
from tests.support.site import Site, Worker, eventually

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("PETIOLE_FUZZ_SEED") or random.SystemRandom().randrange(2**31))
MESSAGES = int(os.environ.get("PETIOLE_FUZZ_E2E_MESSAGES", 2000))
BATCH = 400
VALID_EVERY = 20
GROWTH = 100 * 2**20
"""The most bytes that a worker may grow by through all of them."""


def collect(site: Site) -> list[dict[str, Any]]:
    """What is in the quarantine, which is emptied: it keeps only the last `KEPT`."""
    with site.redis.pipeline() as pipe:
        pipe.lrange("petiole:quarantine", 0, -1)
        pipe.delete("petiole:quarantine")
        entries, _ = pipe.execute()
    assert len(entries) < quarantine.KEPT
    return [json.loads(entry) for entry in entries]


def settled(site: Site, worker: Worker) -> bool:
    assert worker.alive(), f"seed {SEED}: the worker ended:\n{worker.output[-4000:]}"
    return site.unfinished(queue_of("petiole")) == 0


def said_id(text: bytes) -> tuple[bool, str | None]:
    """Whether a message is one, and the id that it gives its task."""
    read = gate.envelope(text)
    if isinstance(read, gate.RefusedMessage):
        return False, read.task_id
    arrived = received(read.payload)
    task = gate.task(arrived)
    if isinstance(task, gate.RefusedMessage):
        return False, task.task_id
    return not arrived.errors, task.task_id


def is_untold(text: bytes) -> bool:
    """Whether a message's task ends without a word: a count has no stream, and this one is to have no result."""
    headers = json.loads(text).get("headers") or {}
    return headers.get("task") == COUNT and bool(headers.get("ignore_result"))


def ended(site: Site, task_id: str) -> str | None:
    """How a task ended: by its result, or, if it is to have none, by its stream."""
    stored = site.redis.get(f"celery-task-meta-{task_id}")
    status = json.loads(stored)["status"] if stored else None
    if status in READY_STATES:
        return str(status)
    log = site.log(task_id)
    return "ended" if log and log[-1]["finish_reason"] else None


def test_no_message_takes_a_worker_or_goes_without_an_end(tmp_path: Path) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED} PETIOLE_FUZZ_E2E_MESSAGES={MESSAGES}")
    hostile, began, put_aside, ends = Hostile(SEED), time.monotonic(), 0, Counter[str | None]()
    sizes, longest_s = list[int](), 0.0
    with Site(tmp_path) as site:
        worker = site.worker()
        kept = {*site.redis.keys()}
        for first in range(0, MESSAGES, BATCH):
            texts: dict[str, bytes] = {}
            for number in range(first, min(first + BATCH, MESSAGES)):
                task_id = f"task-{number}"
                valid = number % VALID_EVERY == 0
                texts[task_id] = raw(message(task_id, task_id)) if valid else hostile.message(task_id)
            counts = [text for text in texts.values() if COUNT.encode() in text]
            site.redis.lpush("petiole", *(text for text in texts.values() if text not in counts))
            if counts:
                site.redis.lpush(queue_of("petiole"), *counts)
            asked_at = time.monotonic()
            assert site.app.control.ping(timeout=60, limit=1)
            ping_s = time.monotonic() - asked_at
            longest_s = max(longest_s, ping_s)
            eventually(lambda: settled(site, worker), f"seed {SEED}: what follows {first} is settled", 300)
            entries = collect(site)
            put_aside += len(entries)
            aside = {entry["task_id"] for entry in entries}
            said = {task_id: said_id(text) for task_id, text in texts.items()}
            assert len(entries) >= sum(not well for well, _ in said.values()), f"seed {SEED}, after {first}"
            for task_id, text in texts.items():
                _, its_id = said[task_id]
                if its_id is not None:
                    how = ended(site, its_id)
                    ends[how] += 1
                    told = how or its_id in aside or is_untold(text)
                    assert told, f"seed {SEED}, {task_id} has no end: {text[:3000]!r}"
            for task_id in list(texts)[::VALID_EVERY]:
                result = json.loads(site.redis.get(f"celery-task-meta-{task_id}"))["result"]
                assert result["token_ids"] == expected(task_id, 1, 2)
            forget(site, kept)
            sizes.append(worker.memory_bytes())
            print(
                f"{first + len(texts)} after {time.monotonic() - began:.0f} s, {sizes[-1] >> 20} MiB, "
                f"a ping among them {1000 * ping_s:.0f} ms",
                flush=True,
            )
        assert site.get(site.generate("alive", max_tokens=3, seed=1))["token_ids"] == expected("alive", 1, 3)
        assert worker.alive()
        assert forged(worker.output) == []
        assert max(sizes) - sizes[0] < GROWTH, f"seed {SEED}: {[size >> 20 for size in sizes]} MiB"
    took_s = time.monotonic() - began
    print(
        f"{MESSAGES} messages in {took_s:.0f} s: {dict(ends)}, {put_aside} put aside, no worker ended, "
        f"at most {max(sizes) - sizes[0] >> 20} MiB more, a ping among them took at most {longest_s:.2f} s"
    )


def forged(output: str) -> list[str]:
    """The lines of a log that are not the worker's, and those that would change a terminal."""
    return [line for line in output.split("\n") if line.startswith("[2026-01-01") or not plain.is_plain(line)]


def forget(site: Site, kept: set[bytes]) -> None:
    """Delete what would expire, so that a long run fills no Redis. `kept`: the keys from before."""
    names = [name for name in site.redis.scan_iter(count=1000) if name not in kept]
    with site.redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.ttl(name)
        lives_s = pipe.execute()
    if expiring := [name for name, life_s in zip(names, lives_s, strict=True) if life_s > 0]:
        site.redis.delete(*expiring)

"""Short tasks, and workers killed at random instants: none is lost, and none gets a second result.

The figures to hold are 200 kills and 20,000 tasks; `PETIOLE_CHAOS_MINUTES` of 10 or more runs that many.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import redis

from petiole.tasks.servers.connections import connect
from petiole.tasks.wire.keys import MARKER_PREFIX
from tests.support.site import Site, eventually

FULL = float(os.environ.get("PETIOLE_CHAOS_MINUTES", "1")) >= 10
KILLS, TASKS = (200, 20_000) if FULL else (12, 1500)
WORKERS = 4


class Results(threading.Thread):
    """Counts the final results that are stored, by listening to the result backend's announcements."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self.pubsub = connect(url).pubsub(ignore_subscribe_messages=True)
        self.pubsub.psubscribe("celery-task-meta-*")
        self.start()

    def run(self) -> None:
        while True:
            try:
                message = self.pubsub.get_message(timeout=1)
            except (redis.RedisError, OSError, ValueError):
                return
            if message and b'"SUCCESS"' in message["data"]:
                name = message["channel"].decode().removeprefix("celery-task-meta-")
                if not name.startswith(MARKER_PREFIX):  # each worker stores one, a result of no task
                    self.counts[name] += 1


def test_killed_workers_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    chance = random.Random(int(os.environ.get("PETIOLE_CHAOS_SEED", "1")))
    settings = {"PETIOLE_VISIBILITY_TIMEOUT_S": 2, "PETIOLE_MAX_ATTEMPTS": 1000, "PETIOLE_MAX_NUM_SEQS": 64}
    with Site(tmp_path, **settings) as site:
        results = Results(site.url)
        for worker in [site.start_worker() for _ in range(WORKERS)]:
            worker.ready()
        names = [f"k{i}" for i in range(TASKS)]
        feeder = threading.Thread(target=feed, args=(site, names), daemon=True)
        feeder.start()
        for _ in range(KILLS):
            time.sleep(chance.random() / 2)
            alive = [worker for worker in site.workers if worker.alive()]
            chance.choice(alive).kill()
            site.start_worker()
        feeder.join()
        eventually(lambda: site.unfinished() == 0, "all work is done", 300.0)
        eventually(lambda: len(results.counts) == TASKS, "all results", 30.0)
        assert set(results.counts) == set(names)
        assert [name for name, count in results.counts.items() if count > 1] == []


def feed(site: Site, names: list[str]) -> None:
    """Keep the queue filled, but not for ever ahead of the workers."""
    for name in names:
        while site.queued() > 500:
            time.sleep(0.05)
        site.generate(name, max_tokens=1, submission={"task_id": name})

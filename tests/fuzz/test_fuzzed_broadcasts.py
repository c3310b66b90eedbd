"""Real workers that get thousands of hostile control commands, events and replies: none ends, none stalls, and a
task gives what it always gives.

`PETIOLE_FUZZ_SEED` repeats a run, `PETIOLE_FUZZ_BROADCASTS` sets the number."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import expected
from tests.support.hostile_broadcasts import NESTED, ROUTES, HostileBroadcasts
from tests.support.site import Site, Worker

pytestmark = pytest.mark.e2e

SEED = int(os.environ.get("PETIOLE_FUZZ_SEED") or random.SystemRandom().randrange(2**31))
MESSAGES = int(os.environ.get("PETIOLE_FUZZ_BROADCASTS", 3000))
BATCH = 300
COMMANDS, EVENTS = "/0.celery.pidbox", "/0.celeryev/"


def serves(site: Site, *workers: Worker) -> None:
    """All workers answer commands, and a task runs."""
    names = {worker.node for worker in workers}
    answered: set[str] = set()
    for _ in range(60):
        assert all(worker.alive() for worker in workers), f"seed {SEED}: {workers[0].output[-4000:]}"
        answered |= {name for reply in site.app.control.ping(timeout=1) for name in reply}
        if answered >= names:
            break
    assert answered >= names, f"seed {SEED}: {names - answered} do not answer"
    for command, arguments in (("rate_limit", {"rate_limit": 0}), ("time_limit", {})):
        site.app.control.broadcast(command, arguments={"task_name": "tasks.generate", **arguments}, reply=True)
    assert site.get(site.generate("alive", max_tokens=3, seed=1))["token_ids"] == expected("alive", 1, 3)


def test_one_publication_ends_no_worker(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        workers = [site.worker(gossip=True) for _ in range(2)]
        for channel in (COMMANDS, f"{EVENTS}worker.heartbeat"):
            hostile = HostileBroadcasts(SEED)
            whole: dict[str, Any] = {"properties": {"delivery_tag": "1", "delivery_info": {}}, "headers": {}}
            for raw in (NESTED, json.dumps({**whole, "body": NESTED.decode()}).encode(), b"x" * 2**23):
                site.redis.publish(channel, raw)
            site.redis.publish(channel, hostile.on_a_channel(5, "celery.pidbox", ""))
            serves(site, *workers)


def test_no_command_and_no_event_ends_or_stalls_a_worker(tmp_path: Path) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED} PETIOLE_FUZZ_BROADCASTS={MESSAGES}")
    hostile = HostileBroadcasts(SEED)
    with Site(tmp_path) as site:
        worker = site.worker(gossip=True)
        for _ in range(0, MESSAGES, BATCH):
            for _ in range(BATCH):
                if hostile.random.random() < 0.6:
                    site.redis.publish(COMMANDS, hostile.on_a_channel(hostile.command(), "celery.pidbox", ""))
                else:
                    route = hostile.random.choice(ROUTES)
                    raw = hostile.on_a_channel(hostile.event(), "celeryev", route)
                    site.redis.publish(EVENTS + route, raw)
            serves(site, worker)
        site.redis.client_kill_filter(_type="normal", skipme=True)
        serves(site, worker)  # what it has in mind does not bar a new connection
        late = site.worker(gossip=True)  # and does not end the next worker
        serves(site, worker, late)

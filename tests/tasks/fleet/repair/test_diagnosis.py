"""`petiole doctor`: each fault is found alone, and a healthy fleet has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from petiole.tasks.fleet.queues import QueueReport
from petiole.tasks.fleet.repair.diagnosis import Facts, Server, diagnose
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.fleet.restarts import Life

INFO = {
    "maxmemory_policy": "noeviction",
    "maxmemory": 1000,
    "used_memory": 100,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok",
}
SERVER = Server("streams", info=INFO, round_trip_s=0.001)
WORKER = WorkerReport(worker="w1", version="1", model="m", fingerprint="f", queues=["petiole"], age_s=1.0)
QUEUE = QueueReport(queue="petiole", waiting=3, by_priority={0: 3}, workers=1)
HEALTHY = Facts([SERVER], {}, [WORKER], {"w1": Life(started_at=0, starts=1)}, [QUEUE], 0, 10_000.0)


def server(**changed: Any) -> dict[str, Any]:
    return {"servers": [replace(SERVER, info=INFO | changed)]}


def worker(**changed: Any) -> dict[str, Any]:
    return {"workers": [WORKER.model_copy(update=changed)]}


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no Redis": ("PetioleRedisDown", {"unreachable": {"broker": "refused"}}),
    "no writes": ("PetioleRedisReadOnly", {"servers": [replace(SERVER, refused="OOM")]}),
    "eviction": ("RedisEvicts", server(maxmemory_policy="allkeys-lru")),
    "nearly full": ("RedisNearlyFull", server(used_memory=950)),
    "disk of the log": ("RedisDiskFails", server(aof_last_write_status="err")),
    "disk of snapshots": ("RedisDiskFails", server(rdb_last_bgsave_status="err")),
    "no log": ("RedisForgets", server(aof_enabled=0)),
    "slow": ("PetioleStreamsLate", {"servers": [replace(SERVER, round_trip_s=0.5)]}),
    "clock": ("ClocksDiffer", {"servers": [replace(SERVER, ahead_s=-60.0)]}),
    "nobody serves": ("PetioleNoWorker", {"queues": [QUEUE.model_copy(update={"workers": 0})]}),
    "lost": ("PetioleWorkerLost", worker(age_s=60.0)),
    "paused": ("PetioleWorkerNotReady", worker(state="paused")),
    "silenced": ("PetioleWorkerNotReady", worker(state="silenced")),
    "hung": ("PetioleLeaseOld", worker(lease_age_s=20.0)),
    "backend": ("PetioleResultsNotStored", worker(pending_completions=2)),
    "late streams": ("PetioleStreamsLate", worker(streams_behind_s=3.0)),
    "memory": ("PetioleMemoryLow", worker(memory_left_bytes=10)),
    "crash loop": (
        "PetioleWorkerRestarts",
        {"lives": {"w1": Life(started_at=9_990, starts=9, last_exit="killed")}},
    ),
    "versions": (
        "VersionsDiffer",
        {"workers": [WORKER, WORKER.model_copy(update={"worker": "w2", "version": "2"})]},
    ),
    "models": (
        "ModelsDiffer",
        {"workers": [WORKER, WORKER.model_copy(update={"worker": "w2", "fingerprint": "g"})]},
    ),
    "poison": ("PetioleQuarantine", {"quarantined": 1}),
    "much poison": ("PetioleQuarantine", {"quarantined": 2}),
}


def test_a_healthy_fleet_has_no_finding() -> None:
    assert diagnose(HEALTHY) == []
    assert diagnose(replace(HEALTHY, servers=[replace(SERVER, info=None)])) == [], "who may not ask knows no fault"
    shut_down = {"w1": Life(started_at=9_990, starts=2, last_exit="0")}
    assert diagnose(replace(HEALTHY, lives=shut_down)) == []


@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_alone(name: str, fault: dict[str, Any]) -> None:
    assert [finding.name for finding in diagnose(replace(HEALTHY, **fault))] == [name]


def test_a_lost_worker_has_no_other_finding() -> None:
    report = WORKER.model_copy(update={"age_s": 60.0, "state": "paused", "pending_completions": 3})
    assert [finding.name for finding in diagnose(replace(HEALTHY, workers=[report]))] == ["PetioleWorkerLost"]

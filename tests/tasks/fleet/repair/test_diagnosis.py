"""`petiole doctor`: each fault is found alone, and a healthy fleet has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from petiole.tasks.fleet.queues import QueueReport
from petiole.tasks.fleet.repair.diagnosis import Facts, Server, diagnose
from petiole.tasks.fleet.repair.gateways import Gateway
from petiole.tasks.fleet.repair.probes import Answers
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.fleet.restarts import Life
from petiole.tasks.fleet.usage import BudgetShare

INFO = {
    "maxmemory_policy": "noeviction",
    "maxmemory": 1000,
    "used_memory": 100,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "rdb_last_bgsave_status": "ok",
}
SERVER = Server("streams", Answers("", 0.001, 0.0), INFO)
WORKER = WorkerReport(worker="w1", version="1", model="m", fingerprint="f", queues=["petiole"], age_s=1.0)
QUEUE = QueueReport(queue="petiole", waiting=3, by_priority={0: 3}, workers=1)
SHARE = BudgetShare("acme", "day_tokens", 90, 100)
GATEWAY = Gateway("http://g")
HEALTHY = Facts(
    [SERVER], {}, [WORKER], {"w1": Life(started_at=0, starts=1)}, [QUEUE], 0, [SHARE], [GATEWAY], 10_000.0
)


def server(**changed: Any) -> dict[str, Any]:
    return {"servers": [replace(SERVER, info=INFO | changed)]}


def answers(*said: Any) -> dict[str, Any]:
    return {"servers": [replace(SERVER, answers=Answers(*said))]}


def worker(**changed: Any) -> dict[str, Any]:
    return {"workers": [WORKER.model_copy(update=changed)]}


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no Redis": ("PetioleRedisDown", {"unreachable": {"broker": "refused"}}),
    "no writes": ("PetioleRedisReadOnly", answers("OOM", 0.001, 0.0)),
    "eviction": ("RedisEvicts", server(maxmemory_policy="allkeys-lru")),
    "nearly full": ("RedisNearlyFull", server(used_memory=950)),
    "disk of the log": ("RedisDiskFails", server(aof_last_write_status="err")),
    "disk of snapshots": ("RedisDiskFails", server(rdb_last_bgsave_status="err")),
    "no log": ("RedisForgets", server(aof_enabled=0)),
    "slow": ("PetioleRedisSlow", answers("", 0.5, 0.0)),
    "clock": ("ClocksDiffer", answers("", 0.001, -60.0)),
    "nobody serves": ("PetioleNoWorker", {"queues": [QUEUE.model_copy(update={"queue": "petiole.typo"})]}),
    "lost": ("PetioleWorkerLost", worker(age_s=60.0) | {"queues": []}),
    "paused": ("PetioleWorkerNotReady", worker(state="paused") | {"queues": []}),
    "silenced": ("PetioleWorkerNotReady", worker(state="silenced") | {"queues": []}),
    "draining": ("PetioleWorkerNotReady", worker(state="draining") | {"queues": []}),
    "hung": ("PetioleLeaseOld", worker(lease_age_s=20.0)),
    "backend": ("PetioleResultsNotStored", worker(pending_completions=2)),
    "late streams": ("PetioleStreamsLate", worker(streams_behind_s=3.0)),
    "memory": ("PetioleMemoryLow", worker(memory_left_bytes=10)),
    "disk": ("PetioleDiskNearlyFull", worker(disks={"/rows": 0.04, "/models": 0.06})),
    "crash loop": (
        "PetioleWorkerRestarts",
        {"lives": {"w1": Life(started_at=9_990, starts=9, last_exit="killed")}},
    ),
    "versions": (
        "VersionsDiffer",
        {"workers": [WORKER, WORKER.model_copy(update={"worker": "w2", "version": "2"})]},
    ),
    "models": (
        "PetioleModelsDiffer",
        {"workers": [WORKER, WORKER.model_copy(update={"worker": "w2", "fingerprint": "g"})]},
    ),
    "failover": ("PetioleRedisChanged", worker(redis_changed_s=30.0)),
    "no replica": (
        "RedisWithoutReplica",
        {"servers": [replace(SERVER, watched=True, info=INFO | {"connected_slaves": 0})]},
    ),
    "budget": ("PetioleBudgetUsedUp", {"budgets": [SHARE._replace(used=100)]}),
    "gateway without rights": ("PetioleGatewayRights", {"gateways": [GATEWAY._replace(denied=["hget x"])]}),
    "no gateway": ("PetioleGatewayDown", {"gateways": [GATEWAY._replace(away="refused")]}),
    "poison": ("PetioleQuarantine", {"quarantined": 1}),
    "much poison": ("PetioleQuarantine", {"quarantined": 2}),
}


def test_a_healthy_fleet_has_no_finding() -> None:
    assert diagnose(HEALTHY) == []
    assert diagnose(replace(HEALTHY, servers=[replace(SERVER, info=None)])) == [], "who may not ask knows no fault"
    assert diagnose(replace(HEALTHY, workers=[WORKER.model_copy(update={"redis_changed_s": 9_000.0})])) == []
    shut_down = {"w1": Life(started_at=9_990, starts=2, last_exit="0")}
    assert diagnose(replace(HEALTHY, lives=shut_down)) == []


@pytest.mark.parametrize(("name", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found_alone(name: str, fault: dict[str, Any]) -> None:
    assert [finding.name for finding in diagnose(replace(HEALTHY, **fault))] == [name]


def test_remarks_come_last_and_are_no_problems() -> None:
    facts = replace(HEALTHY, budgets=[SHARE._replace(used=100)], quarantined=1, **worker(redis_changed_s=30.0))
    found = [(finding.name, finding.grade) for finding in diagnose(facts)]
    remarks = [("PetioleRedisChanged", "remark"), ("PetioleBudgetUsedUp", "remark")]
    assert found == [("PetioleQuarantine", "problem"), *remarks]


def test_an_upgrade_under_way_is_a_remark() -> None:
    states = {"draining": "remark", "reloading": "remark", "paused": "problem", "silenced": "problem"}
    for state, grade in states.items():
        others = [WORKER.model_copy(update={"worker": name, "version": "2"}) for name in ("w2", "w3")]
        found = diagnose(replace(HEALTHY, workers=[WORKER.model_copy(update={"state": state}), *others]))
        grades = {finding.name: finding.grade for finding in found}
        assert grades == {"PetioleWorkerNotReady": grade, "VersionsDiffer": "remark"}


def test_workers_that_cannot_report_are_not_called_lost() -> None:
    facts = replace(HEALTHY, **worker(age_s=60.0), **answers("OOM", 0.001, 0.0))
    assert [finding.name for finding in diagnose(facts)] == ["PetioleRedisReadOnly"]


def test_tasks_that_wait_for_a_paused_worker_have_none() -> None:
    found = diagnose(replace(HEALTHY, **worker(state="paused")))
    assert [finding.name for finding in found] == ["PetioleNoWorker", "PetioleWorkerNotReady"]


def test_a_queue_that_is_not_the_fleets_may_be_another_applications() -> None:
    own = QUEUE.model_copy(update={"queue": "petiole.post", "known": False})
    [finding] = diagnose(replace(HEALTHY, queues=[own]))
    assert (finding.name, "another application's" in finding.what) == ("PetioleNoWorker", True)


def test_of_many_commands_that_a_gateway_may_not_call_some_are_named() -> None:
    for number, more in ((5, ""), (7, ", and 2 more, which http://g/ready names")):
        denied = [f"get {i}" for i in range(number)]
        [finding] = diagnose(replace(HEALTHY, gateways=[GATEWAY._replace(denied=denied)]))
        assert finding.what.endswith(f"get 3, get 4{more}")


def test_a_lost_worker_has_no_other_finding() -> None:
    report = WORKER.model_copy(update={"age_s": 60.0, "state": "paused", "pending_completions": 3})
    found = diagnose(replace(HEALTHY, workers=[report], queues=[]))
    assert [finding.name for finding in found] == ["PetioleWorkerLost"]

"""What is too big, too much or too full fails alone, or waits; the worker lives."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import TaskRevokedError

from petiole.tasks.app.configuration import configuration
from petiole.tasks.errors import ResultTooLarge
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import Settings
from tests.support.fake_engine import expected
from tests.support.site import RedisServer, Site, Worker, eventually

LONG = 1_500


def test_urgent_tasks_overtake_the_queue(own_site: Site) -> None:
    site = own_site
    worker = site.worker("-c", "1", PETIOLE_MAX_NUM_SEQS=1)
    blocker = site.generate("blocker", max_tokens=300)
    site.streaming(blocker)
    order: list[str] = []
    late = site.generate("late", max_tokens=1, submission={"priority": 9})
    soon = site.generate("soon", max_tokens=1, submission={"priority": 0})
    eventually(lambda: late.state == soon.state == "SUCCESS", "both are done")
    for line in worker.output.splitlines():
        order += [name for name, result in (("late", late), ("soon", soon)) if f"{result.id}] received" in line]
    assert order == ["soon", "late"]


def test_a_task_of_another_priority_is_seen_while_the_worker_is_idle(own_site: Site) -> None:
    own_site.worker()
    for priority in (9, 6, 3, 0):
        assert own_site.get(own_site.generate("idle", max_tokens=1, submission={"priority": priority}), 5)


def test_a_full_redis_is_survived(tmp_path: Path) -> None:
    with Site(tmp_path, options=("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")) as site:
        worker = site.worker(PETIOLE_FAKE_STEP_MS=5)
        result = site.generate("through", max_tokens=300, seed=3)
        site.streaming(result, 20)
        site.redis.config_set("maxmemory", "1mb")
        eventually(lambda: "Redis does not take them" in worker.output, "the worker says so")
        held = len(site.tokens(result))
        site.redis.config_set("maxmemory", "64mb")
        assert held < 300
        assert site.get(result, 60)["token_ids"] == site.tokens(result) == expected("through", 3, 300)
        assert site.get(site.generate("after", max_tokens=2, seed=1))["token_ids"] == expected("after", 1, 2)
        assert worker.alive()


def test_an_idle_worker_does_not_go_on_saying_that_redis_is_full(tmp_path: Path) -> None:
    with Site(tmp_path, options=("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")) as site:
        worker = site.worker()
        site.redis.config_set("maxmemory", "1mb")

        def refused() -> int:
            return sum(figures["rejected_calls"] for figures in site.redis.info("commandstats").values())

        eventually(lambda: "Redis refuses" in worker.output, "the worker says so")
        before = refused()
        eventually(lambda: refused() > before + 20, "it goes on trying")
        site.redis.config_set("maxmemory", "64mb")
        assert site.get(site.generate("after", max_tokens=2, seed=1))["token_ids"] == expected("after", 1, 2)
        assert worker.output.count("Redis refuses") <= 10  # one or two for each channel: tasks, commands, counts
        assert "Traceback" not in worker.output


def test_a_task_that_ends_while_redis_is_full_keeps_its_result(tmp_path: Path) -> None:
    with Site(tmp_path, options=("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")) as site:
        worker = site.worker()
        result = site.generate("ends", max_tokens=100, seed=3)
        site.streaming(result, 5)
        site.redis.config_set("maxmemory", "1mb")
        eventually(lambda: "Redis does not take them" in worker.output, "the worker says so")
        site.redis.config_set("maxmemory", "64mb")
        assert site.get(result, 60)["token_ids"] == expected("ends", 3, 100)
        eventually(lambda: site.held() == 0, "acknowledged")
        assert worker.alive()


def test_a_result_backend_that_is_full_for_a_while_gets_the_result_later(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    results = RedisServer(tmp_path / "results", "--maxmemory-policy", "noeviction")
    try:
        with Site(tmp_path, PETIOLE_RESULT_BACKEND=results.url) as site:
            site.app.conf.result_backend = results.url
            worker = site.worker()
            full = connect(results.url)
            full.config_set("maxmemory", 1)
            result = site.generate("stored later", max_tokens=3, seed=1)
            eventually(lambda: "cannot be stored yet" in worker.output, "the worker says so")
            full.config_set("maxmemory", 0)
            assert site.get(result)["token_ids"] == expected("stored later", 1, 3)
            assert worker.alive()
    finally:
        results.kill()


def test_a_result_that_is_too_big_fails_that_task_alone_and_at_once(own_site: Site) -> None:
    site = own_site
    worker = site.worker(PETIOLE_RESULT_MAX_BYTES=4096)
    big = site.generate("big", max_tokens=600, seed=1)
    beside = site.generate("beside", max_tokens=50, seed=2)
    with pytest.raises(ResultTooLarge) as caught:
        site.get(big)
    assert caught.value.size > caught.value.limit == 4096
    assert site.tokens(big) == expected("big", 1, 600)
    last = site.log(big)[-1]
    assert (last["finish_reason"], last["error"]["type"]) == ("error", "ResultTooLarge")
    assert site.get(beside)["token_ids"] == expected("beside", 2, 50)
    assert "cannot be stored yet" not in worker.output
    eventually(lambda: site.held() == 0, "acknowledged")


def test_what_is_revoked_has_no_result_that_could_be_too_big(own_site: Site) -> None:
    site = own_site
    site.worker(PETIOLE_RESULT_MAX_BYTES=1024)
    big = site.generate("big", max_tokens=3000, seed=1)
    site.streaming(big, 500)
    big.revoke(terminate=True)
    with pytest.raises(TaskRevokedError):
        site.get(big)
    last = site.log(big)[-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("cancelled", "revoked")


def received(worker: Worker, names: dict[str, str]) -> list[str]:
    """The names of the tasks in the order in which the worker took them; `names` by task id."""
    found = (re.search(r"\[(\S+)\] received", line) for line in worker.output.splitlines())
    return [names[match[1]] for match in found if match and match[1] in names]


@pytest.mark.parametrize("submission", [{"priority": 3}, {"queue": "other"}])
def test_a_backlog_is_taken_without_waiting_wherever_it_lies(own_site: Site, submission: dict[str, Any]) -> None:
    """It holds five at a time. A wait for every five of them would take minutes."""
    site = own_site
    for i in range(1500):
        last = site.generate(f"b{i}", max_tokens=2, submission=submission)
    site.worker("-Q", "petiole,other", PETIOLE_MAX_NUM_SEQS=1)
    assert site.get(last)


def test_a_worker_that_is_full_of_what_can_wait_still_takes_what_cannot(own_site: Site) -> None:
    site = own_site
    worker = site.worker(PETIOLE_MAX_NUM_SEQS=1)
    blocker = site.generate("blocker", max_tokens=300, submission={"priority": 9})
    site.streaming(blocker)
    flood = [site.generate(f"f{i}", max_tokens=100, submission={"priority": 9}) for i in range(10)]
    eventually(lambda: site.held() == 5, "slot and look-ahead are full")
    urgent = site.generate("urgent", max_tokens=2, seed=1, submission={"priority": 0})
    eventually(lambda: site.held() == 6, "taken nevertheless")
    assert not site.log(flood[-1])
    assert site.get(urgent)["token_ids"] == expected("urgent", 1, 2)
    for result in flood:
        site.get(result)
    assert worker.alive()


@pytest.mark.parametrize("submission", [{"countdown": 3600}, {"priority": 3, "expires": 0.001}])
def test_what_leaves_its_room_at_once_is_taken_without_waiting(own_site: Site, submission: dict[str, Any]) -> None:
    """A wait for every five of them would take minutes."""
    site = own_site
    for i in range(1000):
        site.generate(f"m{i}", max_tokens=1, submission={"ignore_result": True, **submission})
    behind = site.generate("behind", max_tokens=1, submission={"priority": 9})
    site.worker(PETIOLE_MAX_NUM_SEQS=1)
    assert site.get(behind)


def test_autoscale_holds_as_many_as_its_maximum(own_site: Site) -> None:
    site = own_site
    site.worker("--autoscale=6,2")
    tasks = [site.generate(f"a{i}", max_tokens=2000) for i in range(8)]
    eventually(lambda: site.held() == 6, "six of them are taken")
    for result in tasks:
        result.revoke(terminate=True)


def test_more_scheduled_tasks_than_a_worker_may_hold_leave_it_as_it_was(own_site: Site) -> None:
    site = own_site
    worker = site.worker("--", "worker.eta_task_limit=20")
    later = [site.generate(f"l{i}", max_tokens=1, submission={"countdown": 1}) for i in range(40)]
    for result in later:
        site.get(result)
    assert "worker_eta_task_limit is 20" in worker.output
    tasks = [site.generate(f"n{i}", max_tokens=2000) for i in range(14)]
    eventually(lambda: site.held() == 12, "slots and look-ahead are full")
    for result in tasks:
        result.revoke(terminate=True)


def test_tenants_share_slots_by_weight(tmp_path: Path) -> None:
    weights = "big=3,small=1"
    with Site(tmp_path, PETIOLE_TENANT_WEIGHTS=weights) as site:
        site.app.conf.update(configuration(Settings(broker_url=site.url, tenant_weights=weights)))
        worker = site.worker("-c", "1", PETIOLE_MAX_NUM_SEQS=1)
        site.streaming(site.generate("blocker", max_tokens=600))
        names = {}
        for tenant, count in [("big", 24), ("small", 24), ("nobody", 8)]:
            for i in range(count):
                submission = {"headers": {"tenant": tenant}, "task_id": f"{tenant}-{i}"}
                names[site.generate("x", max_tokens=1, submission=submission).id] = tenant
        assert [site.redis.llen(queue) for queue in ("petiole.big", "petiole.small", "petiole")] == [24, 24, 8]
        eventually(lambda: len(received(worker, names)) == len(names), "all are taken")
        first = Counter(received(worker, names)[:20])
        for tenant, share in {"big": 12, "small": 4, "nobody": 4}.items():
            assert abs(first[tenant] - share) <= 1, first
        eventually(lambda: site.held() == 0, "all are done")


def test_a_job_that_has_ended_is_freed_without_the_garbage_collector(own_site: Site) -> None:
    """Otherwise the worker would grow between two collections, and each would stop all streams for longer."""
    site = own_site
    worker = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.uncollected:UncollectedEngine")
    results = [site.generate(f"j{i}", max_tokens=LONG if i < 3 else 5) for i in range(20)]
    for _ in range(5):
        site.generate("longer than the model", max_tokens=10**6)
        site.app.send_task("tasks.generate", kwargs={"prompt": "x", "no_such_option": 1})
    for result in results[:3]:
        site.streaming(result)
        site.app.control.revoke(result.id, terminate=True)
    for result in results[3:]:
        site.get(result)
    eventually(lambda: site.unfinished() == 0, "acknowledged")

    def in_memory() -> int:
        stats = site.app.control.inspect([worker.node], timeout=5).stats() or {}
        return sum(one["pool"]["engine"]["jobs_in_memory"] for one in stats.values()) if stats else -1

    eventually(lambda: in_memory() == 0, "all are freed")

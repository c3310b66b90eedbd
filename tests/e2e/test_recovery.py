"""A worker may end in any way at any time: another goes on at the next token, and nobody sees one twice."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from petiole.tasks.app.application import BACKENDS
from petiole.tasks.errors import WorkersLost
from petiole.tasks.servers import embedded
from tests.support.fake_engine import MAX_MODEL_LEN, expected
from tests.support.proxy import Proxy
from tests.support.site import RedisServer, Site, eventually

LONG = 600


def test_after_sigkill_the_next_delta_comes_long_before_the_lease_expires(tmp_path: Path) -> None:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=3600) as site:
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        result = site.generate("survivor", max_tokens=MAX_MODEL_LEN - 1, seed=3)
        site.streaming(result, 50)
        seen = looks(site)
        eventually(lambda: looks(site) >= seen + 10, "each of the two has seen the other")
        site.holder().kill()
        before = len(site.tokens(result))
        eventually(lambda: len(site.tokens(result)) > before, "the next delta")
        value = site.get(result)
        assert value["token_ids"] == site.tokens(result) == expected("survivor", 3, MAX_MODEL_LEN - 1)
        assert value["attempt"] >= 2


def test_the_only_worker_killed_and_started_again_goes_on_long_before_the_lease_expires(tmp_path: Path) -> None:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=3600) as site:
        first = site.worker()
        result = site.generate("survivor", max_tokens=MAX_MODEL_LEN - 1, seed=3)
        site.streaming(result, 50)
        eventually(lambda: site.redis.keys("petiole:server:*"), "it is noted that the worker is present")
        first.kill()
        second = site.worker()
        value = site.get(result)
        assert value["token_ids"] == site.tokens(result) == expected("survivor", 3, MAX_MODEL_LEN - 1)
        assert value["attempt"] >= 2
        assert "gave back 1 message of" in second.output


def test_after_a_restart_of_redis_the_lease_alone_decides_of_a_worker_that_was_there_before(
    tmp_path: Path,
) -> None:
    """It may be about to return. It is stopped here, as if it were slow."""
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=3600) as site:
        first = site.worker()
        result = site.generate("slow", max_tokens=MAX_MODEL_LEN - 1, seed=3)
        site.streaming(result, 50)
        eventually(lambda: site.redis.keys("petiole:server:*"), "it is noted that the worker is present")
        first.signal(signal.SIGSTOP)
        site.server.restart()
        second = site.worker()
        seen = looks(site)
        eventually(lambda: looks(site) >= seen + 6, "the other has looked")
        assert "gave back" not in second.output
        first.signal(signal.SIGCONT)
        assert site.get(result)["token_ids"] == expected("slow", 3, MAX_MODEL_LEN - 1)
        assert "lost" not in first.output.replace("broker lost", "")


def looks(site: Site) -> int:
    """How often workers have looked who is present."""
    stats: dict[str, Any] = site.redis.info("commandstats")
    return sum(stat["calls"] for name, stat in stats.items() if name.startswith("cmdstat_pubsub"))


def test_a_worker_whose_subscription_is_cut_while_its_engine_stalls_is_not_taken_for_dead(tmp_path: Path) -> None:
    """It hangs for longer than half a lease, so that it does not renew it."""
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=40) as site:
        first = site.worker()
        hanging = site.generate("hang:5", max_tokens=20, seed=1)
        site.streaming(hanging, 5)
        second = site.worker()
        eventually(lambda: "the engine hangs" in first.output, "it hangs")
        seen = looks(site)
        while looks(site) < seen + 20:
            for one in site.redis.client_list(_type="pubsub"):
                if one["psub"] == "0":  # kombu's, for control commands, are patterns
                    site.redis.client_kill_filter(_id=one["id"])
            time.sleep(0.05)
        assert "gave back" not in second.output


def test_a_dead_workers_waiting_tasks_go_back_too(own_site: Site) -> None:
    site = own_site
    first = site.worker()
    results = [site.generate(f"r{i}", max_tokens=100, seed=i) for i in range(20)]
    site.streaming(results[0])
    first.kill()
    site.worker()
    for i, result in enumerate(results):
        assert site.get(result)["token_ids"] == expected(f"r{i}", i, 100)
    eventually(lambda: site.held() == 0, "nothing is held")


def test_a_stopped_worker_loses_its_tasks_and_cannot_write_when_it_goes_on(own_site: Site) -> None:
    site = own_site
    first = site.worker()
    result = site.generate("zombie", max_tokens=LONG, seed=5)
    site.streaming(result, 20)
    first.signal(signal.SIGSTOP)
    second = site.worker()
    eventually(lambda: site.state(result).get("attempt") == "2", "taken over")
    first.signal(signal.SIGCONT)
    value = site.get(result)
    assert value["token_ids"] == site.tokens(result) == expected("zombie", 5, LONG)
    assert value["attempt"] >= 2
    eventually(lambda: "a newer attempt owns it" in first.output, "the first worker was told")
    assert site.get(site.generate("after", max_tokens=3, seed=1))["token_ids"] == expected("after", 1, 3)
    assert first.alive()
    assert second.alive()


def test_a_worker_that_gets_its_task_back_before_it_hears_that_another_had_it_begins_anew(own_site: Site) -> None:
    site = own_site
    first = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.late_publisher:LatePublisherEngine")
    result = site.generate("to and fro", max_tokens=LONG, seed=6)
    site.streaming(result, 20)
    first.signal(signal.SIGSTOP)
    second = site.worker()
    eventually(lambda: site.log(result)[-1]["attempt"] == 2, "taken over")
    second.stop()
    assert site.log(result)[-1]["finish_reason"] is None
    first.signal(signal.SIGCONT)
    assert site.get(result)["token_ids"] == site.tokens(result) == expected("to and fro", 6, LONG)
    assert "a newer attempt owns it" in first.output
    eventually(lambda: site.unfinished() == 0, "acknowledged")


@pytest.mark.parametrize("dies", [True, False])
def test_a_task_whose_newest_attempt_holds_no_message_is_watched_by_who_does(own_site: Site, dies: bool) -> None:
    """The first worker begins the task when the second one has its message already."""
    site = own_site
    first = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.late_intake:LateIntakeEngine")
    callback = site.signature("callback ", max_tokens=1)
    result = site.generate("watched", max_tokens=LONG, seed=7, submission={"link": callback})
    eventually(lambda: site.held() == 1, "taken")
    first.signal(signal.SIGSTOP)
    second = site.worker()
    site.streaming(result, 20)
    first.signal(signal.SIGCONT)
    eventually(lambda: site.log(result)[-1]["attempt"] == 2, "taken over")
    if dies:
        first.kill()
    value = site.get(result)
    assert value["token_ids"] == site.tokens(result) == expected("watched", 7, LONG)
    assert value["attempt"] == 2 + dies
    assert "a newer attempt owns it" in second.output
    eventually(lambda: site.unfinished() == 0, "acknowledged")
    assert len(site.redis.keys("petiole:{*}:log")) == 2  # the task and one callback


def test_a_worker_whose_engine_hangs_loses_its_tasks(own_site: Site) -> None:
    site = own_site
    site.worker()
    hanging = site.generate("hang:5", max_tokens=20, seed=1)
    site.streaming(hanging, 5)
    second = site.worker(PETIOLE_MAX_ATTEMPTS=1)
    with pytest.raises(WorkersLost) as caught:
        site.get(hanging)
    assert caught.value.text == "".join(f"w{token} " for token in expected("hang:5", 1, 5))
    assert second.alive()


def test_a_warm_shutdown_hands_over_at_once(tmp_path: Path) -> None:
    """Not when its lease ends, which would be in an hour."""
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=3600, PETIOLE_DRAIN_SECONDS=0) as site:
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        result = site.generate("handed over", max_tokens=LONG, seed=2)
        site.streaming(result, 20)
        first = site.holder()
        first.signal(signal.SIGTERM)
        eventually(lambda: [delta for delta in site.log(result) if delta["attempt"] == 2], "the next delta")
        assert first.ended() == 0
        assert site.get(result)["token_ids"] == site.tokens(result) == expected("handed over", 2, LONG)
        assert "deaths" not in site.state(result)


def test_a_warm_shutdown_gives_back_in_the_order_of_arrival(own_site: Site) -> None:
    site = own_site
    first = site.worker()
    running = [site.generate(f"o{i}", max_tokens=LONG, seed=i, submission={"task_id": f"o{i}"}) for i in range(12)]
    site.streaming(running[7])
    eventually(lambda: site.held() == 12, "the worker holds them")
    last = site.generate("last", max_tokens=1, submission={"task_id": "last"})
    assert first.stop() == 0
    queue = [entry.decode() for entry in site.redis.lrange("petiole", 0, -1)]
    found = [
        next(name for name in [*(f"o{i}" for i in range(12)), "last"] if f'"id": "{name}"' in entry)
        for entry in queue
    ]
    assert found == ["last", *(f"o{i}" for i in reversed(range(12)))]
    assert all('"redelivered": true' in entry for entry in queue[1:])
    site.worker()
    for i, result in enumerate(running):
        assert site.get(result)["token_ids"] == expected(f"o{i}", i, LONG)
    site.get(last)


def test_a_warm_shutdown_finishes_what_it_can(own_site: Site) -> None:
    site = own_site
    first = site.worker(PETIOLE_DRAIN_SECONDS=20)
    results = [site.generate(f"f{i}", max_tokens=200, seed=i) for i in range(8)]
    site.streaming(results[-1])
    assert first.stop() == 0
    for i, result in enumerate(results):
        assert site.get(result)["token_ids"] == expected(f"f{i}", i, 200)
        assert site.get(result)["attempt"] == 1
    assert site.unfinished() == 0


def test_a_cold_shutdown_gives_everything_back(own_site: Site) -> None:
    site = own_site
    first = site.worker(PETIOLE_DRAIN_SECONDS=60)
    result = site.generate("cold", max_tokens=LONG, seed=4)
    site.streaming(result, 20)
    first.signal(signal.SIGQUIT)
    eventually(lambda: not first.alive(), "the worker ends", 10.0)
    assert site.queued() == 1
    site.worker()
    assert site.get(result)["token_ids"] == expected("cold", 4, LONG)
    assert "deaths" not in site.state(result)


def test_a_broken_engine_ends_the_worker_and_its_tasks_go_on_elsewhere(own_site: Site) -> None:
    site = own_site
    first = site.worker()
    innocent = site.generate("innocent", max_tokens=LONG, seed=6)
    site.streaming(innocent, 10)
    site.generate("fatal:3", max_tokens=10)
    eventually(lambda: not first.alive(), "the worker ends")
    assert first.process.returncode == 70
    site.redis.ltrim("petiole", -1, -1)  # the poison is not what this test is about
    site.worker()
    assert site.get(innocent)["token_ids"] == expected("innocent", 6, LONG)


@pytest.mark.parametrize("tokens", [0, 7])
def test_a_task_that_kills_its_workers_is_given_up_with_what_it_had(own_site: Site, tokens: int) -> None:
    site = own_site
    poison = site.generate(f"die:{tokens}", max_tokens=20, seed=1)
    for _ in range(3):
        worker = site.start_worker()
        eventually(lambda worker=worker: not worker.alive(), "killed by the task")
    survivor = site.worker()
    with pytest.raises(WorkersLost) as caught:
        site.get(poison)
    assert caught.value.deaths == 3
    last = site.log(poison)[-1]
    assert (last["finish_reason"], last["error"]["type"]) == ("error", "WorkersLost")
    assert caught.value.text == "".join(delta["text"] for delta in site.log(poison))
    assert survivor.alive()


@pytest.mark.parametrize("task", ["tasks.generate", "foreign.die"])
@pytest.mark.parametrize("hidden", ["another object", "said not to be", "no place for it"])
def test_a_poison_whose_message_hides_that_it_is_redelivered_is_given_up(
    own_site: Site, hidden: str, task: str
) -> None:
    site, foreign = own_site, task == "foreign.die"
    headers = {"delivery_info": {"a": 1}} if hidden == "another object" else {}
    poison = site.app.send_task(task, kwargs={} if foreign else {"prompt": "die:0"}, headers=headers)
    envelope = json.loads(site.redis.lpop("petiole"))
    if hidden == "said not to be":
        envelope["properties"]["delivery_info"]["redelivered"] = False
    elif hidden == "no place for it":
        envelope["properties"]["delivery_info"] = {}
    site.redis.lpush("petiole", json.dumps(envelope))
    more = ("-I", "tests.support.foreign_tasks") if foreign else ()
    for _ in range(2):
        worker = site.start_worker(*more, PETIOLE_MAX_ATTEMPTS=2)
        eventually(lambda worker=worker: not worker.alive(), "killed by the task")
    survivor = site.worker(*more, PETIOLE_MAX_ATTEMPTS=2)
    with pytest.raises(WorkersLost):
        site.get(poison)
    assert survivor.alive()


def test_an_id_that_is_used_twice_is_one_task_and_no_death(own_site: Site) -> None:
    site = own_site
    workers = [site.worker("-c", "1", PETIOLE_MAX_ATTEMPTS=1) for _ in range(2)]
    result = site.generate("twice", max_tokens=1500, seed=1, submission={"task_id": "order"})
    site.streaming(result)
    site.generate("twice", max_tokens=1500, seed=1, submission={"task_id": "order"})
    assert site.get(result)["token_ids"] == expected("twice", 1, 1500) == site.tokens(result)
    assert sum("a newer attempt owns it" in worker.output for worker in workers) == 1
    eventually(lambda: site.held() == 0, "both messages are acknowledged")


def test_a_finished_task_that_is_delivered_again_is_not_run_again(own_site: Site) -> None:
    site = own_site
    site.worker()
    callback = site.signature("callback ", max_tokens=1)
    result = site.generate("once", max_tokens=5, submission={"link": callback, "task_id": "once"})
    value = site.get(result)
    message = None
    first = site.workers[0]
    first.stop()
    result_again = site.generate("once", max_tokens=5, submission={"link": callback, "task_id": "once"})
    message = site.redis.lrange("petiole", 0, -1)
    assert len(message) == 1
    site.worker()
    eventually(lambda: site.unfinished() == 0, "done with")
    assert site.get(result_again) == value
    assert len(site.redis.keys("petiole:{*}:log")) == 2  # the task and one callback


def test_another_model_does_not_continue_a_stream(own_site: Site) -> None:
    from petiole.tasks.errors import ModelChanged

    site = own_site
    first = site.worker()
    result = site.generate("mine", max_tokens=LONG)
    site.streaming(result, 5)
    first.stop()
    site.worker(PETIOLE_MODEL="another")
    with pytest.raises(ModelChanged, match=r"fake:petiole-tiny.*fake:another"):
        site.get(result)


def test_a_redis_restart_is_survived(own_site: Site) -> None:
    site = own_site
    worker = site.worker()
    result = site.generate("through", max_tokens=2 * LONG, seed=8)
    site.streaming(result, 100)
    site.server.restart()
    value = site.get(result, 60)
    assert value["token_ids"] == site.tokens(result) == expected("through", 8, 2 * LONG)
    assert worker.alive()
    assert site.get(site.generate("after", max_tokens=3, seed=1))["token_ids"] == expected("after", 1, 3)


def test_a_redis_that_hangs_for_a_while_is_survived(own_site: Site) -> None:
    """It answers nothing and closes nothing, for longer than a worker waits for an answer."""
    site = own_site
    worker = site.worker()
    results = [site.generate(f"h{i}", max_tokens=LONG, seed=i) for i in range(20)]
    site.streaming(results[7], 50)
    site.server.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: "Redis does not take them" in worker.output, "the worker stops waiting")
    finally:
        site.server.process.send_signal(signal.SIGCONT)
    for i, result in enumerate(results):
        assert site.get(result)["token_ids"] == site.tokens(result) == expected(f"h{i}", i, LONG)
    assert worker.alive()
    eventually(lambda: site.unfinished() == 0, "acknowledged")


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_ends_although_redis_hangs(own_site: Site, busy: bool) -> None:
    site = own_site
    worker = site.worker()
    results = [site.generate(f"e{i}", max_tokens=LONG, seed=i) for i in range(20 * busy)]
    if busy:
        site.streaming(results[7], 50)
    site.server.process.send_signal(signal.SIGSTOP)
    try:
        worker.signal(signal.SIGTERM)
        worker.ended()
    finally:
        site.server.process.send_signal(signal.SIGCONT)
    site.worker()
    for i, result in enumerate(results):
        assert site.get(result)["token_ids"] == site.tokens(result) == expected(f"e{i}", i, LONG)


SERVERS = sorted({shutil.which("redis-server") or embedded.server_binary(), embedded.server_binary()})


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("planned", [False, True])
def test_a_failover_to_a_replica_is_survived(tmp_path: Path, planned: bool, server: str) -> None:
    """The address moves to the replica, as it does behind a load balancer or a name. Its master is dead; or it has
    become a replica, refuses writes, and keeps the connections that it has, also those that only listen."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    (tmp_path / "replica").mkdir()
    options = ("--port", port)
    with Site(tmp_path, binary=server, options=options, PETIOLE_VISIBILITY_TIMEOUT_S=2) as site:
        replica = RedisServer(tmp_path / "replica", "--replicaof", "127.0.0.1", port, binary=server)
        address = Proxy(tmp_path / "p.sock", site.server.socket)
        site.use(address.url)
        site.app.loader.override_backends = BACKENDS
        worker = site.worker()
        master, promoted = (redis.Redis(unix_socket_path=str(one.socket)) for one in (site.server, replica))
        eventually(lambda: promoted.info("replication")["master_link_status"] == "up", "in step")
        site.get(site.generate("before", max_tokens=1))  # this process listens on the old master now
        results = [site.generate(f"r{i}", max_tokens=LONG, seed=i) for i in range(20)]
        site.streaming(results[7], 50)
        submitted = master.info("replication")["master_repl_offset"]
        eventually(lambda: promoted.info("replication")["slave_repl_offset"] >= submitted, "replicated")
        promoted.replicaof("NO", "ONE")
        if planned:
            address.upstream = replica.socket
            master.replicaof("127.0.0.1", 1)
        else:
            site.server.kill()
            address.lead_to(replica.socket)
        for i, result in enumerate(results):
            value = site.get(result)
            assert value["token_ids"] == site.tokens(result) == expected(f"r{i}", i, LONG)
            assert site.app.AsyncResult(result.id).state == "SUCCESS"
        assert worker.alive()
        eventually(lambda: site.unfinished() == 0, "acknowledged")
        replica.kill()


@pytest.mark.parametrize("garbage", [b"HTTP/1.1 502 Bad Gateway\r\n\r\n", b"\x00\xff" * 40], ids=["HTTP", "bytes"])
def test_a_redis_that_answers_garbage_is_waited_for_like_one_that_is_away(
    own_site: Site, tmp_path: Path, garbage: bytes
) -> None:
    site = own_site
    address = Proxy(tmp_path / "p.sock", site.server.socket)
    worker = site.worker(PETIOLE_BROKER_URL=address.url)  # the producer sees the real one

    def waits_for_redis(since: int) -> bool:
        return not worker.alive() or "trying again in" in worker.output[since:].lower()

    results = [site.generate(f"g{i}", max_tokens=LONG, seed=i) for i in range(5)]
    site.streaming(results[4], 20)
    for _ in range(2):
        since = len(worker.output)
        address.garble(garbage)
        eventually(lambda since=since: waits_for_redis(since), "the worker waits for Redis")
        address.garble(None)
        assert worker.alive()
        assert site.get(site.generate("after", max_tokens=3, seed=1))["token_ids"] == expected("after", 1, 3)
    for i, result in enumerate(results):
        assert site.get(result)["token_ids"] == site.tokens(result) == expected(f"g{i}", i, LONG)
    assert "the server does not answer as Redis does" in worker.output
    assert "Unrecoverable" not in worker.output
    eventually(lambda: site.unfinished() == 0, "acknowledged")


def test_a_lost_connection_does_not_double_the_work(own_site: Site) -> None:
    site = own_site
    worker = site.worker()
    results = [site.generate(f"c{i}", max_tokens=LONG, seed=i) for i in range(7)]
    site.streaming(results[-1], 10)
    site.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    for i, result in enumerate(results):
        value = site.get(result)
        assert value["token_ids"] == expected(f"c{i}", i, LONG)
        assert value["attempt"] == 1
    assert worker.alive()
    eventually(lambda: site.unfinished() == 0, "acknowledged")


def test_the_cancel_flag_reaches_the_worker_that_goes_on(own_site: Site) -> None:
    from celery.exceptions import TaskRevokedError

    site = own_site
    first = site.worker()
    result = site.generate("flagged", max_tokens=LONG)
    site.streaming(result, 10)
    first.kill()
    site.redis.hset(f"petiole:{{{result.id}}}:asked", "cancel", 1)
    site.worker()
    with pytest.raises(TaskRevokedError):
        site.get(result)
    assert site.log(result)[-1]["finish_reason"] == "cancelled"


def test_a_retry_of_celerys_starts_a_new_stream(own_site: Site) -> None:
    site = own_site
    site.worker()
    options = {"task_id": "again"}
    first = site.get(site.generate("again", max_tokens=5, seed=1, submission=options))
    site.app.backend.forget("again")
    second = site.get(site.generate("again", max_tokens=5, seed=1, submission={**options, "retries": 1}))
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert site.tokens("again") == expected("again", 1, 5)


def test_without_redis_a_worker_says_so_and_waits(own_site: Site) -> None:
    site = own_site
    site.server.kill()
    worker = site.start_worker()
    eventually(lambda: "no connection to" in worker.output, "one clear line")
    assert "Traceback" not in worker.output
    site.server.start()
    worker.ready()
    assert site.get(site.generate("finally", max_tokens=1))


@pytest.mark.parametrize("setting", ["min-replicas-to-write", "maxmemory"])
def test_a_worker_waits_for_a_redis_that_takes_no_writes(own_site: Site, setting: str) -> None:
    """As a master does that has just been promoted and has no replica yet, or one that is full."""
    site = own_site
    site.redis.config_set(setting, 1)
    worker = site.start_worker()
    eventually(lambda: worker.output.count("Redis takes no writes") > 1, "it says so, and tries again")
    assert worker.alive()
    assert "Traceback" not in worker.output
    site.redis.config_set(setting, 0)
    worker.ready()
    assert site.get(site.generate("hello", max_tokens=3, seed=1))["token_ids"] == expected("hello", 1, 3)

"""`petiole metrics` beside a fleet, scraped as Prometheus does."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.fleet import exporter
from petiole.tasks.fleet.reports import LOST_AFTER_S, WorkerReport, report, workers
from petiole.tasks.wire.keys import SENT_HEADER, WORKERS_KEY, own_queue
from petiole.tasks.worker.reports.reporter import engine_figures
from tests.support.scraping import Figures, exporting
from tests.support.site import REPOSITORY, RedisServer, Site, eventually
from tests.support.toy_engine import request, toy_engine

pytestmark = pytest.mark.e2e


def test_a_fleet_is_scraped(own_site: Site) -> None:
    with exporting(own_site) as scrape:
        at_first = scrape()
        assert all(at_first.pop(("petiole_redis_round_trip_seconds", of)) > 0 for of in ("broker", "streams"))
        assert at_first == {
            ("petiole_redis_up", ""): 1,
            ("petiole_redis_writable", "broker"): 1,
            ("petiole_redis_writable", "streams"): 1,
            ("petiole_quarantine_messages", ""): 0,
            **{("petiole_queue_messages", f"{step} petiole"): 0 for step in (0, 3, 6, 9)},
            ("petiole_queue_workers", "petiole"): 0,
            ("petiole_queue_models", "petiole"): 0,
        }
        now: dict[str, Any] = {"headers": {SENT_HEADER: time.time()}}
        results = [own_site.generate(f"prompt {i}", max_tokens=5, submission=now) for i in range(3)]
        results.append(own_site.generate("too long", max_tokens=10**6, submission={"priority": 7, **now}))
        waiting = scrape()
        assert [waiting["petiole_queue_messages", f"{step} petiole"] for step in (0, 3, 6, 9)] == [3, 0, 1, 0]
        worker = own_site.worker()
        for result in results[:3]:
            own_site.get(result)
        with pytest.raises(Exception, match="max_tokens"):
            own_site.get(results[3])

        def all_ended() -> Figures | None:
            figures = scrape()
            ends = sum(value for (name, _), value in figures.items() if name == "petiole_requests_total")
            return figures if ends == 4 else None

        figures = eventually(all_ended, "all ends are reported")
        assert figures["petiole_requests_total", "length"] == 3
        assert figures["petiole_requests_total", "error"] == 1
        assert figures["petiole_failures_total", "caller"] == 1
        assert figures["petiole_failures_total", "server"] == 0
        assert figures["petiole_worker_starts_total", ""] == 1
        assert figures["petiole_generation_tokens_total", ""] == 15
        assert figures["petiole_request_generation_tokens_count", ""] == 3
        assert figures["petiole_request_generation_tokens_sum", ""] == 15
        assert figures["petiole_request_generation_tokens_bucket", "2.0"] == 0
        assert figures["petiole_request_generation_tokens_bucket", "5.0"] == 3
        assert figures["petiole_e2e_request_latency_seconds_bucket", "+Inf"] == 3
        assert figures["petiole_num_requests_running", ""] == 0
        assert figures["petiole_kv_cache_pages", "used"] == 0
        assert figures["petiole_queue_messages", "0 petiole"] == 0
        assert figures["petiole_broker_time_seconds_count", "0"] == 3
        assert figures["petiole_broker_time_seconds_count", "6"] == 1
        assert figures["petiole_broker_time_seconds_bucket", "0.005 0"] == 0, "no worker ran when they were sent"
        assert figures["petiole_worker_up", ""] == figures["petiole_worker_ready", ""] == 1
        assert figures["petiole_queue_workers", "petiole"] == figures["petiole_worker_state", "ready"] == 1
        assert worker.stop() == 0
        assert ("petiole_worker_up", "") not in scrape()


def test_the_queues_of_all_workers_are_counted(own_site: Site) -> None:
    """A model has queues of its own beside them, and waiting tasks count beyond the last worker's death."""
    worker = own_site.worker("-Q", "other,petiole")
    with exporting(own_site) as scrape:
        own = [own_queue(queue, "petiole-tiny") for queue in ("other", "petiole")]
        for queue in ("other", *own):
            eventually(lambda queue=queue: scrape().get(("petiole_queue_messages", f"0 {queue}")) == 0, queue)
        worker.kill()
        own_site.generate("waits", submission={"queue": "other"})
        queues = {queue: value for (name, queue), value in scrape().items() if name == "petiole_queue_messages"}
        assert {queue for queue, value in queues.items() if value} == {"0 other"}
        assert set(queues) == {f"{step} {queue}" for queue in ("petiole", "other", *own) for step in (0, 3, 6, 9)}


def test_a_queue_that_is_no_list_hides_no_other(own_site: Site) -> None:
    own_site.generate("waits", submission={"priority": 3})
    own_site.redis.set("petiole", "somebody's")
    with exporting(own_site) as scrape:
        figures = scrape()
        assert figures["petiole_redis_up", ""] == figures["petiole_queue_messages", "3 petiole"] == 1
        assert ("petiole_queue_messages", "0 petiole") not in figures


def test_a_lost_worker_is_down_and_has_no_figures(own_site: Site) -> None:
    report(own_site.redis, WorkerReport(worker="a@host", running=3))
    at, _, message = own_site.redis.hget(WORKERS_KEY, "a@host").partition(b" ")
    own_site.redis.hset(WORKERS_KEY, "a@host", f"{float(at) - 2 * LOST_AFTER_S} ".encode() + message)
    with exporting(own_site) as scrape:
        figures = scrape()
        assert figures["petiole_worker_up", ""] == figures["petiole_worker_ready", ""] == 0
        assert ("petiole_num_requests_running", "") not in figures


def test_layers_that_keep_a_state_have_figures(own_site: Site) -> None:
    with toy_engine(machine={"snapshots": 30}) as engine:
        for _ in range(2):
            engine.generate([request([1 + i % 40 for i in range(50)], 4, ignore_eos=True)])
        told = engine_figures(engine.stats())
    with exporting(own_site) as scrape:

        def reported() -> Figures | None:
            report(own_site.redis, WorkerReport(worker="a@host", **told))
            return found if ("petiole_recurrent_states", "held") in (found := scrape()) else None

        figures = eventually(reported, "the report is fresh")
    assert figures["petiole_recurrent_states", "held"] == 0
    assert figures["petiole_recurrent_states", "free"] == told["states"]["states_total"] == 8
    assert figures["petiole_state_snapshots", "cached"] == figures["petiole_state_snapshot_changes_total", "made"]
    assert figures["petiole_state_snapshots", "cached"] > 0
    assert figures["petiole_state_lookup_tokens_total", "hit"] == 49


def test_a_worker_that_drains_is_seen_until_it_has_ended(own_site: Site) -> None:
    worker = own_site.worker(PETIOLE_FAKE_STEP_MS=20, PETIOLE_DRAIN_SECONDS=60)
    result = own_site.generate("long", max_tokens=400, seed=1)
    own_site.streaming(result)
    with exporting(own_site) as scrape:
        worker.signal(signal.SIGTERM)
        drains = eventually(
            lambda: not (now := scrape()).get(("petiole_worker_ready", ""), 1) and now, "it drains"
        )
        assert drains["petiole_worker_up", ""] == drains["petiole_num_requests_running", ""] == 1
        assert worker.ended() == 0
        assert ("petiole_worker_up", "") not in scrape()
    assert own_site.get(result)["finish_reason"] == "length"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"now {}",
        b"0 {",
        b"0 {}",
        b'0 {"worker": "b@host", "running": "many"}',
        b'0 {"worker": "b@host", "distributions": {"ttft_s": {"bounds": [1, 2], "counts": [1], "sum": 1}}}',
    ],
)
def test_a_report_that_cannot_be_read_hides_no_other(own_site: Site, message: bytes) -> None:
    report(own_site.redis, WorkerReport(worker="a@host", running=3))
    seconds, _ = own_site.redis.time()
    own_site.redis.hset(WORKERS_KEY, "b@host", message.replace(b"0 ", b"%d " % seconds, 1))
    assert [worker.worker for worker in workers(own_site.redis)] == ["a@host"]
    with exporting(own_site) as scrape:
        figures = scrape()
        assert figures["petiole_redis_up", ""] == 1
        assert figures["petiole_num_requests_running", ""] == 3


def test_redis_goes_and_comes(own_site: Site) -> None:
    with exporting(own_site) as scrape:
        own_site.server.kill()
        assert scrape() == {("petiole_redis_up", ""): 0}
        own_site.server.start()
        assert scrape()["petiole_redis_up", ""] == 1


def test_a_broker_that_hangs_is_as_good_as_away(own_site: Site, tmp_path: Path) -> None:
    (tmp_path / "broker").mkdir()
    broker = RedisServer(tmp_path / "broker")
    own_site.environment |= {"PETIOLE_REDIS_URL": own_site.url, "PETIOLE_BROKER_URL": broker.url}
    try:
        with exporting(own_site) as scrape:
            assert scrape()["petiole_redis_up", ""] == 1
            broker.process.send_signal(signal.SIGSTOP)
            assert scrape() == {("petiole_redis_up", ""): 0}
    finally:
        broker.kill()


def test_every_metric_is_documented() -> None:
    page = (REPOSITORY / "docs" / "monitoring.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `petiole_")]
    documented = {name.removesuffix("_total") for row in rows for name in re.findall(r"`(petiole_\w+)`", row)}
    fleet_wide = {"petiole_redis_up", "petiole_quarantine_messages", "petiole_budget_used_ratio"}
    fleet_wide |= {"petiole_usage_requests", "petiole_usage_tokens"}
    ours = (*exporter._servers({}), *exporter._queues({}, [], set()))
    ours = (*ours, *exporter._lives({}), *exporter._states([]), *exporter._figures([]))
    assert documented == fleet_wide | {metric.name for metric in ours}


@pytest.mark.parametrize("port", ["65536", "-1", "http", "1.5"])
def test_a_port_that_is_none(port: str) -> None:
    command = [sys.executable, "-m", "petiole.tasks.commands.cli", "metrics", f"--port={port}"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert ended.returncode == 2
    assert f"must be a number from 0 to 65535, got '{port}'" in ended.stderr

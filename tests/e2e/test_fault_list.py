"""The twelve faults of a fleet, each brought about in real processes. Each is named by an alert within a scrape of
15 s and a `for:` of 30, by a panel, and by `petiole doctor`; and nothing is named that is not there.

The figures are scraped before the fault and behind it. promtool then has minutes of them in a moment, a scrape
each 15 seconds, with the rules and the panels' queries that are deployed."""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import redis
import yaml
from prometheus_client.samples import Sample

from petiole.tasks.fleet.repair.diagnosis import LOW_DISK, SLOW_S
from tests.chaos.test_chaos import small_disk
from tests.deploy.test_monitoring import HERE, asked, promtool, renderer
from tests.e2e.conftest import WatchedSite
from tests.support.client import client
from tests.support.gateway import Gateway
from tests.support.nursery import petiole
from tests.support.rights import SECRET, grant, grant_gateway
from tests.support.scraping import exporter, samples_of
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

SCRAPE_S, FOR_S = 15, 30
BEFORE, BEHIND = 40, 40
"""Scrapes before the fault, and behind it."""
LATER_S = 300
"""So long after the fault nothing else is named either."""

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""By name and labels. Times are in seconds from the scrape."""


class Panel(NamedTuple):
    """`shows`: a condition in PromQL that some of the panel's values meet."""

    board: str
    title: str
    shows: str


class Fleet:
    """A site with a worker, as Prometheus and an operator see it."""

    def __init__(self, site: Site, url: str, gateway: Gateway | None = None) -> None:
        self.site, self.gateway = site, gateway
        self._targets = {"petiole": url}
        if gateway is not None:
            self._targets["petiole-gateway"] = f"{gateway.root}/metrics"

    def doctor(self) -> set[str]:
        asked = [] if self.gateway is None else ["--gateway", self.gateway.url]
        ran = petiole("doctor", "--json", *asked, **self.site.environment, PETIOLE_GATEWAY_PORT=1)
        assert ran.stdout, ran.stderr
        return {finding["name"] for finding in json.loads(ran.stdout)}

    def scrape(self) -> Samples:
        found: Samples = {}
        for job, url in self._targets.items():
            of = {"job": job, "instance": f"{job}:1"}
            for sample in (*samples_of(url), Sample("up", {}, 1.0)):
                value = sample.value - time.time() * sample.name.endswith("_time_seconds")
                found[sample.name, tuple(sorted({**sample.labels, **of}.items()))] = value
        return found

    def shows(self, name: str, value: float) -> bool:
        """Whether a sample of this name has this value."""
        return any(sample == value for (of, _), sample in self.scrape().items() if of == name)


@contextmanager
def fleet(site: Site, *, gateway: dict[str, Any] | None = None, disk: Path | None = None) -> Iterator[Fleet]:
    """`disk`: the only one that its worker needs room on, or none: this machine's own disk may be nearly full."""
    nowhere = site.folder / "nowhere"
    site.environment |= {"PETIOLE_BATCH_FILES": str(disk or nowhere), "HF_HUB_CACHE": str(nowhere)}
    with ExitStack() as stack:
        site.worker()
        url = stack.enter_context(exporter(site))
        serving = None
        if gateway is not None:
            serving = stack.enter_context(Gateway(site.folder, **{"PETIOLE_BROKER_URL": site.url, **gateway}))
            assert serving.url
        yield Fleet(site, url, serving)


# ------------------------------------------------------------ what Prometheus says of two scrapes


def series(before: Samples, behind: Samples) -> list[dict[str, str]]:
    found = []
    for name, labels in {**before, **behind}:
        runs = []
        for samples, scrapes, first in ((before, BEFORE, 0), (behind, BEHIND, BEFORE)):
            value = samples.get((name, labels))
            if value is None:
                runs.append(f"stale _x{scrapes - 1}" if first else f"_x{scrapes}")
            elif name.endswith("_time_seconds"):  # it stays while time goes on
                runs.append(f"{number(value + first * SCRAPE_S)}x{scrapes - 1}")
            else:
                runs.append(f"{number(value)}x{scrapes - 1}")
        known = ",".join(f"{label}={json.dumps(value)}" for label, value in labels)
        found.append({"series": f"{name}{{{known}}}", "values": " ".join(runs)})
    return found


def number(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.6f}"


def query_of(panel: Panel) -> str:
    [found] = [one for one in renderer().DASHBOARDS[panel.board].panels if one.title == panel.title]
    return " or ".join(f"group(({asked(query)}) {panel.shows})" for query in found.queries.values())


def judged(folder: Path, before: Samples, behind: Samples, alerts: Sequence[str], panel: Panel) -> None:
    """promtool finds these alerts and no others, from a scrape and a `for:` behind the fault on. The panel shows
    the fault, and did not before."""
    shutil.copy(HERE / "alerts.yml", folder)
    firing = 'group by (alertname) (ALERTS{alertstate="firing"})'
    named = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)]
    began, shown = BEFORE * SCRAPE_S, {"labels": "{}", "value": 1}
    tests = [
        {"expr": firing, "eval_time": f"{began - 1}s", "exp_samples": []},
        {"expr": query_of(panel), "eval_time": f"{began - 1}s", "exp_samples": []},
        {"expr": firing, "eval_time": f"{began + SCRAPE_S + FOR_S}s", "exp_samples": named},
        {"expr": firing, "eval_time": f"{began + LATER_S}s", "exp_samples": named},
        {"expr": query_of(panel), "eval_time": f"{began + SCRAPE_S}s", "exp_samples": [shown]},
    ]
    case = {"interval": f"{SCRAPE_S}s", "input_series": series(before, behind), "promql_expr_test": tests}
    file = folder / "tests.yml"
    file.write_text(
        yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": f"{SCRAPE_S}s", "tests": [case]})
    )
    promtool("test", "rules", str(file))


def check(
    of: Fleet,
    breaks: Callable[[], object],
    seen: Callable[[], object],
    *,
    alerts: Sequence[str],
    doctor: Sequence[str],
    panel: Panel,
) -> None:
    """`seen`: whether the figures have the fault."""
    eventually(lambda: of.shows("petiole_worker_up", 1), "it reports")
    assert of.doctor() == set()
    before = of.scrape()
    breaks()
    eventually(seen, "the exporter shows it")
    eventually(lambda: of.doctor() == set(doctor), f"it names {doctor}, and nothing else")
    judged(of.site.folder, before, of.scrape(), alerts, panel)


def fill(disk: Path) -> None:
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(2**16))


# ------------------------------------------------------------ workers


def test_a_worker_is_killed(own_site: Site) -> None:
    with fleet(own_site) as of:
        check(
            of,
            own_site.workers[0].kill,
            lambda: of.shows("petiole_worker_up", 0),
            alerts=["PetioleWorkerLost"],
            doctor=["PetioleWorkerLost"],
            panel=Panel("fleet", "Workers", "== 0"),
        )


def test_a_worker_is_killed_and_started_again(own_site: Site) -> None:
    with fleet(own_site) as of:

        def dies() -> None:
            own_site.workers.pop().kill()
            eventually(lambda: of.shows("petiole_worker_up", 0), "it is lost")
            own_site.start_worker()

        check(
            of,
            dies,
            lambda: of.shows("petiole_worker_starts_total", 2) and of.shows("petiole_worker_up", 1),
            alerts=["PetioleWorkerRestarts"],
            doctor=["PetioleWorkerRestarts"],
            panel=Panel("fleet", "Starts of workers", "> 0"),
        )


def test_a_worker_is_stopped(own_site: Site) -> None:
    with fleet(own_site) as of:
        check(
            of,
            lambda: own_site.workers[0].signal(signal.SIGSTOP),
            lambda: of.shows("petiole_worker_up", 0),
            alerts=["PetioleWorkerLost"],
            doctor=["PetioleWorkerLost"],
            panel=Panel("worker", "Up, ready", "== 0"),
        )
        own_site.workers[0].signal(signal.SIGCONT)
        eventually(lambda: of.doctor() == set(), "it goes on")


def test_a_worker_is_silenced(own_site: Site) -> None:
    with fleet(own_site) as of:
        control = own_site.app.control
        check(
            of,
            lambda: control.cancel_consumer("petiole", reply=True),
            lambda: of.shows("petiole_worker_ready", 0),
            alerts=["PetioleWorkerNotReady"],
            doctor=["PetioleWorkerNotReady"],
            panel=Panel("fleet", "Workers by state", 'and on (state) petiole_worker_state{state="silenced"}'),
        )
        control.add_consumer("petiole", reply=True)
        eventually(lambda: of.doctor() == set(), "it takes tasks again")


def test_a_worker_has_the_wrong_model(own_site: Site) -> None:
    with fleet(own_site) as of:
        check(
            of,
            lambda: own_site.worker(PETIOLE_MODEL="another"),
            lambda: of.shows("petiole_queue_models", 2),
            alerts=["PetioleModelsDiffer"],
            doctor=["PetioleModelsDiffer"],
            panel=Panel("queues", "Different models", "> 1"),
        )


def test_the_disk_of_a_worker_is_nearly_full(tmp_path: Path) -> None:
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "disk"))
        site = stack.enter_context(Site(tmp_path, PETIOLE_DRAIN_SECONDS=0))
        of = stack.enter_context(fleet(site, disk=disk))
        check(
            of,
            lambda: fill(disk),
            lambda: of.shows("petiole_disk_free_ratio", 0),
            alerts=["PetioleDiskNearlyFull"],
            doctor=["PetioleDiskNearlyFull"],
            panel=Panel("worker", "Disks: free", f"< {LOW_DISK}"),
        )
        (disk / "filler").unlink()
        eventually(lambda: of.doctor() == set(), "there is room again")


# ------------------------------------------------------------ messages


def test_a_message_is_poison(own_site: Site) -> None:
    with fleet(own_site) as of:
        check(
            of,
            lambda: own_site.redis.lpush("petiole", b"garbage"),
            lambda: of.shows("petiole_quarantined_total", 1),
            alerts=["PetioleQuarantine"],
            doctor=["PetioleQuarantine"],
            panel=Panel("fleet", "Messages put aside", "> 0"),
        )


def test_nobody_serves_a_queue(own_site: Site) -> None:
    """A producer has misspelt it. The worker serves another one."""
    sends = 'generate.delay(prompt="x", queue="petiole.lrage", task_id="lost"); print(json.dumps(1))'
    with fleet(own_site) as of:
        check(
            of,
            lambda: client(own_site, f"from petiole import generate\n{sends}"),
            lambda: of.shows("petiole_queue_messages", 1),
            alerts=["PetioleNoWorker"],
            doctor=["PetioleNoWorker"],
            panel=Panel("queues", "Tasks that wait", "> 0"),
        )
        own_site.worker("-Q", "petiole.lrage")
        eventually(lambda: own_site.app.AsyncResult("lost").ready(), "it is served")
        assert of.doctor() == set()


# ------------------------------------------------------------ Redis


def test_redis_is_full(own_site: Site) -> None:
    with fleet(own_site) as of:
        check(
            of,
            lambda: own_site.redis.config_set("maxmemory", 1),
            lambda: of.shows("petiole_worker_up", 0),
            alerts=["PetioleRedisReadOnly"],
            doctor=["PetioleRedisReadOnly", "RedisNearlyFull"],
            panel=Panel("fleet", "Redis answers, takes writes", "== 0"),
        )
        own_site.redis.config_set("maxmemory", 0)
        eventually(lambda: of.doctor() == set(), "it takes writes again")


@contextmanager
def slowness(site: Site) -> Iterator[None]:
    """Somebody's commands take long, one after the other."""
    ended = threading.Event()

    def hold_up() -> None:
        with redis.Redis(unix_socket_path=str(site.server.socket), socket_timeout=None) as busy:
            while not ended.is_set():
                busy.execute_command("DEBUG", "SLEEP", str(2 * SLOW_S))

    threads = [threading.Thread(target=hold_up, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_redis_is_slow(tmp_path: Path) -> None:
    with Site(tmp_path, PETIOLE_DRAIN_SECONDS=0, options=debugging(tmp_path)) as site, ExitStack() as stack:
        of = stack.enter_context(fleet(site))
        check(
            of,
            lambda: stack.enter_context(slowness(site)),
            lambda: any(
                value > SLOW_S
                for (name, _), value in of.scrape().items()
                if name == "petiole_redis_round_trip_seconds"
            ),
            alerts=["PetioleRedisSlow"],
            doctor=["PetioleRedisSlow"],
            panel=Panel("fleet", "Redis: round trip", f"> {SLOW_S}"),
        )


def debugging(folder: Path) -> tuple[str, ...]:
    """The options of a Redis that takes DEBUG, which it does by itself before version 7."""
    said = subprocess.run(
        [shutil.which("redis-server") or "", "--version"], capture_output=True, text=True, check=False
    )
    return ("--enable-debug-command", "yes") if "v=6" not in said.stdout else ()


def test_redis_fails_over(watched_site: WatchedSite) -> None:
    site = watched_site()
    with fleet(site) as of:

        def primary_dies() -> None:
            old = site.server.master()
            eventually(site.server.in_step, "replicated")
            old.kill()
            eventually(lambda: site.server.master() is not old, "the failover")

        check(
            of,
            primary_dies,
            lambda: of.shows("petiole_redis_changes_total", 1),
            alerts=["PetioleRedisChanged"],
            doctor=["PetioleRedisChanged", "RedisWithoutReplica"],
            panel=Panel("fleet", "Failovers and restarts of Redis", "> 0"),
        )


def test_the_disk_of_redis_is_full(tmp_path: Path) -> None:
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "disk"))
        site = stack.enter_context(Site(tmp_path, PETIOLE_DRAIN_SECONDS=0, options=("--dir", str(disk))))
        of = stack.enter_context(fleet(site))
        check(
            of,
            lambda: fill(disk),
            lambda: of.shows("petiole_worker_up", 0),
            alerts=["PetioleRedisReadOnly"],
            doctor=["PetioleRedisReadOnly", "RedisDiskFails"],
            panel=Panel("fleet", "Redis answers, takes writes", "== 0"),
        )
        (disk / "filler").unlink()
        eventually(lambda: of.doctor() == set(), "it writes again")


# ------------------------------------------------------------ gateways


def test_a_gateway_lacks_rights(own_site: Site) -> None:
    grant(own_site.redis)
    grant_gateway(own_site.redis)
    url = f"redis+socket://gateway:{SECRET}@{own_site.server.socket}?virtual_host=0"
    with fleet(own_site, gateway={"PETIOLE_BROKER_URL": url}) as of:
        check(
            of,
            lambda: own_site.redis.execute_command("ACL", "SETUSER", "gateway", "clearselectors"),
            lambda: not of.shows("petiole_gateway_denied_commands", 0),
            alerts=["PetioleGatewayRights"],
            doctor=["PetioleGatewayRights"],
            panel=Panel("tenants", "Commands denied to gateways", "> 0"),
        )
        grant_gateway(own_site.redis)
        eventually(lambda: of.doctor() == set(), "it has them again")


def test_a_tenant_has_used_up_its_budget(own_site: Site) -> None:
    with fleet(own_site, gateway={}) as of:
        made = petiole("keys", "add", "acme", "--limit", "day_tokens=12", **own_site.environment)
        headers = {"authorization": f"Bearer {made.stdout.split()[-1]}"}
        assert of.gateway is not None
        url = f"{of.gateway.url}/completions"
        [model, *_] = httpx2.get(f"{of.gateway.url}/models", headers=headers).json()["data"]
        body = {"model": model["id"], "prompt": "a", "max_tokens": 10}

        def asks_until_it_is_refused() -> None:
            eventually(lambda: httpx2.post(url, headers=headers, json=body).status_code == 429, "refused")

        check(
            of,
            asks_until_it_is_refused,
            lambda: any(
                value >= 1 for (name, _), value in of.scrape().items() if name == "petiole_budget_used_ratio"
            ),
            alerts=["PetioleBudgetUsedUp"],
            doctor=["PetioleBudgetUsedUp"],
            panel=Panel("tenants", "Budgets used", ">= 1"),
        )
        petiole("keys", "set", "acme", "--limit", "day_tokens=1000000", **own_site.environment)
        eventually(lambda: of.doctor() == set(), "it may ask again")

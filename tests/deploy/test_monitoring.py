"""Dashboards and alerts: each metric is shown, each query is one, and each named fault raises its alert alone."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from petiole.gateway.http.observability import METRICS
from petiole.tasks.fleet import exporter
from petiole.tasks.fleet.repair import diagnosis
from tests.support.site import REPOSITORY

HERE = REPOSITORY / "deploy" / "monitoring"
FLEET_WIDE = {"petiole_redis_up", "petiole_quarantine_messages", "petiole_budget_used_ratio"}
USAGE = {f"petiole_{of}usage_{what}" for of in ("", "all_") for what in ("requests", "tokens")}
_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


def renderer() -> Any:
    spec = importlib.util.spec_from_file_location("render", HERE / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exported() -> set[str]:
    """The metrics of a fleet and of a gateway, without the suffixes of their samples."""
    asked = (*exporter._servers({}), *exporter._queues({}, [], []))
    known = (*asked, *exporter._lives({}), *exporter._states([]), *exporter._figures([]))
    fleet = {metric.name for metric in known}
    return fleet | FLEET_WIDE | USAGE | {metric.name for metric in METRICS.collect()}


def metrics_in(query: str) -> set[str]:
    return {_SUFFIX.sub("", name) for name in re.findall(r"petiole_\w+", query)}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((HERE / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> list[str]:
    return [
        query
        for board in renderer().DASHBOARDS.values()
        for panel in board.panels
        for query in panel.queries.values()
    ]


def asked(query: str, fleet: str = ".*") -> str:
    """A panel's query as Grafana asks it, of all workers and queues."""
    said: str = renderer().of_fleets(query).replace("$fleet", fleet)
    return said.replace("$__rate_interval", "1m").replace("$worker", ".*").replace("$queue", ".*")


def promtool(*arguments: str) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed")
    ran = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_dashboards_are_those_that_are_declared() -> None:
    render = renderer()
    files = {path.stem: path.read_text() for path in (HERE / "dashboards").glob("*.json")}
    assert files == {name: render.text_of(name) for name in render.DASHBOARDS}, (
        "python deploy/monitoring/render.py"
    )


def test_each_metric_is_on_a_panel_and_each_panel_has_a_metric() -> None:
    assert set[str]().union(*map(metrics_in, queries())) == exported()


def test_no_alert_asks_for_a_metric_that_there_is_not() -> None:
    assert set[str]().union(*(metrics_in(rule["expr"]) for rule in rules())) <= exported()


def test_each_alert_and_each_finding_has_a_section_in_the_runbooks() -> None:
    headings = re.findall(r"^### (\w+)$", (REPOSITORY / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    alerts = [*dict.fromkeys(rule["alert"] for rule in rules())]
    found = re.findall(r'Finding\("(\w+)"', Path(diagnosis.__file__).read_text())
    assert headings[: len(alerts)] == alerts
    assert sorted(headings[len(alerts) :]) == sorted({*found} - {*alerts})


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    for board in (json.loads(path.read_text()) for path in (HERE / "dashboards").glob("*.json")):
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len({*places}) == len(places)
        assert len({panel["title"] for panel in board["panels"]}) == len(board["panels"])


def test_prometheus_takes_the_rules_and_the_configuration(tmp_path: Path) -> None:
    for name in ("alerts.yml", "prometheus.yml"):
        shutil.copy(HERE / name, tmp_path)
    promtool("check", "rules", str(tmp_path / "alerts.yml"))
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_prometheus_takes_each_query_of_the_dashboards(tmp_path: Path) -> None:
    recorded = [{"record": f"panel:{at}", "expr": asked(query)} for at, query in enumerate(queries())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    promtool("check", "rules", str(tmp_path / "panels.yml"))


WORKER = 'worker="w1@host",model="m"'
HEALTHY = {
    'up{job="petiole",instance="e:9464"}': "1x60",
    "petiole_redis_up": "1x60",
    'petiole_redis_writable{redis="broker"}': "1x60",
    'up{job="petiole-gateway",instance="g:8000"}': "1x60",
    'petiole_redis_round_trip_seconds{redis="broker"}': "0.001x60",
    'petiole_queue_messages{queue="petiole",priority="0"}': "3x60",
    'petiole_queue_workers{queue="petiole"}': "1x60",
    'petiole_queue_models{queue="petiole"}': "1x60",
    'petiole_budget_used_ratio{tenant="acme",budget="day_tokens"}': "0.9x60",
    f"petiole_worker_up{{{WORKER}}}": "1x60",
    f"petiole_worker_ready{{{WORKER}}}": "1x60",
    f'petiole_worker_state{{{WORKER},state="ready"}}': "1x60",
    'petiole_worker_last_exit{worker="w1@host",reason="killed"}': "1x60",
    'petiole_worker_start_time_seconds{worker="w1@host"}': "0x60",
    f"petiole_redis_changes_total{{{WORKER}}}": "0x60",
    f"petiole_lease_age_seconds{{{WORKER}}}": "1x60",
    f"petiole_lost_leases_total{{{WORKER}}}": "0x60",
    f"petiole_memory_left_bytes{{{WORKER}}}": "4000000000x60",
    f'petiole_disk_free_ratio{{{WORKER},folder="/rows"}}': "0.06x60",
    f'petiole_failures_total{{{WORKER},fault="server"}}': "0x60",
    f'petiole_failures_total{{{WORKER},fault="caller"}}': "0+9x60",
    f"petiole_num_pending_completions{{{WORKER}}}": "0x60",
    f"petiole_failed_chords_total{{{WORKER}}}": "0x60",
    f"petiole_quarantined_total{{{WORKER}}}": "0x60",
    f'petiole_broker_time_seconds_bucket{{{WORKER},priority="0",le="1.0"}}': "0+10x60",
    f'petiole_broker_time_seconds_bucket{{{WORKER},priority="0",le="60.0"}}': "0+10x60",
    f'petiole_broker_time_seconds_bucket{{{WORKER},priority="0",le="+Inf"}}': "0+10x60",
    f"petiole_streams_behind_seconds{{{WORKER}}}": "0x60",
    f"petiole_num_preemptions_total{{{WORKER}}}": "0x60",
    'petiole_gateway_requests_total{instance="g:8000",status="200"}': "0+100x60",
    'petiole_gateway_requests_total{instance="g:8000",status="500"}': "0+1x60",
    'petiole_gateway_denied_commands{instance="g:8000"}': "0x60",
    'petiole_gateway_faults_total{instance="g:8000",type="KeyError"}': "0x60",
    'petiole_gateway_notices_total{instance="g:8000",outcome="dropped"}': "0x60",
}
"""A fleet without a fault, a sample each 15 seconds: some tasks wait, and callers make mistakes."""

FAULTS = {
    "PetioleExporterDown": {'job="petiole",': "0x60"},
    "PetioleRedisDown": {"petiole_redis_up": "0x60"},
    "PetioleRedisReadOnly": {"petiole_redis_writable": "0x60"},
    "PetioleRedisSlow": {"round_trip": "0.2x60"},
    "PetioleRedisChanged": {"petiole_redis_changes": "0x40 1x20"},
    "PetioleNoWorker": {"petiole_queue_workers": "0x60"},
    "PetioleWorkerRestarts": {"start_time": "600x60"},
    "PetioleModelsDiffer": {"petiole_queue_models": "2x60"},
    "PetioleLeaseOld": {"petiole_lease_age": "0+15x60"},
    "PetioleLeasesLost": {"petiole_lost_leases": "0+1x60"},
    "PetioleMemoryLow": {"petiole_memory_left": "1000000x60"},
    "PetioleDiskNearlyFull": {"petiole_disk_free": "0.04x60"},
    "PetioleTasksFail": {'fault="server"': "0+1x60"},
    "PetioleResultsNotStored": {"petiole_num_pending": "2x60"},
    "PetioleChordsFail": {"petiole_failed_chords": "0+1x60"},
    "PetioleQuarantine": {"petiole_quarantined": "0+1x60"},
    "PetioleWaitsLong": {'le="1.0"': "0x60"},
    "PetioleStreamsLate": {"petiole_streams_behind": "3x60"},
    "PetioleCacheTooSmall": {"petiole_num_preemptions": "0+20x60"},
    "PetioleBudgetUsedUp": {"petiole_budget_used": "1.02x60"},
    "PetioleGatewayDown": {'job="petiole-gateway"': "0x60"},
    "PetioleGatewayRights": {"petiole_gateway_denied": "2x60"},
    "PetioleGatewayFaults": {"petiole_gateway_faults": "0+1x60"},
    "PetioleGatewayErrors": {'status="500"': "0+50x60"},
    "PetioleWebhooksDropped": {"petiole_gateway_notices": "0+1x60"},
}
"""By the alert that must be raised, alone: what the fault changes in the samples. Empty: there are none."""


def samples(changed: dict[str, str], state: str = "ready", namespace: str = "") -> list[dict[str, str]]:
    """Those of a fleet. `state`: its worker's."""
    series = []
    for name, values in HEALTHY.items():
        name = name.replace('state="ready"', f'state="{state}"')
        found = [value for part, value in changed.items() if part in name]
        if values := found[0] if found else values:
            metric, _, labels = name.rstrip("}").partition("{")
            series.append({"series": f'{metric}{{namespace="{namespace}",{labels}}}', "values": values})
    return series


def case(series: list[dict[str, str]], raised: set[str], by: str = "alertname") -> dict[str, Any]:
    """One test for promtool: after fifteen minutes exactly these alerts fire."""
    firing = {
        "expr": f'count by ({by}) (ALERTS{{alertstate="firing"}})',
        "eval_time": "15m",
        "exp_samples": [{"labels": f'{{{by}="{name}"}}', "value": 1} for name in sorted(raised)],
    }
    return {"interval": "15s", "input_series": series, "promql_expr_test": [firing]}


LOST = {"petiole_worker_up": "0x60", "petiole_worker_ready": "0x60", "petiole_queue_messages": "0x60"}
NO_WRITES = {"petiole_redis_writable": "0x60", "petiole_worker_up": "0x60", "petiole_queue_workers": "0x60"}
IDLE = {"petiole_queue_messages": "0x60", "petiole_queue_workers": "0x60"}


def test_each_fault_raises_its_alert_and_no_other(tmp_path: Path) -> None:
    shutil.copy(HERE / "alerts.yml", tmp_path)
    states = ("paused", "silenced", "draining", "reloading")
    tests = [
        case(samples({}), set()),
        case(samples(LOST), {"PetioleWorkerLost"}),
        case(samples(NO_WRITES), {"PetioleRedisReadOnly"}),
        case(samples({"petiole_queue_workers": ""}), {"PetioleNoWorker"}),
        *(case(samples({}, state), {"PetioleWorkerNotReady"}) for state in states),
        *(case(samples(changed), {name}) for name, changed in FAULTS.items()),
    ]
    assert {*FAULTS, "PetioleWorkerLost", "PetioleWorkerNotReady"} == {rule["alert"] for rule in rules()}
    check_rules(tmp_path, tests)


def test_a_fleet_changes_no_alert_of_another(tmp_path: Path) -> None:
    """One Prometheus watches both. The chart gives all releases the same `job`."""
    shutil.copy(HERE / "alerts.yml", tmp_path)
    tests = [
        case(samples({}, namespace="prod") + samples(IDLE, namespace="staging"), set()),
        *(
            case(samples(changed, namespace="prod") + samples(IDLE, namespace="staging"), {"prod"}, "namespace")
            for changed in (*FAULTS.values(), LOST)
        ),
        case(
            samples(LOST, namespace="prod") + samples(NO_WRITES, namespace="staging"),
            {"PetioleWorkerLost", "PetioleRedisReadOnly"},
        ),
    ]
    check_rules(tmp_path, tests)


def test_a_panel_shows_the_chosen_fleets_alone(tmp_path: Path) -> None:
    """One without a `namespace` is shown among all."""
    shutil.copy(HERE / "alerts.yml", tmp_path)
    both = samples({}, namespace="prod") + samples(LOST, namespace="staging") + samples({})
    expected = [(".*", 2), ("prod", 1), ("staging", 0), ("prod|staging", 1)]
    up = [
        {
            "expr": asked("sum(petiole_worker_up)", fleet),
            "eval_time": "5m",
            "exp_samples": [{"labels": "{}", "value": value}],
        }
        for fleet, value in expected
    ]
    check_rules(tmp_path, [{"interval": "15s", "input_series": both, "promql_expr_test": up}])


def values_of(query: str, expected: dict[str, float]) -> dict[str, Any]:
    """What promtool shall find. By labels."""
    found = [{"labels": f"{{{labels}}}", "value": value} for labels, value in expected.items()]
    return {"expr": asked(query), "eval_time": "10m", "exp_samples": found}


def test_panels_do_not_mix_fleets_and_lose_no_tenants(tmp_path: Path) -> None:
    """No busy tenant of fleet `a` has had an error, and fleet `b` has no busy tenant. Both have a worker of the
    same name."""
    shutil.copy(HERE / "alerts.yml", tmp_path)
    render, used, drafts = renderer(), "usage_requests_total", "petiole_spec_decode_num"
    series = {
        f'petiole_all_{used}{{namespace="a",end="ok"}}': "100x60",
        f'petiole_all_{used}{{namespace="a",end="error"}}': "7x60",
        f'petiole_all_{used}{{namespace="b",end="ok"}}': "5x60",
        f'petiole_{used}{{namespace="a",end="ok",tenant="t"}}': "40x60",
        **{
            f'petiole_open_batches{{namespace="{fleet}",worker="{worker}"}}': f"{number}x60"
            for fleet, number in (("a", 3), ("b", 4))
            for worker in ("w1", "w2")
        },
        **{
            f'{drafts}_{what}_total{{namespace="{fleet}",worker="w1"}}': f"0+{number}x60"
            for fleet, accepted in (("a", 20), ("b", 30))
            for what, number in (("drafts", 10), ("accepted_tokens", accepted))
        },
    }
    [batches] = [panel for panel in render.BATCHES.panels if panel.title == "Open batches"]
    shown = [
        values_of(
            render.of_others(f"petiole_{used}", "end"),
            {'namespace="a",end="ok"': 60, 'namespace="a",end="error"': 7, 'namespace="b",end="ok"': 5},
        ),
        values_of(batches.queries["in all"], {"": 7}),
        values_of(
            render.accepted_drafts("", ""), {'namespace="a",worker="w1"': 2, 'namespace="b",worker="w1"': 3}
        ),
    ]
    given = [{"series": name, "values": values} for name, values in series.items()]
    check_rules(tmp_path, [{"interval": "15s", "input_series": given, "promql_expr_test": shown}])


def test_a_brace_in_a_label_ends_no_selector() -> None:
    asked_of = renderer().of_fleets('petiole_x{path="/v1/{id}",status="200"}')
    assert asked_of == 'petiole_x{path="/v1/{id}",status="200",namespace=~"$fleet"}'


def test_each_query_is_asked_of_the_chosen_fleets() -> None:
    boards = [json.loads(path.read_text()) for path in (HERE / "dashboards").glob("*.json")]
    for board in boards:
        first, *others = [one for one in board["templating"]["list"] if one["type"] == "query"]
        assert first["name"] == "fleet"
        shown = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
        for query in (*shown, *(one["query"]["query"] for one in others)):
            selectors = re.findall(r"petiole_\w+({[^}]*})?", query)
            assert selectors
            assert all('namespace=~"$fleet"' in one for one in selectors), query


def check_rules(folder: Path, tests: list[dict[str, Any]]) -> None:
    file = folder / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "evaluation_interval": "15s", "tests": tests}))
    promtool("test", "rules", str(file))

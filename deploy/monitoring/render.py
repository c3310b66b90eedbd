"""`python deploy/monitoring/render.py` writes Grafana's dashboards from the panels declared here.

A panel is a title, a unit of Grafana's, and its queries with their legends. Each query is asked of the fleets
that are chosen. `namespace` tells them apart: it is added to each selector, grouping and legend. The tests hold
that each metric that a fleet and its gateways export is on a panel, and that each query is one that Prometheus
takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "dashboards"
BY_WORKER = 'worker=~"$worker"'
OF_FLEETS = 'namespace=~"$fleet"'
FLEETS = "fleet", "label_values(petiole_redis_up, namespace)"
_SELECTOR = re.compile(r'(petiole_\w+)(?:{((?:"[^"]*"|[^}"])*)})?')
_GROUPING = re.compile(r"\b(by|on) \(([^)]*)\)")


class Panel(NamedTuple):
    title: str
    unit: str
    queries: dict[str, str]
    """By their legends."""


class Dashboard(NamedTuple):
    title: str
    panels: list[Panel]
    variables: tuple[tuple[str, str], ...] = ()
    """A variable's name, and the query of its values."""


def of_fleets(query: str) -> str:
    """The query, of the chosen fleets alone, and of each by itself where it groups or joins series."""
    grouped = _GROUPING.sub(lambda of: f"{of[1]} ({', '.join(filter(None, ('namespace', of[2])))})", query)
    return _SELECTOR.sub(lambda of: f"{of[1]}{{{','.join(filter(None, (of[2], OF_FLEETS)))}}}", grouped)


def rate(metric: str, by: str, matching: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{matching}}}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "", matching: str = "") -> str:
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', groups, matching)})"


def shares(metric: str, by: str = "", matching: str = "") -> dict[str, str]:
    name = f"{{{{{by}}}}} " if by else ""
    return {f"{name}{label}": quantile(share, metric, by, matching) for label, share in SHARES.items()}


def of_others(metric: str, by: str) -> str:
    """What tenants without a series of their own have."""
    of_all = f"sum by ({by}) ({metric.replace('petiole_usage', 'petiole_all_usage')})"
    return f"{of_all} - (sum by ({by}) ({metric}) or {of_all} * 0)"


def accepted_drafts(metric: str, by: str) -> str:
    """Of one verification."""
    name, groups = f"petiole_spec_decode_num_accepted_tokens{metric}_total", ", ".join(("worker", by)).rstrip(", ")
    verifications = rate("petiole_spec_decode_num_drafts_total", "worker", BY_WORKER)
    return f"{rate(name, groups, BY_WORKER)} / on (worker) group_left {verifications}"


def of_workers(metric: str, legend: str = "{{worker}}") -> dict[str, str]:
    return {legend: f"{metric}{{{BY_WORKER}}}"}


SHARES = {"median": 0.5, "99 %": 0.99}
WAITS, AGAIN = "petiole_broker_time_seconds", "petiole_redeliveries_total"
RUNNING_BATCHES = "sum(petiole_batch_runners)"

FLEET = Dashboard(
    "Petiole: fleet",
    [
        Panel(
            "Redis answers, takes writes",
            "bool_yes_no",
            {"answers": "petiole_redis_up", "{{redis}}": "petiole_redis_writable"},
        ),
        Panel("Redis: round trip", "s", {"{{redis}}": "petiole_redis_round_trip_seconds"}),
        Panel("Workers", "short", {"up": "sum(petiole_worker_up)", "ready": "sum(petiole_worker_ready)"}),
        Panel("Workers by state", "short", {"{{state}}": "sum by (state) (petiole_worker_state)"}),
        Panel("Tasks in the queues", "short", {"{{queue}}": "sum by (queue) (petiole_queue_messages)"}),
        Panel(
            "Requests",
            "short",
            {
                "running": "sum(petiole_num_requests_running)",
                "waiting": "sum(petiole_num_requests_waiting)",
                "held back": "sum(petiole_num_requests_held_back)",
                "places": "sum(petiole_num_slots)",
            },
        ),
        Panel("Ends a second", "reqps", {"{{finish_reason}}": rate("petiole_requests_total", "finish_reason")}),
        Panel("Failed tasks a second", "reqps", {"{{fault}}": rate("petiole_failures_total", "fault")}),
        Panel(
            "Tokens a second",
            "short",
            {
                "generated": rate("petiole_generation_tokens_total", "model"),
                "prompt, computed": rate("petiole_prompt_tokens_total", "model"),
                "prompt, from the prefix cache": rate("petiole_prompt_tokens_cached_total", "model"),
            },
        ),
        Panel("Time to the first token", "s", shares("petiole_time_to_first_token_seconds")),
        Panel("Time between tokens", "s", shares("petiole_request_time_per_output_token_seconds")),
        Panel("Time of a request", "s", shares("petiole_e2e_request_latency_seconds")),
        Panel("Starts of workers", "short", {"{{worker}}": "increase(petiole_worker_starts_total[10m])"}),
        Panel("How the last process ended", "short", {"{{worker}} {{reason}}": "petiole_worker_last_exit"}),
        Panel("Since the last start", "s", {"{{worker}}": "time() - petiole_worker_start_time_seconds"}),
        Panel("Messages put aside", "short", {"in all": "petiole_quarantine_messages"}),
        Panel(
            "Failovers and restarts of Redis",
            "short",
            {"in ten minutes": "max by () (increase(petiole_redis_changes_total[10m]))"},
        ),
    ],
)

BY_QUEUE = 'queue=~"$queue"'
QUEUE = Dashboard(
    "Petiole: queues",
    [
        Panel("Tasks that wait", "short", {"{{queue}} {{priority}}": f"petiole_queue_messages{{{BY_QUEUE}}}"}),
        Panel("Ready workers", "short", {"{{queue}}": f"petiole_queue_workers{{{BY_QUEUE}}}"}),
        Panel("Different models", "short", {"{{queue}}": f"petiole_queue_models{{{BY_QUEUE}}}"}),
        Panel("Wait for a worker, by priority", "s", shares("petiole_broker_time_seconds", "priority")),
        Panel("Tasks taken a second, by priority", "reqps", {"{{priority}}": rate(f"{WAITS}_count", "priority")}),
        Panel("Messages that came again a second", "reqps", {"in all": rate(AGAIN, "job")}),
    ],
    (("queue", "label_values(petiole_queue_messages, queue)"),),
)

BATCHES = Dashboard(
    "Petiole: batches",
    [
        Panel(
            "Open batches",
            "short",
            {"in all": "sum(max by () (petiole_open_batches))", "running": RUNNING_BATCHES},
        ),
        Panel("Rows left of running batches", "short", {"{{worker}}": "petiole_batch_rows_left"}),
        Panel("Failed rows of running batches", "short", {"{{worker}}": "petiole_batch_rows_failed"}),
        Panel("Running batches", "short", {"{{worker}}": "petiole_batch_runners"}),
        Panel(
            "Wait of tasks of priority 9",
            "s",
            shares("petiole_broker_time_seconds", matching='priority="9"'),
        ),
    ],
)

WORKER = Dashboard(
    "Petiole: worker",
    [
        Panel(
            "Up, ready",
            "bool_yes_no",
            {"up": f"petiole_worker_up{{{BY_WORKER}}}", "ready": f"petiole_worker_ready{{{BY_WORKER}}}"},
        ),
        Panel(
            "Running and waiting",
            "short",
            {
                "running {{worker}}": f"petiole_num_requests_running{{{BY_WORKER}}}",
                "waiting {{worker}}": f"petiole_num_requests_waiting{{{BY_WORKER}}}",
                "held back {{worker}}": f"petiole_num_requests_held_back{{{BY_WORKER}}}",
                "places {{worker}}": f"petiole_num_slots{{{BY_WORKER}}}",
            },
        ),
        Panel("Steps a second", "ops", {"{{worker}}": rate("petiole_steps_total", "worker", BY_WORKER)}),
        Panel("Wait for a place", "s", shares("petiole_request_queue_time_seconds", "worker", BY_WORKER)),
        Panel("Tokens of prompts", "short", shares("petiole_request_prompt_tokens", "worker", BY_WORKER)),
        Panel("Tokens of answers", "short", shares("petiole_request_generation_tokens", "worker", BY_WORKER)),
        Panel("Texts a second", "ops", {"{{worker}}": rate("petiole_texts_total", "worker", BY_WORKER)}),
        Panel(
            "Pages of the KV cache",
            "short",
            {
                "{{state}}": f"sum by (state) (petiole_kv_cache_pages{{{BY_WORKER}}})",
                "{{window}} {{state}}": f"sum by (window, state) (petiole_window_kv_cache_pages{{{BY_WORKER}}})",
            },
        ),
        Panel(
            "Reuse by layers with windows or states",
            "short",
            {
                "window {{window}} {{found}}": rate(
                    "petiole_window_lookup_tokens_total", "window, found", BY_WORKER
                ),
                "state {{found}}": rate("petiole_state_lookup_tokens_total", "found", BY_WORKER),
            },
        ),
        Panel(
            "KV from files: tokens a second",
            "ops",
            {"restored {{worker}}": rate("petiole_kv_tier_restored_tokens_total", "worker", BY_WORKER)},
        ),
        Panel("KV in files", "bytes", {"{{worker}}": f"petiole_kv_tier_bytes{{{BY_WORKER}}}"}),
        Panel(
            "KV to files: bytes a second",
            "Bps",
            {"saved {{worker}}": rate("petiole_kv_tier_saved_bytes_total", "worker", BY_WORKER)},
        ),
        Panel(
            "KV in files: what went wrong",
            "short",
            {
                "chunks dropped": f"increase(petiole_kv_tier_dropped_chunks_total{{{BY_WORKER}}}[10m])",
                "reads given up": f"increase(petiole_kv_tier_given_up_total{{{BY_WORKER}}}[10m])",
                "failures": f"increase(petiole_kv_tier_failures_total{{{BY_WORKER}}}[10m])",
            },
        ),
        Panel(
            "KV in files: files removed",
            "short",
            {
                "for room": f"increase(petiole_kv_tier_evicted_files_total{{{BY_WORKER}}}[10m])",
                "damaged": f"increase(petiole_kv_tier_damaged_files_total{{{BY_WORKER}}}[10m])",
            },
        ),
        Panel(
            "Recurrent states",
            "short",
            {
                "{{state}}": f"sum by (state) (petiole_recurrent_states{{{BY_WORKER}}})",
                "snapshots {{state}}": f"sum by (state) (petiole_state_snapshots{{{BY_WORKER}}})",
                "snapshots {{change}} a second": rate("petiole_state_snapshot_changes_total", "change", BY_WORKER),
            },
        ),
        Panel(
            "Evictions and preemptions a second",
            "ops",
            {
                "pages evicted": rate("petiole_evicted_pages_total", "worker", BY_WORKER),
                "requests preempted": rate("petiole_num_preemptions_total", "worker", BY_WORKER),
                "tokens dropped": rate("petiole_zombie_outputs_total", "worker", BY_WORKER),
            },
        ),
        Panel(
            "Drafts a second",
            "ops",
            {
                "verifications": rate("petiole_spec_decode_num_drafts_total", "worker", BY_WORKER),
                "drafted": rate("petiole_spec_decode_num_draft_tokens_total", "worker", BY_WORKER),
                "accepted, steps saved": rate(
                    "petiole_spec_decode_num_accepted_tokens_total", "worker", BY_WORKER
                ),
            },
        ),
        Panel(
            "Drafts: tokens of a verification, and which place is accepted",
            "short",
            {
                "tokens": f"1 + {accepted_drafts('', '')}",
                "place {{position}}": accepted_drafts("_per_pos", "position"),
            },
        ),
        Panel(
            "Images",
            "ops",
            {
                "encoded": rate("petiole_encoded_images_total", "worker", BY_WORKER),
                "found in the cache": rate("petiole_image_hits_total", "worker", BY_WORKER),
                "not encoded again": rate("petiole_image_feature_hits_total", "worker", BY_WORKER),
                "seconds of encoding": rate("petiole_encode_seconds_total", "worker", BY_WORKER),
            },
        ),
        Panel("Experts: the busiest over the mean", "none", of_workers("petiole_expert_imbalance")),
        Panel(
            "Memory",
            "bytes",
            {
                "process {{worker}}": f"petiole_memory_bytes{{{BY_WORKER}}}",
                "weights {{worker}}": f"petiole_weight_bytes{{{BY_WORKER}}}",
                "left {{worker}}": f"petiole_memory_left_bytes{{{BY_WORKER}}}",
            },
        ),
        Panel("Disks: free", "percentunit", of_workers("petiole_disk_free_ratio", "{{worker}} {{folder}}")),
        Panel(
            "Card: memory, errors",
            "short",
            {
                "bytes {{worker}}": f"petiole_card_memory_bytes{{{BY_WORKER}}}",
                "ECC {{worker}}": f"petiole_card_ecc_errors_total{{{BY_WORKER}}}",
                "Xids {{worker}}": f"petiole_card_xids_total{{{BY_WORKER}}}",
            },
        ),
        Panel(
            "Card: power, temperature",
            "short",
            {
                "W {{worker}}": f"petiole_card_power_watts{{{BY_WORKER}}}",
                "°C {{worker}}": f"petiole_card_temperature_celsius{{{BY_WORKER}}}",
            },
        ),
        Panel(
            "Leases and streams",
            "s",
            {
                "lease {{worker}}": f"petiole_lease_age_seconds{{{BY_WORKER}}}",
                "streams behind {{worker}}": f"petiole_streams_behind_seconds{{{BY_WORKER}}}",
                "oldest task {{worker}}": f"petiole_oldest_task_seconds{{{BY_WORKER}}}",
            },
        ),
        Panel(
            "Messages",
            "short",
            {
                "held {{worker}}": f"petiole_num_held_messages{{{BY_WORKER}}}",
                "results not stored {{worker}}": f"petiole_num_pending_completions{{{BY_WORKER}}}",
            },
        ),
        Panel(
            "Deaths and redeliveries",
            "short",
            {
                "dead owners": f"increase(petiole_deaths_total{{{BY_WORKER}}}[10m])",
                "leases lost": f"increase(petiole_lost_leases_total{{{BY_WORKER}}}[10m])",
                "resumed": f"increase(petiole_resumed_attempts_total{{{BY_WORKER}}}[10m])",
                "redelivered": f"increase(petiole_redeliveries_total{{{BY_WORKER}}}[10m])",
                "refused": f"increase(petiole_quarantined_total{{{BY_WORKER}}}[10m])",
                "chords failed": f"increase(petiole_failed_chords_total{{{BY_WORKER}}}[10m])",
            },
        ),
        Panel(
            "What computes",
            "short",
            of_workers("petiole_computing", "{{worker}}: {{device}} {{weight_format}} {{kernels}}"),
        ),
    ],
    (("worker", "label_values(petiole_worker_up, worker)"),),
)

TENANTS = Dashboard(
    "Petiole: tenants and gateways",
    [
        Panel(
            "Tasks ended today",
            "short",
            {
                "{{tenant}} {{end}}": "sum by (tenant, end) (petiole_usage_requests_total)",
                "(others) {{end}}": of_others("petiole_usage_requests_total", "end"),
            },
        ),
        Panel(
            "Tokens today",
            "short",
            {
                "{{tenant}} {{kind}}": "sum by (tenant, kind) (petiole_usage_tokens_total)",
                "(others) {{kind}}": of_others("petiole_usage_tokens_total", "kind"),
            },
        ),
        Panel("Budgets used", "percentunit", {"{{tenant}} {{budget}}": "petiole_budget_used_ratio"}),
        Panel("Commands denied to gateways", "short", {"{{instance}}": "petiole_gateway_denied_commands"}),
        Panel(
            "HTTP requests a second",
            "reqps",
            {"{{path}} {{status}}": rate("petiole_gateway_requests_total", "path, status")},
        ),
        Panel("Running HTTP requests", "short", {"{{instance}}": "petiole_gateway_running_requests"}),
        Panel("First byte", "s", shares("petiole_gateway_first_byte_seconds", "path")),
        Panel("Whole answer", "s", shares("petiole_gateway_request_seconds", "path")),
        Panel("Errors of the gateway", "ops", {"{{type}}": rate("petiole_gateway_faults_total", "type")}),
        Panel("Webhooks", "ops", {"{{outcome}}": rate("petiole_gateway_notices_total", "outcome")}),
    ],
)

DASHBOARDS = {"fleet": FLEET, "worker": WORKER, "queues": QUEUE, "tenants": TENANTS, "batches": BATCHES}


def rendered(name: str) -> dict[str, Any]:
    """A dashboard as Grafana imports it. Two panels a row."""
    declared = DASHBOARDS[name]
    source = {"type": "prometheus", "uid": "${source}"}
    return {
        "uid": f"petiole-{name}",
        "title": declared.title,
        "tags": ["petiole"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                *(
                    {
                        "name": variable,
                        "type": "query",
                        "datasource": source,
                        "query": {"query": query, "refId": variable},
                        "refresh": 2,
                        "multi": True,
                        "includeAll": True,
                        "allValue": ".*",
                        "current": {"text": "All", "value": "$__all"},
                    }
                    for variable, query in (
                        FLEETS,
                        *((variable, of_fleets(query)) for variable, query in declared.variables),
                    )
                ),
            ]
        },
        "panels": [
            {
                "id": at + 1,
                "type": "timeseries",
                "title": panel.title,
                "datasource": source,
                "gridPos": {"h": 8, "w": 12, "x": 12 * (at % 2), "y": 8 * (at // 2)},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {
                    "tooltip": {"mode": "multi"},
                    "legend": {"displayMode": "list", "placement": "bottom"},
                },
                "targets": [
                    {
                        "refId": chr(65 + i),
                        "datasource": source,
                        "expr": of_fleets(query),
                        "legendFormat": f"{legend} {{{{namespace}}}}",
                    }
                    for i, (legend, query) in enumerate(panel.queries.items())
                ],
            }
            for at, panel in enumerate(declared.panels)
        ],
    }


def text_of(name: str) -> str:
    return json.dumps(rendered(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(text_of(each))

"""Figures under the names of vLLM and of OpenTelemetry: their names, their labels, and the same values."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from petiole.tasks.commands import cli
from petiole.tasks.fleet import exporter
from petiole.tasks.fleet.exporter import _figures
from petiole.tasks.fleet.metrics import ALIASES, as_gen_ai, as_vllm
from petiole.tasks.fleet.reports import Distribution, WorkerReport

VLLMS = {
    *(
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions",
        "generation_tokens",
    ),
    *("request_success", "request_prompt_tokens", "request_generation_tokens", "time_to_first_token_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos",
}
"""Of vllm/v1/metrics/loggers.py and vllm/v1/spec_decode/metrics.py: those that mean what Petiole's mean. Its
`prompt_tokens` has those of the prefix cache, too."""
WORKER = WorkerReport(
    worker="w@h",
    model="m",
    running=3,
    generated_tokens=7,
    pages_total=10,
    pages_free=4,
    pages_cached=1,
    accepted_drafts={"0": 9, "1": 4},
    finished={"stop": 2, "cancelled": 1, "error": 5},
    distributions={
        name: Distribution(bounds=[1.0], counts=[1, 2], sum=9.0)
        for name in ("ttft_s", "prompt_tokens", "completion_tokens")
    },
)


def test_the_names_are_vllms() -> None:
    families = {family.name.removeprefix("vllm:"): family for family in as_vllm([WORKER])}
    assert families.keys() == VLLMS
    for family in families.values():
        for sample in family.samples:
            assert {"model_name", "engine"} <= sample.labels.keys()
    ours = {family.name.removeprefix("petiole_"): family for family in _figures([WORKER])}
    for name in families.keys() & ours.keys():
        assert [one.value for one in families[name].samples] == [one.value for one in ours[name].samples]
    assert families["num_requests_running"].samples[0].value == 3
    assert families["kv_cache_usage_perc"].samples[0].value == 0.5
    places = families["spec_decode_num_accepted_tokens_per_pos"].samples
    assert {one.labels["position"]: one.value for one in places} == {"0": 9, "1": 4}
    ends = {one.labels["finished_reason"]: one.value for one in families["request_success"].samples}
    assert ends == {"stop": 2, "length": 0, "abort": 1}


def test_the_names_are_opentelemetrys() -> None:
    """`opentelemetry-semantic-conventions` has them, with their units."""
    theirs = pytest.importorskip("opentelemetry.semconv._incubating.metrics.gen_ai_metrics")
    known = {value.replace(".", "_") for name, value in vars(theirs).items() if name.startswith("GEN_AI")}
    families = {family.name: family for family in as_gen_ai([WORKER])}
    assert {name.removesuffix("_seconds") for name in families} <= known
    first = families["gen_ai_server_time_to_first_token_seconds"].samples
    assert [one.value for one in first] == [1, 3, 3, 9.0]
    assert first[0].labels["gen_ai_request_model"] == "m"
    tokens = families["gen_ai_client_token_usage"].samples
    assert {one.labels["gen_ai_token_type"] for one in tokens} == {"input", "output"}


@pytest.mark.parametrize("name", ALIASES)
def test_each_has_a_name_on_the_command_line(name: str) -> None:
    assert cli.parser().parse_args(["metrics", "--also", name]).also == [name]


def test_a_name_that_is_given_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus refuses a page with a sample twice."""
    shown: list[Any] = []

    def served(host: str, port: int, also: list[Any]) -> int:
        shown.extend(also)
        raise KeyboardInterrupt

    monkeypatch.setattr(exporter, "serve", served)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        cli.run_metrics(
            cli.parser().parse_args(["metrics", "--also", "vllm", "--also", "gen-ai", "--also", "vllm"])
        )
    assert shown == [ALIASES["vllm"], ALIASES["gen-ai"]]


def test_a_name_that_is_not_known_is_refused() -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args(["metrics", "--also", "datadog"])

"""Figures under vLLM's names: those of its own metrics, with its labels, and the same values."""

from __future__ import annotations

from petiole.tasks.fleet.exporter import _as_vllm, _figures
from petiole.tasks.fleet.reports import HISTOGRAMS, Distribution, WorkerReport

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
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
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
    finished={"stop": 2, "cancelled": 1, "error": 5},
    distributions={"ttft_s": Distribution(bounds=[1.0], counts=[1, 2], sum=9.0)},
)


def test_the_names_are_vllms() -> None:
    families = {family.name.removeprefix("vllm:"): family for family in _as_vllm([WORKER])}
    assert families.keys() == VLLMS
    for family in families.values():
        for sample in family.samples:
            assert {"model_name", "engine"} <= sample.labels.keys()
    ours = {family.name.removeprefix("petiole_"): family for family in _figures([WORKER])}
    for name in families.keys() & ours.keys():
        assert [one.value for one in families[name].samples] == [one.value for one in ours[name].samples]
    assert families["num_requests_running"].samples[0].value == 3
    assert families["kv_cache_usage_perc"].samples[0].value == 0.5
    ends = {one.labels["finished_reason"]: one.value for one in families["request_success"].samples}
    assert ends == {"stop": 2, "length": 0, "abort": 1}
    assert all(one.vllm for one in HISTOGRAMS.values())

"""The metrics that `fleet.reports` declares, in the form that Prometheus reads; some of them also under the names
that other dashboards know: vLLM's, and those of OpenTelemetry's conventions for generative models (`gen_ai.*`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from petiole.tasks.fleet.reports import HISTOGRAMS, Distribution, Exported, WorkerReport

_KINDS = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}


def buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Cumulative buckets: (upper bound, number of values up to it)."""
    bounds = [*map(str, distribution.bounds), "+Inf"]
    return list(zip(bounds, accumulate(distribution.counts), strict=True))


def declared(
    workers: list[WorkerReport],
    prefix: str,
    labels: tuple[str, ...],
    of: Callable[[WorkerReport], tuple[str, ...]],
    chosen: Callable[[Exported], bool] = lambda _: True,
) -> Iterator[Metric]:
    """The metrics that `fleet.reports` declares, under their names behind `prefix`. of: a worker's `labels`."""
    for field, known in WorkerReport.model_fields.items():
        for metric in known.metadata:
            if isinstance(metric, Exported) and chosen(metric):
                own = (metric.by,) if metric.by else ()
                family = _KINDS[metric.kind](f"{prefix}{metric.name}", metric.what, labels=(*labels, *own))
                for worker in workers:
                    value = getattr(worker, field)
                    for label, number in value.items() if own else [("", value)]:
                        if number is not None:
                            family.add_metric((*of(worker), label) if own else of(worker), number)
                yield family
    for field, shown in HISTOGRAMS.items():
        histogram = HistogramMetricFamily(f"{prefix}{shown.name}", shown.what, labels=labels)
        for worker in workers:
            if (distribution := worker.distributions.get(field)) is not None:
                histogram.add_metric(of(worker), buckets(distribution), distribution.sum)
        yield histogram


Alias = Callable[[list[WorkerReport]], Iterator[Metric]]
"""Makes the metrics of live workers under other names."""

_VLLMS_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}
"""What vLLM calls the finish reasons of requests that have not failed."""


def as_vllm(workers: list[WorkerReport]) -> Iterator[Metric]:
    """The metrics that vLLM has with the same meaning, under its names and labels."""
    labels = ("model_name", "engine", "worker")

    def of(worker: WorkerReport) -> tuple[str, str, str]:
        return worker.model, "0", worker.worker

    yield from declared(workers, "vllm:", labels, of, chosen=lambda metric: metric.vllm)
    usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", labels=labels)
    ends = CounterMetricFamily(
        "vllm:request_success", "Requests that have ended without an error.", labels=(*labels, "finished_reason")
    )
    for worker in workers:
        usage.add_metric(of(worker), worker.pages_used / (worker.pages_total or 1))
        for reason, theirs in _VLLMS_REASONS.items():
            ends.add_metric((*of(worker), theirs), worker.finished.get(reason, 0))
    yield usage
    yield ends


_GEN_AI: dict[str, dict[str, str]] = {
    "server_time_to_first_token_seconds": {"": "ttft_s"},
    "server_time_per_output_token_seconds": {"": "per_output_token_s"},
    "server_request_duration_seconds": {"": "total_s"},
    "client_token_usage": {"input": "prompt_tokens", "output": "completion_tokens"},
}
"""Names without `gen_ai_`: the names in `HISTOGRAMS`, by `gen_ai.token.type`."""


def as_gen_ai(workers: list[WorkerReport]) -> Iterator[Metric]:
    """The histograms of OpenTelemetry's conventions, of generations of all tasks."""
    about = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")
    for name, fields in _GEN_AI.items():
        labels = (*about, "service_instance_id", *(["gen_ai_token_type"] if "" not in fields else []))
        what = " ".join(HISTOGRAMS[field].what for field in fields.values())
        histogram = HistogramMetricFamily(f"gen_ai_{name}", what, labels=labels)
        for worker in workers:
            of = ("generate_content", "petiole", worker.model, worker.model, worker.worker)
            for kind, field in fields.items():
                if (distribution := worker.distributions.get(field)) is not None:
                    values = (*of, kind) if kind else of
                    histogram.add_metric(values, buckets(distribution), distribution.sum)
        yield histogram


ALIASES: dict[str, Alias] = {"vllm": as_vllm, "gen-ai": as_gen_ai}
"""By the names of `petiole metrics --also`."""

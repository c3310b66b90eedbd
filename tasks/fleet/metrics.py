"""The metrics that `fleet.reports` declares, in the form that Prometheus reads."""

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

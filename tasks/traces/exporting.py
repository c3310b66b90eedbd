"""Exports the spans of a process of Petiole's own, as OpenTelemetry's standard variables (`OTEL_*`) say.

An application's processes have the provider that the application sets. A worker, a gateway or a batch's runner has
none, unless `opentelemetry-instrument` has started it."""

from __future__ import annotations

import atexit
import logging
import os
import threading

from petiole.tasks.traces.spans import tracer

logger = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOL = "http/protobuf"
FLUSH_S = 2.0
"""How long a process that ends waits for its last spans to leave. A collector may be away."""


def asked() -> bool:
    """Whether the environment asks for traces."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    return exporter != "none" and bool(exporter or any(map(os.environ.get, ENDPOINTS)))


def start(service: str) -> None:
    """Begin, if the environment asks for it. `service`: the name of the process's service, unless `OTEL_*` says
    another. What is wrong is logged: a process serves without traces, too."""
    if not asked() or tracer() is not None:
        return
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    spoken = {name: os.environ.get(name) or PROTOCOL for name in _PROTOCOLS}
    for name, allowed, value in (
        ("OTEL_TRACES_EXPORTER", "otlp", exporter),
        *((name, PROTOCOL, value) for name, value in spoken.items()),
    ):
        if value != allowed:
            logger.warning("no traces: %s must be %s, got %s", name, allowed, value)
            return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from petiole.tasks.traces import encoding
        from petiole.tasks.traces.light import LightProvider
    except ImportError as error:
        logger.warning("no traces: they need 'petiole[otel]': %s", error)
        return
    try:
        found = Resource.create()
        named = not str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service")
        resource = found if named else found.merge(Resource({SERVICE_NAME: service}))
        trace_exporter.encode_spans = encoding.encode_spans  # type: ignore[attr-defined]
        provider = LightProvider(resource, BatchSpanProcessor(trace_exporter.OTLPSpanExporter()))
    except ValueError as error:
        logger.warning("no traces: a variable OTEL_* is wrong: %s", error)
        return
    trace.set_tracer_provider(provider)
    atexit.register(_flush, provider.shutdown)


_PROTOCOLS = ("OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")


def _flush(shutdown: object) -> None:
    thread = threading.Thread(target=shutdown, name="petiole-last-spans", daemon=True)  # type: ignore[arg-type]
    thread.start()
    thread.join(FLUSH_S)

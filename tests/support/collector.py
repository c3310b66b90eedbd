"""A collector of traces: OTLP over HTTP, as OpenTelemetry's protocol declares it.

with Collector() as collector:
    worker = site.worker(**collector.environment)
    collector.spans("petiole.decode")
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent

KINDS = {number: name.removeprefix("SPAN_KIND_") for name, number in Sent.SpanKind.items()}


@dataclass(frozen=True)
class Span:
    """`links`: the ids of spans. Times are in nanoseconds."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    failed: bool
    service: str
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[str, ...] = ()
    events: tuple[str, ...] = ()


class Collector:
    def __init__(self) -> None:
        self._requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                collector._requests.append(request)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that exports to it, soon."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    @property
    def bytes(self) -> bytes:
        """All that it was sent."""
        return b"".join(request.SerializeToString() for request in list(self._requests))

    def spans(self, *names: str) -> list[Span]:
        """Those of these names, or all, by their beginnings."""
        found = [
            span_of(sent, _values(resource.resource.attributes)["service.name"])
            for request in list(self._requests)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for sent in scope.spans
        ]
        return sorted((span for span in found if not names or span.name in names), key=lambda span: span.start)

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def span_of(sent: Sent, service: str) -> Span:
    return Span(
        sent.name,
        KINDS[sent.kind],
        sent.trace_id.hex(),
        sent.span_id.hex(),
        sent.parent_span_id.hex(),
        sent.start_time_unix_nano,
        sent.end_time_unix_nano,
        sent.status.code == 2,
        service,
        _values(sent.attributes),
        tuple(link.span_id.hex() for link in sent.links),
        tuple(event.name for event in sent.events),
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))

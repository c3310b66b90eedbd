"""Spans in OTLP, as the SDK's exporters encode them, in a third of the time.

Most names and attributes of Petiole's spans are the same in all of them. So each name, and each pair of a key and
a value, is encoded once by protobuf, and put into a span as bytes: messages that are written one behind the other
are merged. Long texts, lists and times, which come once, are behind them. What has another form than Petiole's
spans is encoded by the SDK."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as by_the_sdk
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

_KNOWN, _REMOTE = 0x100, 0x200
"""Flags of a span: whether its parent is in another process."""
_PLAIN: dict[type, str] = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_MOST_CHARACTERS = 32
"""Of a text that is kept. An id is longer, and comes once."""


def encode_spans(sdk_spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    request, scopes = ExportTraceServiceRequest(), dict[tuple[int, int], ScopeSpans]()
    for span in sdk_spans:
        of = id(span.resource), id(span.instrumentation_scope)
        if (scope := scopes.get(of)) is None:
            request.MergeFrom(by_the_sdk([span]))
            scope = scopes[of] = request.resource_spans[-1].scope_spans[-1]
            scope.ClearField("spans")
        sent = scope.spans.add()
        try:
            _fill(sent, span)
        except (KeyError, TypeError, ValueError):
            sent.CopyFrom(by_the_sdk([span]).resource_spans[0].scope_spans[0].spans[0])
    return request


def _fill(sent: Any, span: Any) -> None:
    """Raises `KeyError`, `TypeError` and `ValueError` for a span of another form."""
    context, parent = span.context, span.parent
    if span.links or span.dropped_attributes or span.dropped_events or context.trace_state:
        raise ValueError("the span has another form")
    kept, others = [_named(span.name, span.kind)], []
    for key, value in (span.attributes or {}).items():
        kind: Any = type(value)
        if kind is int or kind is bool or (kind is str and len(value) <= _MOST_CHARACTERS):
            kept.append(_pair(key, kind, value))
        else:
            others.append((key, value))
    sent.MergeFromString(b"".join(kept))
    for key, value in others:
        _put(sent.attributes.add(key=key).value, value)
    sent.trace_id, sent.span_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    sent.flags = _KNOWN
    if parent is not None:
        sent.parent_span_id = parent.span_id.to_bytes(8, "big")
        sent.flags |= _REMOTE * parent.is_remote
    sent.start_time_unix_nano, sent.end_time_unix_nano = span.start_time, span.end_time
    for event in span.events:
        if event.attributes:
            raise ValueError("the event has attributes")
        sent.events.add(name=event.name, time_unix_nano=event.timestamp)
    if span.status.status_code is not StatusCode.UNSET:
        sent.status.code, sent.status.message = span.status.status_code.value, span.status.description or ""


@lru_cache(maxsize=1024)
def _named(name: str, kind: SpanKind) -> bytes:
    """Name, kind and status of a span, as bytes of it."""
    number: Any = kind.value + 1
    found: bytes = Span(name=name, kind=number, status=Status()).SerializeToString()
    return found


@lru_cache(maxsize=4096)
def _pair(key: str, kind: type, value: Any) -> bytes:
    """An attribute, as bytes of a span. `kind`: the value's type, because 1 and true are equal."""
    said = AnyValue(**{_PLAIN[kind]: value})
    found: bytes = Span(attributes=[KeyValue(key=key, value=said)]).SerializeToString()
    return found


def _put(said: Any, value: Any) -> None:
    if type(value) is list or type(value) is tuple:
        said.array_value.SetInParent()
        for part in value:
            _put(said.array_value.values.add(), part)
    else:
        setattr(said, _PLAIN[type(value)], value)

"""Spans in OTLP, as the SDK's exporters encode them, in a third of the time.

Most attributes of Petiole's spans are the same in all of them. So each pair of a key and a value is encoded once
by protobuf, and put into a span as bytes: messages that are written one behind the other are merged. What has
another form than Petiole's spans is encoded by the SDK."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as by_the_sdk
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span
from opentelemetry.sdk.trace import ReadableSpan

_KNOWN, _REMOTE = 0x100, 0x200
"""Flags of a span: whether its parent is in another process."""
_PLAIN: dict[type, str] = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_MOST_CHARACTERS = 128
"""Of a value that is kept."""
_MOST_PARTS = 8
"""Of a list that is kept."""


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
    sent.MergeFromString(b"".join(_pair(key, value) for key, value in (span.attributes or {}).items()))
    sent.trace_id, sent.span_id = context.trace_id.to_bytes(16, "big"), context.span_id.to_bytes(8, "big")
    sent.flags = _KNOWN
    if parent is not None:
        sent.parent_span_id = parent.span_id.to_bytes(8, "big")
        sent.flags |= _REMOTE * parent.is_remote
    sent.name, sent.kind = span.name, span.kind.value + 1
    sent.start_time_unix_nano, sent.end_time_unix_nano = span.start_time, span.end_time
    for event in span.events:
        if event.attributes:
            raise ValueError("the event has attributes")
        sent.events.add(name=event.name, time_unix_nano=event.timestamp)
    sent.status.SetInParent()
    if span.status.status_code.value:
        sent.status.code, sent.status.message = span.status.status_code.value, span.status.description or ""


def _pair(key: str, value: Any) -> bytes:
    is_list = type(value) is list or type(value) is tuple
    parts = tuple(value) if is_list else (value,)
    long = len(parts) > _MOST_PARTS or any(type(part) is str and len(part) > _MOST_CHARACTERS for part in parts)
    encoded = _encoded if long else _kept
    kind: Any = type(value)
    return encoded(key, tuple, parts, *map(type, parts)) if is_list else encoded(key, kind, value)


def _encoded(key: str, kind: type, value: Any, *kinds: type) -> bytes:
    """An attribute, as bytes of a span. `kinds`: of the parts of a tuple. Types are given because 1, 1.0 and true
    are equal."""
    if isinstance(value, tuple):
        parts = [AnyValue(**{_PLAIN[of]: part}) for of, part in zip(kinds, value, strict=True)]
        said = AnyValue(array_value=ArrayValue(values=parts))
    else:
        said = AnyValue(**{_PLAIN[kind]: value})
    found: bytes = Span(attributes=[KeyValue(key=key, value=said)]).SerializeToString()
    return found


_kept = lru_cache(maxsize=4096)(_encoded)

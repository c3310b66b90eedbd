"""What a collector gets is what the SDK would have sent, span by span."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as by_the_sdk
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from petiole.tasks.traces import encoding
from petiole.tasks.traces.light import LightProvider

REMOTE = SpanContext(0xAB << 120, 0xCD << 56, True, TraceFlags(1))
STATED = SpanContext(0xAB << 120, 0xCD << 56, True, TraceFlags(1), TraceState([("a", "b")]))
ATTRIBUTES: list[dict[str, Any]] = [
    {},
    {"text": "x", "long": "y" * 1000, "true": True, "one": 1, "one and a bit": 1.0, "nothing": 0},
    {"same": 1, "reasons": ["stop", "length"]},
    {"same": True, "numbers": (1, 2.0, True)},
    {"same": 1.0, "bytes": b"z", "nested": {"a": 1}, "none": [], "id": "i" * 36},
]


class Kept(SimpleSpanProcessor):
    def __init__(self) -> None:
        self.memory = InMemorySpanExporter()
        super().__init__(self.memory)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.memory.get_finished_spans())


def make(tracer: Any) -> None:
    for above in (
        None,
        set_span_in_context(NonRecordingSpan(REMOTE)),
        set_span_in_context(NonRecordingSpan(STATED)),
    ):
        for kind, given in zip(SpanKind, ATTRIBUTES, strict=True):
            span = tracer.start_span("root", above, kind, {"at first": "a"}, start_time=5)
            span.set_attributes(given)
            span.add_event("first token", timestamp=7)
            below = tracer.start_span("below", set_span_in_context(span), links=[], start_time=6)
            below.add_event("with more", {"a": 1}, timestamp=8)
            below.add_link(REMOTE, {"petiole.attempt": 1})
            below.set_status(StatusCode.ERROR)
            below.end(9)
            with tracer.start_as_current_span("current", above, record_exception=False) as current:
                current.update_name("renamed")
            span.end(10)


def in_order(request: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    """With the attributes of each span in the order of their keys."""
    for resource in request.resource_spans:
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            span.attributes.sort(key=lambda pair: pair.key)
    return request


@pytest.mark.parametrize("light", [True, False])
def test_it_is_what_the_sdk_sends(light: bool) -> None:
    kept, resource = Kept(), Resource({"service.name": "s", "number": 3})
    provider = LightProvider(resource, kept) if light else TracerProvider(resource=resource)
    if not light:
        provider.add_span_processor(kept)
    make(provider.get_tracer("petiole"))
    assert len(kept.spans) == 3 * 3 * len(ATTRIBUTES)
    for spans in (kept.spans, *([span] for span in kept.spans)):
        assert in_order(encoding.encode_spans(spans)) == in_order(by_the_sdk(spans))


def test_light_spans_are_those_of_the_sdk() -> None:
    """But for ids and for the times that nobody gave."""
    of = {}
    for name, tracer_of in (("light", lambda kept: LightProvider(Resource({}), kept)), ("full", full)):
        kept = Kept()
        make(tracer_of(kept).get_tracer("petiole"))
        of[name] = [told(span) for span in kept.spans]
    assert of["light"] == of["full"]


def full(kept: Kept) -> TracerProvider:
    provider = TracerProvider(resource=Resource({}))
    provider.add_span_processor(kept)
    return provider


def told(span: ReadableSpan) -> Any:
    events = [(event.name, dict(event.attributes or {})) for event in span.events]
    links = [(link.context, dict(link.attributes or {})) for link in span.links]
    attributes = {
        key: tuple(value) if isinstance(value, list) else value for key, value in span.attributes.items()
    }
    above = span.parent is not None and span.parent.is_remote
    state = dict(span.context.trace_state), span.context.trace_flags
    return span.name, span.kind, attributes, events, links, span.status.status_code, above, state


def test_a_sampler_decides_for_what_begins_and_what_is_below_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    kept = Kept()
    make(LightProvider(Resource({}), kept).get_tracer("petiole"))
    assert kept.spans == []


class EveryOther(sampling.Sampler):
    """A user's, which looks at names."""

    def should_sample(
        self, parent_context: Any, trace_id: int, name: str, *_: Any, **__: Any
    ) -> sampling.SamplingResult:
        kept = name != "below"
        return sampling.SamplingResult(
            sampling.Decision.RECORD_AND_SAMPLE if kept else sampling.Decision.DROP,
        )

    def get_description(self) -> str:
        return "every other"


@pytest.mark.parametrize(
    "own", [EveryOther(), sampling.ParentBased(EveryOther(), local_parent_sampled=EveryOther())]
)
def test_a_sampler_of_the_users_own_is_asked_for_each_span(
    monkeypatch: pytest.MonkeyPatch, own: sampling.Sampler
) -> None:
    monkeypatch.setattr(sampling, "_get_from_env_or_default", lambda: own)
    kept = Kept()
    make(LightProvider(Resource({}), kept).get_tracer("petiole"))
    assert {span.name for span in kept.spans} == {"root", "renamed"}


@pytest.mark.parametrize(
    "name", ["always_on", "traceidratio", "parentbased_always_on", "parentbased_traceidratio"]
)
def test_spans_are_light_with_samplers_of_the_sdk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    assert LightProvider(Resource({}), Kept()).light


def test_what_comes_once_is_not_kept() -> None:
    encoding._pair.cache_clear()
    kept = Kept()
    tracer = LightProvider(Resource({}), kept).get_tracer("petiole")
    for value in (["x"] * 1000, "z" * 33, 0.1, ["stop", "length"], "stop"):
        tracer.start_span("a", attributes={"of": value}).end()
    assert encoding.encode_spans(kept.spans) == by_the_sdk(kept.spans)
    assert encoding._pair.cache_info().currsize == 1


@pytest.mark.parametrize("why", ["another processor", "a limit"])
def test_whoever_may_see_a_difference_gets_the_sdks_spans(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    if why == "a limit":
        monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "3")
    kept, other = Kept(), Kept()
    provider = LightProvider(Resource({}), kept)
    if why != "a limit":
        provider.add_span_processor(other)
    tracer = provider.get_tracer("petiole")
    tracer.start_span("a", attributes={"long": "12345"}).end()
    [span] = kept.spans
    assert span.attributes["long"] == ("123" if why == "a limit" else "12345")
    assert len(other.spans) == (why != "a limit")
    assert type(provider.get_tracer("another").start_span("b")).__module__ == "opentelemetry.sdk.trace"

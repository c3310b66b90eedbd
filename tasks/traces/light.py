"""A provider whose spans of Petiole's cost little. `exporting` makes it; this module needs the SDK.

A span of the SDK's has a lock, limits, and a sampler's answer of its own, because anybody may write to it at any
time. Petiole's spans are each written by one thread at a time, and have few attributes. So here a span is what
exporters read (`ReadableSpan`), filled in place. The sampler decides for whole attempts, and what is below them
goes with them; it and the ids, the resource and the batches of the exporter are the SDK's.

Other libraries in the process get the SDK's spans. So does Petiole where somebody may see a difference: another
processor hears of spans that begin, a variable `OTEL_..._LIMIT` is set, or the sampler is not the SDK's and may
decide about each span."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import (
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    StaticSampler,
    TraceIdRatioBased,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

NAME = "petiole"
"""Of the tracer."""
_RANDOM: int = getattr(TraceFlags, "RANDOM_TRACE_ID", 0)
"""W3C's flag. Older SDKs know none."""
_WHOLE = {StaticSampler, TraceIdRatioBased, ParentBased, ParentBasedTraceIdRatio}
"""Samplers that decide alike for a span and for what is below it."""
_LIMIT = re.compile("OTEL_.*_LIMIT")
_UNSET = Status()


class KnownResource(Resource):
    """A resource whose hash is made once. The exporter asks for it at each span."""

    _hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = super().__hash__()
        return self._hash

    __eq__ = Resource.__eq__


class LightSpan(ReadableSpan, api.Span):
    """A span that one thread at a time writes to, until its end."""

    dropped_attributes = dropped_events = dropped_links = 0

    def __init__(
        self,
        processor: SpanProcessor,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, Any],
        links: tuple[Link, ...],
        start_time: int,
        resource: Resource,
        scope: InstrumentationScope,
    ) -> None:
        super().__init__(
            name, context, parent, resource, attributes, (), links, kind, None, _UNSET, start_time, None, scope
        )
        self._processor = processor

    def get_span_context(self) -> SpanContext:
        found: SpanContext = self._context  # type: ignore[assignment]
        return found

    def is_recording(self) -> bool:
        return self._end_time is None

    def update_name(self, name: str) -> None:
        self._name = name

    def set_attribute(self, key: str, value: Any) -> None:
        self._attributes[key] = value  # type: ignore[index]

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._attributes.update(attributes)  # type: ignore[union-attr]

    def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
        self._events = (*self._events, Event(name, attributes, timestamp))

    def add_link(self, context: SpanContext, attributes: Any = None) -> None:
        self._links = (*self._links, Link(context, attributes))

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        self._status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(self, exception: BaseException, *_: Any, **__: Any) -> None:
        """An error is its type alone: its text may have a prompt."""
        self.set_attribute("error.type", type(exception).__name__)

    def end(self, end_time: int | None = None) -> None:
        if self._end_time is None:
            self._end_time = time.time_ns() if end_time is None else end_time
            self._processor.on_end(self)


class LightTracer(api.Tracer):
    """Begins light spans, while `provider` allows it; otherwise the SDK's."""

    def __init__(self, provider: LightProvider, full: api.Tracer) -> None:
        self._provider, self._full = provider, full
        self._resource, self._scope = provider.resource, InstrumentationScope(NAME, "")

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> api.Span:
        provider = self._provider
        if not provider.light:
            return self._full.start_span(name, context, kind, attributes, links or (), start_time)
        ids, parent = provider.id_generator, api.get_current_span(context)
        above: SpanContext | None = parent.get_span_context()
        given = dict(attributes or {})
        if type(parent) is LightSpan:
            assert above is not None
            own = SpanContext(above[0], ids.generate_span_id(), False, above[3], above[4])
        else:
            above = above if above is not None and above.is_valid else None
            trace_id = ids.generate_trace_id() if above is None else above.trace_id
            found = provider.sampler.should_sample(context, trace_id, name, kind, attributes, links or ())
            decision: Any = found.decision
            sampled = decision.is_sampled()
            if above is None:
                random = _RANDOM if _RANDOM and ids.is_trace_id_random() else 0
            else:
                random = above.trace_flags & _RANDOM
            flags = TraceFlags(TraceFlags.SAMPLED * sampled | random)
            own = SpanContext(trace_id, ids.generate_span_id(), False, flags, found.trace_state)
            if not sampled:
                return api.NonRecordingSpan(own)
            given.update(found.attributes or {})
        began = time.time_ns() if start_time is None else start_time
        return LightSpan(
            provider.processor,
            name,
            own,
            above,
            kind,
            given,
            tuple(links or ()),
            began,
            self._resource,
            self._scope,
        )

    @contextmanager
    def start_as_current_span(  # type: ignore[override]
        self, name: str, *given: Any, end_on_exit: bool = True, **named: Any
    ) -> Iterator[api.Span]:
        span = self.start_span(name, *given, **named)
        with api.use_span(
            span,
            end_on_exit=end_on_exit,
            record_exception=named.get("record_exception", True),
            set_status_on_exception=named.get("set_status_on_exception", True),
        ):
            yield span


def decides_for_all_below(sampler: Sampler) -> bool:
    parts = [part for part in vars(sampler).values() if isinstance(part, Sampler)]
    return type(sampler) in _WHOLE and all(map(decides_for_all_below, parts))


class LightProvider(TracerProvider):
    """`processor`: of all spans that have ended. It must not care for those that begin."""

    def __init__(self, resource: Resource, processor: SpanProcessor) -> None:
        super().__init__(resource=KnownResource(resource.attributes, resource.schema_url), shutdown_on_exit=False)
        super().add_span_processor(processor)
        self.processor = processor
        self.light = decides_for_all_below(self.sampler) and not any(map(_LIMIT.fullmatch, os.environ))

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        self.light = False
        super().add_span_processor(span_processor)

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Any = None,
    ) -> api.Tracer:
        about = instrumenting_module_name, instrumenting_library_version, schema_url, attributes
        full = super().get_tracer(*about)
        return LightTracer(self, full) if instrumenting_module_name == NAME else full

"""Spans of what a producer, a reader and the gateway do. Without a provider nothing is made.

    SERVER    a request of the gateway's
    PRODUCER  the submission of a task, unless Celery's instrumentation makes one
    CLIENT    a reader, from its first step to its last delta

A span has no text of a request: names, numbers, and an error's type."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

from petiole.tasks.traces import carried

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

    from petiole.contract.results.task_result import StreamDelta

SYSTEM = "celery"
"""`messaging.system`."""
_CELERYS = "opentelemetry.instrumentation.celery"


def tracer() -> Tracer | None:
    """None: nobody in this process records spans."""
    if (api := sys.modules.get("opentelemetry.trace")) is None:
        return None
    return _of(api.get_tracer_provider())


@lru_cache(maxsize=1)
def _of(provider: TracerProvider) -> Tracer | None:
    from opentelemetry.trace import NoOpTracerProvider, ProxyTracerProvider

    return (
        None if isinstance(provider, ProxyTracerProvider | NoOpTracerProvider) else provider.get_tracer("petiole")
    )


def context_of(headers: Mapping[str, Any]) -> Context | None:
    """The context of the trace of these headers, for new spans. None without one. Needs OpenTelemetry."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    given = carried.of(headers)
    return TraceContextTextMapPropagator().extract(given) if given else None


def fail(span: Span, kind: str) -> None:
    """Mark it as failed. `kind`: the type of the error."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


class Current:
    """A span that is current in its context, and ends with it. Nothing is recorded without one."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    def __enter__(self) -> Self:
        if self._span is not None:
            from opentelemetry import context, trace

            self._token = context.attach(trace.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._span is not None:
            from opentelemetry import context

            context.detach(self._token)
            self._span.end()


class Submission(Current):
    """The span of a submission."""

    __slots__ = ()

    def sent(self, task_id: str, queue: str) -> None:
        if self._span is not None:
            self._span.update_name(f"send {queue}")
            self._span.set_attributes({"messaging.message.id": task_id, "messaging.destination.name": str(queue)})

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._span is not None and kind is not None:
            fail(self._span, kind.__name__)
        super().__exit__(kind)


def sending(task: str) -> Submission:
    """In this context a task of this name is submitted."""
    if (made := tracer()) is None or _celery_records():
        return Submission()
    from opentelemetry.trace import SpanKind

    context = None if _below_another() else context_of(carried.headers())
    about = {"messaging.system": SYSTEM, "messaging.operation.type": "send", "celery.task_name": task}
    return Submission(made.start_span("send", context=context, kind=SpanKind.PRODUCER, attributes=about))


def _celery_records() -> bool:
    """Whether Celery's instrumentation makes a span of each submission."""
    theirs = sys.modules.get(_CELERYS)
    return theirs is not None and bool(theirs.CeleryInstrumentor().is_instrumented_by_opentelemetry)


class Reading:
    """The span of a reader."""

    __slots__ = ("_deltas", "_first_ns", "_last", "_span", "_tokens")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._deltas = self._tokens = self._first_ns = 0
        self._last: StreamDelta | None = None

    def heard(self, delta: StreamDelta) -> None:
        self._deltas += 1
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._last = delta
        if not self._first_ns and delta.token_ids:
            self._first_ns = time.time_ns()

    def end(self) -> None:
        span, last = self._span, self._last
        span.set_attributes({"petiole.deltas": self._deltas, "petiole.tokens": self._tokens})
        if self._first_ns:
            span.add_event("first token", timestamp=self._first_ns)
        if last is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [str(last.finish_reason)])
            if last.error is not None:
                fail(span, str(last.error.get("type", "error")))
        span.end()


def reading(task_id: str, trace: Mapping[str, str] | None) -> Reading | None:
    """The span of a reader that begins: below the current span, or in the task's `trace`. None without either."""
    if (made := tracer()) is None:
        return None
    from opentelemetry import trace as api

    context = None
    if not api.get_current_span().get_span_context().is_valid and (context := context_of(trace or {})) is None:
        return None
    about = {"messaging.system": SYSTEM, "messaging.message.id": task_id}
    span = made.start_span("read stream", context=context, kind=api.SpanKind.CLIENT, attributes=about)
    return Reading(span) if span.is_recording() else None


class ServerSpan(Current):
    """The span of a request to the gateway."""

    __slots__ = ()

    def answered(self, method: str, route: str, status: int) -> None:
        if (span := self._span) is None:
            return
        span.update_name(f"{method} {route}")
        span.set_attributes(
            {"http.request.method": method, "http.route": route, "http.response.status_code": status}
        )
        if status >= 500:
            fail(span, str(status))


@contextmanager
def serving(headers: Mapping[str, str]) -> Iterator[ServerSpan]:
    """In this context a request with these headers is answered. Beneath a span of the application's own there is
    none of Petiole's."""
    made = tracer()
    if made is None or _below_another():
        with carried.following(carried.of(headers)):
            yield ServerSpan()
        return
    from opentelemetry.trace import SpanKind

    with ServerSpan(made.start_span("request", context=context_of(headers), kind=SpanKind.SERVER)) as span:
        yield span


def _below_another() -> bool:
    from opentelemetry import trace as api

    return bool(api.get_current_span().get_span_context().is_valid)

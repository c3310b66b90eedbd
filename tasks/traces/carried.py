"""Which trace goes on: as the headers `traceparent` and `tracestate` of W3C, in messages and over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from petiole.tasks.wire.headers import TRACEPARENT, TRACESTATE

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

NAMES = (TRACEPARENT.name, TRACESTATE.name)
NOTHING: Mapping[str, str] = {}

_followed: ContextVar[Mapping[str, str]] = ContextVar("trace", default=NOTHING)


def headers() -> Mapping[str, str]:
    """The headers of what is submitted here and now: of the current span, or of the trace that is followed. Empty
    without a trace."""
    if (api := sys.modules.get("opentelemetry.trace")) is not None:
        context = api.get_current_span().get_span_context()
        if context.is_valid:
            return of_context(context)
    return _followed.get()


def of(given: Mapping[str, Any]) -> Mapping[str, str]:
    """The headers of a trace among these. Wrong ones are left out."""
    if (parent := TRACEPARENT.of(given)) is None:
        return NOTHING
    state = TRACESTATE.of(given)
    return {TRACEPARENT.name: parent} if state is None else {TRACEPARENT.name: parent, TRACESTATE.name: state}


def of_context(context: SpanContext) -> dict[str, str]:
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    found = {TRACEPARENT.name: parent}
    if context.trace_state:
        found[TRACESTATE.name] = context.trace_state.to_header()
    return found


@contextmanager
def following(given: Mapping[str, str]) -> Iterator[None]:
    """In this context, what is submitted without a current span belongs to this trace."""
    token = _followed.set(given)
    try:
        yield
    finally:
        _followed.reset(token)

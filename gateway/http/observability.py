"""Around the application: a line of the access log and the figures of each request, and what becomes of a fault of
the gateway's own.

No line and no figure has a text of a request: of a path they have its form, because an id is enough to read an
answer, and of an exception its type and its place, because a message may quote a prompt."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
import traceback
from types import FunctionType, MethodType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from petiole.gateway.http.authentication import is_open, path_in
from petiole.gateway.serving.sse import OUTERMOST
from petiole.tasks.traces import carried, spans

access = logging.getLogger("petiole.gateway.access")
logger = logging.getLogger("petiole.gateway")

METRICS = CollectorRegistry()
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_REQUESTS = Counter(
    "petiole_gateway_requests",
    "Requests by the form of their path.",
    ("method", "path", "status"),
    registry=METRICS,
)
_RUNNING = Gauge("petiole_gateway_running_requests", "Requests whose answers are not complete.", registry=METRICS)
_FIRST = Histogram(
    "petiole_gateway_first_byte_seconds",
    "Seconds until the first part of an answer's body.",
    ("path",),
    buckets=_SECONDS,
    registry=METRICS,
)
_WHOLE = Histogram(
    "petiole_gateway_request_seconds", "Seconds until an answer is complete.", ("path",), buckets=_SECONDS,
    registry=METRICS,
)  # fmt: skip
_FAULTS = Counter(
    "petiole_gateway_faults", "Errors of the gateway itself, by their type.", ("type",), registry=METRICS
)

_NOTICES = Counter(
    "petiole_gateway_notices",
    "Notices of webhooks: delivered, failed (they are tried again) or dropped.",
    ("outcome",),
    registry=METRICS,
)

_DENIED = Gauge(
    "petiole_gateway_denied_commands",
    "Commands of the gateway's that its Redis user may not call.",
    registry=METRICS,
)

_TRACE = {name.encode() for name in carried.NAMES}
_HANDLERS = FunctionType, MethodType

UNSEEN = frozenset({"/health", "/ready", "/metrics"})
"""Paths without a line in the access log."""


class ObservabilityMiddleware:
    """The application, observed."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            try:
                await self._app(scope, receive, send)
            except Exception as error:
                _fault(error)
            return
        scope[OUTERMOST] = send
        began_at, status, first_s = time.perf_counter(), 0, 0.0
        name = name_of(scope)

        async def observed(message: Message) -> None:
            nonlocal status, first_s
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name), (b"request-id", name)]
            elif not first_s and message.get("body"):
                first_s = time.perf_counter() - began_at
            await send(message)

        _RUNNING.inc()
        try:
            await self._app(scope, receive, observed)
        except asyncio.CancelledError:
            status = status or 499
            raise
        except Exception as error:
            _fault(error)
            status = status or 500
        finally:
            _RUNNING.dec()
            whole_s, path, known = time.perf_counter() - began_at, form_of(scope), method_of(scope)
            _REQUESTS.labels(known, path, status).inc()
            _WHOLE.labels(path).observe(whole_s)
            if first_s:
                _FIRST.labels(path).observe(first_s)
            if path not in UNSEEN:
                peer = scope["client"][0] if scope.get("client") else "-"
                access.info("%s %s %s %d %.0f ms %s", peer, known, path, status, 1000 * whole_s, name.decode())


class TracingMiddleware:
    """The application, with a span of each request whose caller is known: nobody else begins one, or says whether
    it is recorded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(path_in(scope)):
            return await self._app(scope, receive, send)
        trace = _trace_of(scope)
        if not trace and not carried.headers() and spans.tracer() is None:  # nothing goes on, and nobody records
            return await self._app(scope, receive, send)
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with spans.serving(trace) as served:
            try:
                await self._app(scope, receive, observed)
            except asyncio.CancelledError:
                status = status or 499
                raise
            except Exception:
                status = status or 500
                raise
            finally:
                served.answered(method_of(scope), form_of(scope), status)


def count_notice(outcome: str) -> None:
    """What has become of a webhook's notice."""
    _NOTICES.labels(outcome).inc()


def count_denied(commands: int) -> None:
    """How many commands the gateway's Redis user may not call."""
    _DENIED.set(commands)


def name_of(scope: Scope) -> bytes:
    """By which a client, and whoever is between, finds the request in the log: the client's own `x-request-id`, or
    a new one."""
    for header, value in scope["headers"]:
        if header == b"x-request-id" and re.fullmatch(rb"[\w.:-]{1,64}", value):
            return bytes(value)
    return b"req_" + secrets.token_hex(8).encode()


def method_of(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in ("GET", "POST", "DELETE", "HEAD", "OPTIONS", "PUT", "PATCH") else "other"


def form_of(scope: Scope) -> str:
    """The path with `{id}` in place of an id; `other` for a path that leads nowhere. A mount, too, says what it
    leads to: an application, whose routes may not know the path."""
    if not isinstance(scope.get("endpoint"), _HANDLERS):
        return "other"
    path: str = scope["path"]
    for name, value in scope.get("path_params", {}).items():
        if isinstance(value, str) and value:
            path = path.replace(f"/{value}", f"/{{{name}}}", 1)
    return path


def _trace_of(scope: Scope) -> dict[str, str]:
    """The headers of the client's trace."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"] if name in _TRACE}


def _fault(error: Exception) -> None:
    _FAULTS.labels(type(error).__name__).inc()
    places = " < ".join(
        f"{one.filename}:{one.lineno} {one.name}" for one in traceback.extract_tb(error.__traceback__)[::-1][:12]
    )
    logger.error("a request has failed: %s at %s", type(error).__name__, places)

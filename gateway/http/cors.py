"""Which web pages may call the gateway: its own, and those of the origins in `PETIOLE_GATEWAY_ORIGINS`.

A page of another origin cannot read an answer: that is the browser's rule. But it may send. A POST with a plain
type is sent without asking first, and a WebSocket can even be read. So without keys any page could use a gateway
on loopback. What changes something, and a WebSocket, is refused if a browser says that such a page sends it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from petiole.gateway.core.failures import Failure
from petiole.gateway.http.dialects import error_answer
from petiole.gateway.serving.auth.callers import DENIED
from petiole.tasks.settings import settings

logger = logging.getLogger("petiole.gateway")

_MOST_LOGGED, _LONGEST = 64, 256
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def with_origins(application: ASGIApp) -> ASGIApp:
    """The application, for the pages that may call it."""
    allowed = [one.strip() for one in settings().gateway_origins.split(",") if one.strip()]
    inner = application
    if allowed:
        inner = CORSMiddleware(
            application, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
        )
    return _OriginMiddleware(inner, allowed)


class _OriginMiddleware:
    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app, self._allowed = app, frozenset(allowed)
        self._logged: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_foreign(scope):
            return await self._app(scope, receive, send)
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": DENIED})
        told = "a page of this origin may not call the gateway: see PETIOLE_GATEWAY_ORIGINS"
        origin = Headers(scope=scope).get("origin", "")[:_LONGEST]
        if origin not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(origin)
            logger.warning("%r: %s (said once)", origin, told)
        failure = Failure(403, told, code="foreign_origin")
        await error_answer(scope, failure)(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        """Whether a page of another origin sends what it may not."""
        if scope["type"] not in ("http", "websocket"):
            return False
        headers = Headers(scope=scope)
        asks_first = scope.get("method") == "OPTIONS" and "access-control-request-method" in headers
        if scope.get("method") in _SAFE and not asks_first:
            return False
        origin = headers.get("origin")
        if origin is None or self._allowed & {origin, "*"}:  # without one, no page sends it
            return False
        if (site := headers.get("sec-fetch-site")) is not None:
            return site != "same-origin"
        return urlsplit(origin).netloc != headers.get("host")

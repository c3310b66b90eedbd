"""Before the application, under any server: a request's headers are neither too many nor too large."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from petiole.gateway.core.failures import Failure
from petiole.gateway.http.dialects import error_answer

MOST = 100
MOST_BYTES = 64 * 2**10
"""The bytes of all names and values, with the path and the query."""


class HeaderLimitMiddleware:
    """The application, for requests whose headers are within the limits."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (limit := _broken(scope)):
            failure = Failure(431, f"the headers must have at most {limit}", code="headers_too_large")
            return await error_answer(scope, failure)(scope, receive, send)
        await self._app(scope, receive, send)


def _broken(scope: Scope) -> str:
    """The limit that a request's headers break; empty: none."""
    headers = scope["headers"]
    if len(headers) > MOST:
        return f"{MOST} fields, got {len(headers)}"
    size = len(scope["path"]) + len(scope.get("query_string", b""))
    for name, value in headers:
        size += len(name) + len(value)
    return f"{MOST_BYTES} bytes, got {size}" if size > MOST_BYTES else ""

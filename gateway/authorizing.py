"""Before the application: finds out who asks. A request without a key that is known goes no further, where keys
exist. Only `OPEN` paths are answered to everybody: they say nothing of a tenant.

A key comes as `Authorization: Bearer KEY` or, as Anthropic's clients send it, as `x-api-key: KEY`. It never comes
in a path, because logs have paths."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from petiole.gateway.core.caller import asking
from petiole.gateway.core.failures import Failure
from petiole.gateway.dialects import error_answer
from petiole.gateway.serving.callers.keys import callers

OPEN = frozenset({"/health", "/ready", "/metrics"})
_DENIED = 3000  # what a WebSocket is closed with: IANA's "unauthorized"


class Authorized:
    """The application, for callers that may use it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or path_in(scope) in OPEN:
            return await self._app(scope, receive, send)
        try:
            who = await callers().of(key_in(scope))
        except Failure as failure:
            if scope["type"] == "http":
                return await error_answer(scope, failure)(scope, receive, send)
            return await send({"type": "websocket.close", "code": _DENIED})
        with asking(who) as told:

            async def telling(message: Message) -> None:
                if told and message["type"] == "http.response.start":
                    more = [(name.encode(), value.encode()) for name, value in told.items()]
                    message["headers"] = [*message.get("headers", ()), *more]
                await send(message)

            await self._app(scope, receive, telling)


def path_in(scope: Scope) -> str:
    """The path below the application's own, wherever it is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root)


def key_in(scope: Scope) -> str | None:
    """The key that the client has sent."""
    for name, value in scope["headers"]:
        if name == b"x-api-key" and value:
            return str(value.decode("latin-1"))
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return str(value[7:].strip().decode("latin-1")) or None
    return None

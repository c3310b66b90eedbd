"""Before the application: finds out who asks. A request without a key that is known goes no further, where keys
exist. Only `OPEN` paths and the files of the page are answered to everybody: they say nothing of a tenant.

A key comes as `Authorization: Bearer KEY` or, as Anthropic's clients send it, as `x-api-key: KEY`. It never comes
in a path, because logs have paths."""

from __future__ import annotations

import asyncio
import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from petiole.gateway.core.caller import ClientRequest, as_caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.http.dialects import error_answer
from petiole.gateway.serving.auth import hosts, idempotency
from petiole.gateway.serving.auth.callers import DENIED, callers, key_in

_NOT_ITS_NAME = "without keys this gateway is called by loopback's names alone: see PETIOLE_GATEWAY_HOSTS"

OPEN = frozenset({"/", "/health", "/ping", "/ready", "/metrics"})


class AuthenticationMiddleware:
    """The application, for callers that may use it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or is_open(path_in(scope)):
            return await self._app(scope, receive, send)
        try:
            who = await callers().of(key_in(scope))
            if not who.name and not hosts.is_known(scope):
                raise Failure(403, _NOT_ITS_NAME, code="foreign_host")
        except Failure as failure:
            if scope["type"] == "http":
                return await error_answer(scope, failure)(scope, receive, send)
            return await send({"type": "websocket.close", "code": DENIED})
        made = repeating(scope)
        with as_caller(who, made) as told:
            complete = gone = False

            async def hearing() -> Message:
                nonlocal gone
                message = await receive()
                gone = gone or (message["type"] == "http.disconnect" and not complete)
                return message

            async def telling(message: Message) -> None:
                nonlocal complete
                if told and message["type"] == "http.response.start":
                    more = [(name.encode(), value.encode()) for name, value in told.items()]
                    message["headers"] = [*message.get("headers", ()), *more]
                await send(message)
                complete = complete or (message["type"] == "http.response.body" and not message.get("more_body"))

            try:
                await self._app(scope, hearing, telling)
            finally:
                if made is not None and made.name and (gone or not complete):
                    await asyncio.shield(asyncio.ensure_future(idempotency.left()))


def repeating(scope: Scope) -> ClientRequest | None:
    """The request, if another one may repeat it, or if it may repeat another one."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    made = ClientRequest(path_in(scope))
    for name, value in scope["headers"]:
        if name == b"idempotency-key":
            made.idempotency_key = value.decode("latin-1")
        elif name == b"x-stainless-retry-count" and re.fullmatch(rb"[0-9]{1,4}", value):
            made.retries = int(value)
    return made if made.may_repeat else None


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith("/page/")


def path_in(scope: Scope) -> str:
    """The path below the application's own, wherever it is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path.removeprefix(root)

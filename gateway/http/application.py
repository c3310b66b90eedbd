"""The ASGI application. It needs no lifespan, so it can be mounted anywhere: connections begin at their first
use. So does the dispatcher of webhooks: under `petiole serve` when the process starts, elsewhere at the first
request."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from functools import cached_property

import redis
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from petiole.gateway.core.failures import Failure, failure_of
from petiole.gateway.http import headers
from petiole.gateway.http.authentication import AuthenticationMiddleware, path_in
from petiole.gateway.http.cors import with_origins
from petiole.gateway.http.dialects import error_answer
from petiole.gateway.http.observability import (
    METRICS,
    ObservabilityMiddleware,
    TracingMiddleware,
    count_denied,
    count_notice,
)
from petiole.gateway.openai.responses import conversation_store
from petiole.gateway.routes import (
    admin,
    anthropic as messages,
    batches as batches,
    embeddings as texts,
    invocations,
    lora,
    openai,
    page as page,
    responses as responses,
)
from petiole.gateway.serving.auth import redis_rights
from petiole.gateway.serving.retry import refused
from petiole.gateway.serving.sse import ClientGone
from petiole.gateway.serving.webhooks.dispatcher import WebhookDispatcher
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.servers import connections

_ANSWER_S = 2.0
_SLASHES = re.compile("/{2,}")
_ANSWERED = Failure, InvalidRequest, HTTPException, ClientGone, redis.RedisError, Exception


async def health(_: Request) -> Response:
    """Whether the process answers."""
    return JSONResponse({"status": "ok"})


async def ready(_: Request) -> Response:
    """Whether Redis answers, too: a load balancer sends requests to no other. And what Redis does not let the
    gateway do, as far as it is known."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await connections.async_streams().ping()
    except (TimeoutError, *connections.LOST) as error:
        return JSONResponse({"status": "unavailable", "reason": type(error).__name__}, 503)
    denied = await redis_rights.denied_commands().look()
    return JSONResponse({"status": "ok", **({"may_not": denied} if denied else {})})


async def version(_: Request) -> Response:
    return JSONResponse({"version": importlib.metadata.version("petiole")})


async def metrics(_: Request) -> Response:
    """This process's figures, for Prometheus. Those of the fleet are `petiole metrics`."""
    count_denied(len(await redis_rights.denied_commands().look()))
    return Response(generate_latest(METRICS), media_type=CONTENT_TYPE_LATEST)


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)
    return error_answer(request.scope, _told(error))


def _told(error: Exception) -> Failure:
    match error:
        case Failure():
            return error
        case HTTPException(status_code=404):
            return Failure(404, "there is no such path", code="not_found")
        case HTTPException(status_code=405):
            allow = (error.headers or {}).get("Allow")
            return Failure(405, "this path has no such method", code="method_not_allowed", allow=allow)
        case HTTPException():
            return Failure(error.status_code, error.detail)
        case redis.RedisError():
            return refused(error)
        case InvalidRequest():
            return failure_of(error)
    return Failure(500, "the gateway has failed", code="server_error")


def _below_v1() -> list[BaseRoute]:
    """Anthropic's before OpenAI's: a path of both is Anthropic's for its clients alone."""
    return [
        *openai.busiest(),
        *messages.routes(),
        *openai.routes(),
        *responses.routes(),
        *texts.routes(),
        *batches.routes(),
        *page.routes_of_the_fleet(),
        *admin.routes(),
        *lora.routes(),
    ]


def make() -> Starlette:
    return Starlette(
        routes=[
            Mount("/v1", routes=_below_v1()),
            Route("/health", health),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/ready", ready),
            Route("/version", version),
            Route("/metrics", metrics),
            *page.routes(),
            *openai.routes_at_the_root(),
            *texts.routes_at_the_root(),
            *invocations.routes(),
            *lora.routes(),
        ],
        exception_handlers=dict.fromkeys(_ANSWERED, _failed),
    )


dispatcher = connections.PerLoop(lambda: WebhookDispatcher(conversation_store.ended_as, count_notice))
"""The running event loop's."""


class _WithOrigins:
    """`with_origins`, but the settings are read at the first request: importing reads none."""

    @cached_property
    def _app(self) -> ASGIApp:
        return with_origins(AuthenticationMiddleware(TracingMiddleware(make())))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dispatcher().start()
        path = scope.get("path", "")
        if "//" in path:  # of a base URL that ends with a slash
            path = scope["path"] = _SLASHES.sub("/", path)
        if path.endswith("/") and path_in(scope).rstrip("/"):  # a slash at the end means nothing
            scope["path"] = path.rstrip("/")
        await self._app(scope, receive, send)


app: ASGIApp = ObservabilityMiddleware(headers.HeaderLimitMiddleware(_WithOrigins()))

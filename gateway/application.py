"""The ASGI application. It needs no lifespan, so it can be mounted anywhere: connections begin at their first
use."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from petiole.tasks.servers import connections

_ANSWER_S = 2.0


async def health(_: Request) -> Response:
    """Whether the process answers."""
    return JSONResponse({"status": "ok"})


async def ready(_: Request) -> Response:
    """Whether Redis answers, too: a load balancer sends requests to no other."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            await connections.async_streams().ping()
    except (TimeoutError, *connections.LOST) as error:
        return JSONResponse({"status": "unavailable", "reason": type(error).__name__}, 503)
    return JSONResponse({"status": "ok"})


def make() -> Starlette:
    return Starlette(routes=[Route("/health", health), Route("/ready", ready)])


app = make()

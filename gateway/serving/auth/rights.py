"""What not every key may do. A route that needs a right asks for it before anything else is done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from petiole.gateway.core.caller import caller
from petiole.gateway.core.failures import Failure

Handler = Callable[[Request], Awaitable[Response]]


def needing(right: str, handler: Handler) -> Handler:
    """The handler, for callers with this right. Without keys nobody has any."""

    async def asked(request: Request) -> Response:
        if right not in caller().rights:
            told = f"this needs a key with the right {right}: see `petiole keys set --rights {right}`"
            raise Failure(403, told, code="missing_right")
        return await handler(request)

    return asked

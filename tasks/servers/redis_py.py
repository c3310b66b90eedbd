"""The differences between the versions of redis-py that web apps may have: 4.5 to 8.

Each difference is detected once, by the parameters of the installed version's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from inspect import Parameter, signature
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.exceptions

_get_connection = signature(redis.ConnectionPool.get_connection).parameters
_read_response = signature(redis.asyncio.Connection.read_response).parameters

RESP2: dict[str, Any] = {"protocol": 2} if redis.VERSION >= (5,) else {}
"""The parameters for RESP2. With RESP3 (possible from version 5, the default from 8) redis-py makes a log record
for each pub/sub message, at any log level, and hides the confirmation of a subscription from the connection's
reader."""

COMMAND: tuple[str, ...] = ("_",) if _get_connection["command_name"].default is Parameter.empty else ()
"""Before 5.3, a caller that asks for a connection must name a command, which has no effect; later versions warn of
it."""

UNTIL_SOMETHING_COMES: dict[str, Any] = {
    name: value
    for name, value in {"timeout": math.inf, "disconnect_on_error": False, "push_request": True}.items()
    if name in _read_response
}
"""The parameters to read a subscription without a time limit, so that a cancelled read leaves the connection
open."""


def read_along(connection: Any) -> Iterator[Any]:
    """The answers that an asyncio connection has received together with the last one that it returned, errors as
    exceptions. `read_response` costs many times what hiredis takes to parse a message. Without hiredis there are
    none: then `read_response` returns each."""
    gets = getattr(getattr(connection._parser, "_reader", None), "gets", None)
    while gets and ((answer := gets()) is None or isinstance(answer, list | bytes | int | Exception)):
        if answer is False:  # older versions' word for: no more
            return
        yield answer


OutOfMemory: Any = getattr(redis.exceptions, "OutOfMemoryError", ())
"""The error of a full Redis. Before 4.6 it is a plain ResponseError, whose text begins with the code."""

Client = TypeVar("Client", bound=redis.Redis | redis.asyncio.Redis)


def owner(client: Client) -> Client:
    """`client`, which will close its pool when it is closed: like `Redis.from_pool`, which came with 5.0.1."""
    client.auto_close_connection_pool = True
    return client

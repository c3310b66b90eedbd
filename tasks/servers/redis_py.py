"""What differs between the versions of redis-py: web apps bring 4.5 to 8.

Decided once, by what the installed version's own functions take.
"""

from __future__ import annotations

import math
from inspect import Parameter, signature
from typing import Any, TypeVar

import redis
import redis.asyncio
import redis.exceptions

_get_connection = signature(redis.ConnectionPool.get_connection).parameters
_read_response = signature(redis.asyncio.Connection.read_response).parameters

RESP2: dict[str, Any] = {"protocol": 2} if redis.VERSION >= (5,) else {}
"""With RESP3, which came with 5 and is the default of 8, redis-py makes a log record for each pub/sub message, at
any log level, and gives no confirmation of a subscription to who reads the connection."""

COMMAND: tuple[str, ...] = ("_",) if _get_connection["command_name"].default is Parameter.empty else ()
"""Before 5.3 who asks for a connection must name a command, for nothing; later versions warn of it."""

UNTIL_SOMETHING_COMES: dict[str, Any] = {
    name: value
    for name, value in {"timeout": math.inf, "disconnect_on_error": False, "push_request": True}.items()
    if name in _read_response
}
"""How a subscription is read: without a time limit, and a cancelled read leaves the connection open."""

OutOfMemory: Any = getattr(redis.exceptions, "OutOfMemoryError", ())
"""Before 4.6 a plain ResponseError, whose text begins with the code."""

Client = TypeVar("Client", redis.Redis, redis.asyncio.Redis)


def owner(client: Client) -> Client:
    """`client`, which closes its pool when it is closed: `Redis.from_pool`, which came with 5.0.1."""
    client.auto_close_connection_pool = True
    return client

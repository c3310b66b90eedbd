"""Answers of a Redis server that are not valid replies. Connections recognise them when they read them.

no reply at all   bytes outside Redis's protocol, for example from a proxy whose server is away. The connection is
                  closed as if it were lost, and the callers handle it as a lost connection
a damaged key     somebody else has written into a key: it has another type, or does not hold a number. The error
                  is a `DamagedKey`: the caller decides what that means for its task. No other key is affected
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

_DAMAGE = ("WRONGTYPE", "not an integer", "would overflow")
"""The same words as in `record/lua/prelude.lua`. Errors of scripts have further text around them."""


class DamagedKey(ResponseError):  # noqa: N818 - what it is
    """A command or script met a key of another type than it expects, or one that does not hold a number."""


def is_damage(error: object) -> bool:
    """Whether `error` means a damaged key. Most such errors are `DamagedKey`s. Two kinds are not: errors of other
    connections than Petiole's (stock kombu's, say), and errors inside the reply of a transaction."""
    return isinstance(error, ResponseError) and any(words in str(error) for words in _DAMAGE)


class Answers:
    """Mixin of a connection class of redis-py."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **options)
        except InvalidResponse as error:
            connection.disconnect()
            raise no_reply(error) from error
        except ResponseError as error:
            raise named(error) from error.__cause__


class AsyncAnswers:
    """Mixin of a connection class of `redis.asyncio`."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return await connection.read_response(*args, **options)
        except InvalidResponse as error:
            await connection.disconnect(nowait=True)
            raise no_reply(error) from error
        except ResponseError as error:
            raise named(error) from error.__cause__


def no_reply(error: InvalidResponse) -> ConnectionError:
    return ConnectionError(f"the server does not answer as Redis does: {error}")


def named(error: ResponseError) -> ResponseError:
    return DamagedKey(*error.args) if is_damage(error) else error


def answering(kind: type) -> type:
    """`kind`, a connection class, with `Answers`."""
    return kind if issubclass(kind, Answers) else type(kind.__name__, (Answers, kind), {})

"""What a Redis server may answer besides a reply, recognised where it is read: at the connection.

no reply at all   bytes that are not of Redis's protocol, such as of a proxy whose server is away: the connection
                  is closed, as if it were lost, and the callers do what they do about a lost one
a damaged key     somebody else has written into a key: it has another type, or holds no number. The error is a
                  `DamagedKey`, for the caller to decide whose loss that is; no other key is affected
"""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError, InvalidResponse, ResponseError

_DAMAGE = ("WRONGTYPE", "not an integer", "would overflow")
"""As in the worker's `prelude.lua`. Errors of scripts have further text around these words."""


class DamagedKey(ResponseError):  # noqa: N818 - what it is
    """A command or script met a key of another type than it expects, or one that holds no number."""


def is_damage(error: object) -> bool:
    """Also for an error of a connection that is not Petiole's, such as stock kombu's, and for one of a command in
    a transaction, which is part of a reply: other ones are `DamagedKey`."""
    return isinstance(error, ResponseError) and any(words in str(error) for words in _DAMAGE)


class Answers:
    """Mixin of a connection class of redis-py."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return connection.read_response(*args, **options)
        except InvalidResponse as error:
            self.disconnect()
            raise no_reply(error) from error
        except ResponseError as error:
            raise named(error) from error.__cause__

    def disconnect(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        return connection.disconnect(*args, **options)


class AsyncAnswers:
    """Mixin of a connection class of `redis.asyncio`."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        try:
            return await connection.read_response(*args, **options)
        except InvalidResponse as error:
            await self.disconnect(nowait=True)
            raise no_reply(error) from error
        except ResponseError as error:
            raise named(error) from error.__cause__

    def disconnect(self, *args: Any, **options: Any) -> Any:
        connection: Any = super()
        return connection.disconnect(*args, **options)


def no_reply(error: InvalidResponse) -> ConnectionError:
    return ConnectionError(f"what answers is no Redis: {error}")


def named(error: ResponseError) -> ResponseError:
    return DamagedKey(*error.args) if is_damage(error) else error


def answering(kind: type) -> type:
    """`kind`, a connection class, with `Answers`."""
    return kind if issubclass(kind, Answers) else type(kind.__name__, (Answers, kind), {})

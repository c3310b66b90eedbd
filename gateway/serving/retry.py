"""Waits for a Redis that is away for a moment, such as during a failover; and what Redis refuses.

A client gets an answer in the form of its interface, which names Redis's own word for the refusal, and nothing of
keys and values. The operator gets a line of the log, once in `TOLD_EVERY_S` for each word."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, TypeVar

import redis

from petiole.gateway.core import failures
from petiole.gateway.core.failures import Failure, unavailable
from petiole.tasks import errors
from petiole.tasks.servers import redis_py
from petiole.tasks.servers.connections import LOST
from petiole.tasks.servers.replies import is_damage

logger = logging.getLogger("petiole.gateway")

WAIT_S = 4.0
_PAUSE_S = 0.1
TOLD_EVERY_S = 10.0

T = TypeVar("T")


class RedisRefusal(NamedTuple):
    """`word`: Redis's own. `passes`: whether the same command may succeed later. `soon`: a moment's wait may be
    enough."""

    word: str
    why: str
    passes: bool = True
    soon: bool = False


_OUT_OF_MEMORY = RedisRefusal("OOM", "Redis has reached its maxmemory")
_NOT_PERMITTED = RedisRefusal(
    "NOPERM", "the gateway's Redis user may not do what this request needs", passes=False
)
_DAMAGED = RedisRefusal("WRONGTYPE", "a key in Redis has another type than this request needs", passes=False)
_NOT_KNOWN = RedisRefusal("NOAUTH", "Redis does not accept the gateway's user or password", passes=False)
_OTHER = RedisRefusal("ERR", "Redis has refused a command that this request needs", passes=False)
_LOADING = RedisRefusal("LOADING", "Redis reads its data", soon=True)
_READ_ONLY = RedisRefusal("READONLY", "Redis is a replica at the moment", soon=True)
_NO_SCRIPT = RedisRefusal("NOSCRIPT", "Redis has lost a script", soon=True)

_OF_A_KIND: Mapping[type, RedisRefusal] = {
    redis.exceptions.NoPermissionError: _NOT_PERMITTED,
    redis.exceptions.ReadOnlyError: _READ_ONLY,
    redis.exceptions.BusyLoadingError: _LOADING,
    redis.exceptions.NoScriptError: _NO_SCRIPT,
    redis.exceptions.AuthenticationError: _NOT_KNOWN,
}
_OF_A_WORD: Mapping[str, RedisRefusal] = {
    one.word: one
    for one in (
        _OUT_OF_MEMORY,
        _NOT_PERMITTED,
        _LOADING,
        _READ_ONLY,
        _NO_SCRIPT,
        RedisRefusal("MISCONF", "Redis takes no writes, because it cannot save them"),
        RedisRefusal("NOREPLICAS", "Redis takes no writes, because it lacks replicas"),
        RedisRefusal("BUSY", "Redis runs a script that takes too long", soon=True),
        RedisRefusal("CLUSTERDOWN", "a part of the Redis cluster is away", soon=True),
        RedisRefusal("MASTERDOWN", "Redis is a replica without its master", soon=True),
        RedisRefusal("TRYAGAIN", "Redis moves keys to another server", soon=True),
    )
}
_WORD = re.compile(r"\b(" + "|".join(_OF_A_WORD) + r")\b")
_RIGHTS = re.compile("ACL failure|permissions|can't run this command|executing the script can't")
"""What an error of a script says in place of NOPERM."""


def refusal(error: redis.RedisError) -> RedisRefusal:
    """Which one it is. redis-py has classes for some and has cut their words off; an error in a script comes as
    text."""
    if isinstance(error, redis_py.OutOfMemory):
        return _OUT_OF_MEMORY
    for kind, known in _OF_A_KIND.items():
        if isinstance(error, kind):
            return known
    if is_damage(error):
        return _DAMAGED
    text = str(error)
    if (found := _WORD.search(text)) is not None:
        return _OF_A_WORD[found[1]]
    return _NOT_PERMITTED if _RIGHTS.search(text) else _OTHER


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What the call returns. It may be made again, so it must change nothing at a second time. Raises `Failure` if
    Redis stays away, or refuses it."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        try:
            return await call()
        except (*LOST, redis.ResponseError) as error:
            waits = isinstance(error, LOST) or refusal(error).soon
            if not waits or time.monotonic() + _PAUSE_S > give_up_at:
                raise refused(error) from error
        await asyncio.sleep(_PAUSE_S)


_told_at: dict[str, float] = {}


def refused(error: redis.RedisError | OSError) -> Failure:
    """What the client is told. The log has a line for the operator."""
    if isinstance(error.__cause__, redis.exceptions.AuthenticationError):
        error = error.__cause__
    if isinstance(error, OSError) or (isinstance(error, LOST) and type(error) not in _OF_A_KIND):
        return unavailable("Redis cannot be reached at the moment; try again")
    found = refusal(error)
    _tell(error, found)
    message = f"{found.why} ({found.word})"
    if found.passes:
        return unavailable(f"{message}; try again")
    return Failure(503, message, code="redis_refused")


def failure_of(error: BaseException, names: Mapping[str, str] | None = None) -> Failure:
    """`core.failures.failure_of`, also of an error of Redis, and of a submission that says only in words what
    Redis has refused."""
    if isinstance(error, errors.Unavailable):
        said = redis.ResponseError(error.reason)
        return failures.failure_of(error, names) if refusal(said) is _OTHER else refused(said)
    return refused(error) if isinstance(error, redis.RedisError) else failures.failure_of(error, names)


def _tell(error: redis.RedisError, found: RedisRefusal) -> None:
    """Redis quotes the words of a command that it does not know: those stay out of the log."""
    text = " ".join(str(error).partition("with args beginning")[0].split())[:200]
    now = time.monotonic()
    if now - _told_at.get(found.word, float("-inf")) >= TOLD_EVERY_S:
        _told_at[found.word] = now
        logger.error("Redis has refused a command of a request: %s: %s", found.word, text)

"""The real Lua scripts on a real Redis, as pure functions: (keys and their values, call) -> (the same, reply).

Few different calls occur in very many states of a model, so each is executed once and remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from petiole.tasks.wire.keys import LedgerKeys
from petiole.tasks.worker import scripts

Keys = tuple[tuple[str, Any], ...]
"""The contents of a Redis, sorted by key: a tuple for a list, a frozenset of pairs for a hash, a frozenset of
names for a set, and a string. What is empty does not exist."""

LEASE, LONG_AGO = LedgerKeys.under("").lease, "1000"

DUMP = """
local all = {}
for i, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local read = {list = {'LRANGE', key, 0, -1}, hash = {'HGETALL', key}, set = {'SMEMBERS', key},
                string = {'GET', key}}
  all[i] = {key, kind, redis.call(unpack(read[kind]))}
end
return all
"""


class Scripts:
    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._known: dict[tuple[Any, ...], tuple[Keys, Any]] = {}

    def __call__(self, name: str, before: Keys, keys: Sequence[Any], args: Sequence[Any]) -> tuple[Keys, Any]:
        call = (name, before, tuple(keys), tuple(args))
        if call not in self._known:
            self._known[call] = self._run(name, before, keys, args)
        return self._known[call]

    @property
    def calls(self) -> int:
        return len(self._known)

    def _run(self, name: str, before: Keys, keys: Sequence[Any], args: Sequence[Any]) -> tuple[Keys, Any]:
        pipe = self._client.pipeline(transaction=False)
        pipe.flushdb()
        for key, value in before:
            match value:
                case tuple():
                    pipe.rpush(key, *value)
                case str():
                    pipe.set(key, value)
                case _ if all(isinstance(item, tuple) for item in value):
                    pipe.hset(key, mapping=dict(value))
                case _:
                    pipe.sadd(key, *value)
        pipe.eval(scripts.SOURCES[name], len(keys), *keys, *args)
        pipe.eval(DUMP, 0)
        *_, reply, after = pipe.execute()
        return tuple(sorted(_entry(_text(key), kind, value) for key, kind, value in after)), _text(reply)


def _entry(key: str, kind: bytes, value: Any) -> tuple[str, Any]:
    """Without the time of an owner's last sign of life: it was long ago."""
    return key, LONG_AGO if key.startswith(LEASE) else _value(kind, value)


def _value(kind: bytes, value: Any) -> Any:
    items = _text(value)
    match kind:
        case b"list":
            return items
        case b"hash":
            return frozenset(zip(items[::2], items[1::2], strict=True))
        case b"set":
            return frozenset(items)
    return items


def _text(reply: Any) -> Any:
    if isinstance(reply, list):
        return tuple(map(_text, reply))
    return reply.decode() if isinstance(reply, bytes) else reply

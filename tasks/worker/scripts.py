"""The Lua scripts beside this module, each registered with the client that is to run it.

A script is one atomic step of Redis, so every invariant that two workers could race for is kept in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import redis


class Script(Protocol):
    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any: ...


@cache
def source(name: str) -> str:
    return (files("tasks.worker") / "lua" / f"{name}.lua").read_text()


def load(client: redis.Redis, name: str) -> Script:
    """`lua/NAME.lua` as a callable; sent to the server again when that has lost it."""
    script = client.register_script(source(name))
    return lambda keys, args: script(keys, args, client)

"""Loads Lua scripts. Redis runs a script atomically, so every invariant that processes could break by a race is
enforced in a script.

All scripts are read when the process imports them. Read later, after an upgrade of the installed package, they
might not fit the arguments of this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import redis


class Script(Protocol):
    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any: ...


class PublishReply(IntEnum):
    """The answer of `publish.lua` for a stream that needs attention."""

    STALE = 1
    GAP = 2
    FLAGGED = 3
    UNREAD = 4
    DAMAGED = 5


class CloseReply(IntEnum):
    """The answer of `close.lua`."""

    ANOTHERS = 0
    ENDED = 1


class ReopenReply(IntEnum):
    """The answer of `reopen.lua`."""

    OPEN = 0
    RUNS = 1
    ENDED = 2


_FOLDER = Path(__file__).parent / "lua"
_PRELUDE = (_FOLDER / "prelude.lua").read_text()


def sources(folder: Path, constants: Mapping[str, Mapping[str, int | str]]) -> dict[str, str]:
    """The scripts under `folder`, each after the prelude and the constants that it shares with Python."""
    texts = {file.stem: file.read_text() for file in sorted(folder.rglob("*.lua"))}
    return {
        name: _PRELUDE + _locals(constants.get(name, {})) + text
        for name, text in texts.items()
        if name != "prelude"
    }


def _locals(constants: Mapping[str, int | str]) -> str:
    """The constants as local variables of Lua."""
    return "".join(f"local {name} = {json.dumps(value)}\n" for name, value in constants.items())


SOURCES = sources(
    _FOLDER,
    {
        "publish": PublishReply.__members__,
        "close": CloseReply.__members__,
        "reopen": ReopenReply.__members__,
    },
)
"""The scripts of a task's record."""


def load(client: redis.Redis, name: str, of: Mapping[str, str] = SOURCES) -> Script:
    """`NAME.lua` as a callable. It sends the script again if the server has lost it."""
    return client.register_script(of[name])

"""The worker's Lua scripts, in the folders `lua/` beside their callers, and those of `tasks.record`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import redis
from hiredis import pack_command

from petiole.tasks.servers.connections import LOST
from petiole.tasks.wire.headers import ID_BYTES
from petiole.tasks.wire.keys import AFFINITY_HEADER
from petiole.tasks.wire.record import scripts as record_scripts


class TakeReply(IntEnum):
    """The first element of `take.lua`'s answer."""

    DAMAGED = -1
    LOST = 0
    TAKEN = 1


class ClaimReply(IntEnum):
    """The answer of `claim.lua`."""

    NOT_CLAIMED = 0
    CLAIMED = 1
    OVERWRITTEN = 2


SOURCES = record_scripts.SOURCES | record_scripts.sources(
    Path(__file__).parent,
    {
        "take": {"AFFINITY_HEADER": AFFINITY_HEADER, "ID_BYTES": ID_BYTES, **TakeReply.__members__},
        "claim": ClaimReply.__members__,
    },
)
"""Each script, after the prelude and its constants."""


def load(client: redis.Redis, name: str) -> record_scripts.Script:
    """`NAME.lua` as a callable. It sends the script again if the server has lost it."""
    return client.register_script(SOURCES[name])


class Pipe:
    """A script on a connection of its own, with pipelined calls: the next call is written while the server runs
    one. Replies arrive in the order of the calls.

    Every error closes the connection. It is unknown whether calls without a reply were executed.
    """

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._text = SOURCES[name]
        self._sha = ""
        self._connection: Any = None
        self.sent = 0

    def send(self, keys: Sequence[Any], args: Sequence[Any]) -> None:
        try:
            if self._closed_meanwhile():
                self.close()
            if self._connection is None:
                self._connection = self._client.connection_pool.get_connection()
                self._connection.send_command("SCRIPT", "LOAD", self._text)
                self._sha = self._connection.read_response()
            command = pack_command(("EVALSHA", self._sha, len(keys), *keys, *args))
            self._connection.send_packed_command((command,))
        except BaseException:
            self.close()
            raise
        self.sent += 1

    def _closed_meanwhile(self) -> bool:
        """Whether a server or proxy has closed the idle connection: reconnect without reporting an error."""
        try:
            return self._connection is not None and not self.sent and bool(self._connection.can_read())
        except LOST:
            return True

    def receive(self) -> Any:
        try:
            answer = self._connection.read_response()
        except BaseException:
            self.close()
            raise
        self.sent -= 1
        return answer

    def close(self) -> None:
        connection, self._connection, self.sent = self._connection, None, 0
        if connection is not None:
            connection.disconnect()
            self._client.connection_pool.release(connection)

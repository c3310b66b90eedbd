"""The Lua scripts beside this module, each registered with the client that is to run it.

A script is one atomic step of Redis, so every invariant that two workers could race for is kept in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import redis
from hiredis import pack_command

from tasks.connections import LOST


class Script(Protocol):
    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any: ...


@cache
def source(name: str) -> str:
    return (files("tasks.worker") / "lua" / f"{name}.lua").read_text()


def load(client: redis.Redis, name: str) -> Script:
    """`lua/NAME.lua` as a callable; sent to the server again when that has lost it."""
    script = client.register_script(source(name))
    return lambda keys, args: script(keys, args, client)


class Pipe:
    """One script on a connection of its own, with several calls on their way: the server runs one while the next
    is being written. Answers come in the order of the calls.

    Any error but the script's own closes the connection; calls that were on their way have then happened or not.
    """

    def __init__(self, client: redis.Redis, name: str) -> None:
        self._client = client
        self._text = source(name)
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
        """By a server or a proxy that closes what is idle: no reason to say that Redis does not answer."""
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

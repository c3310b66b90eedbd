"""A Redis that is watched by Sentinel: connections that ask where the master is, each time that they are made.

What uses them goes on believing in one address, and a failover is what it always was: the connection is lost, or
its server refuses a write (see `masters`), and the next one leads to the new master. Nothing is remembered in
between but who answered last.

Broker, streams and results have one way of naming the sentinels, Celery's: the URL
`sentinel://[user:password@]host:port;sentinel://host:port/db`, whose user, password and database are the master's,
and the options `master_name` and `sentinel_kwargs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import redis
import redis.asyncio
from redis.exceptions import ResponseError
from redis.sentinel import MasterNotFoundError

SCHEME = "sentinel"
DEFAULT_PORT = 26379
DEFAULT_MASTER = "mymaster"
ANSWER_S = 2.0
"""How long each sentinel has to be connected to, and to answer, before the next one is asked."""

_FORM = "must be sentinel://[USER:PASSWORD@]HOST:PORT;sentinel://HOST:PORT.../DB, with one user, password and DB"


@dataclass(frozen=True)
class SentinelUrl:
    """Whom to ask, and what the master wants to know."""

    hosts: tuple[tuple[str, int], ...]
    username: str | None
    password: str | None
    db: int

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """ValueError, without the URL, if it is none."""
        try:
            parts = [urlsplit(part if "://" in part else f"{SCHEME}://{part}") for part in url.split(";")]
            hosts = tuple((part.hostname or "", part.port or DEFAULT_PORT) for part in parts)
            users = {(part.username, part.password) for part in parts} - {(None, None)}
            dbs = {int(path) for part in parts if (path := part.path.strip("/"))}
        except ValueError:
            raise ValueError(_FORM) from None
        plain = all(part.scheme == SCHEME and part.hostname and not part.query for part in parts)
        one = len(users) <= 1 and len(dbs) <= 1 and all(password for _, password in users)
        if not (plain and one and min(dbs, default=0) >= 0):
            raise ValueError(_FORM)
        username, password = users.pop() if users else (None, None)
        return cls(hosts, unquote(username or "") or None, unquote(password or "") or None, max(dbs, default=0))

    def __str__(self) -> str:
        """As Celery and kombu want it, which look at one part or the other: each with everything."""
        user = f"{quote(self.username or '', safe='')}:{quote(self.password, safe='')}@" if self.password else ""
        return ";".join(f"{SCHEME}://{user}{netloc(*host)}/{self.db}" for host in self.hosts)

    def parameters(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Of a `SentinelConnection`, or of a pool of them."""
        return {
            "sentinels": Sentinels(self.hosts, options),
            "username": self.username,
            "password": self.password,
            "db": self.db,
        }


def netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Password(redis.UsernamePasswordCredentialProvider):
    """One that may stand in what `celery inspect` is told."""

    def __json__(self) -> str:  # kombu's encoder asks for it
        return "***"

    def __repr__(self) -> str:
        return "***"


def options(master: str, password: str) -> dict[str, Any]:
    """The sentinels' part of Celery's transport options.

    One that is away is left for the next one at once, where redis-py would try it four times. The password is held
    by a provider, because kombu's errors show what is asked with, and before redis-py 8 a password with it.
    """
    timeouts = {"socket_connect_timeout": ANSWER_S, "socket_timeout": ANSWER_S}
    provider = _Password(password=password) if password else None
    asked = {**timeouts, "retry": None, "protocol": 2, "credential_provider": provider}
    return {"master_name": master, "sentinel_kwargs": asked}


_answered_last: dict[tuple[tuple[str, int], ...], tuple[str, int]] = {}
"""The process's, so that one that hangs costs the first connection `ANSWER_S`, and not each of a worker's."""


class Sentinels:
    """Those of one master."""

    def __init__(self, hosts: tuple[tuple[str, int], ...], options: Mapping[str, Any]) -> None:
        self._hosts = hosts
        self._name = options.get("master_name") or DEFAULT_MASTER
        self._options = options.get("sentinel_kwargs") or {}

    def __repr__(self) -> str:
        return f"Sentinels({self._name!r} at {', '.join(netloc(*host) for host in self._hosts)})"

    def master(self) -> tuple[str, int]:
        """Its address now, by the first sentinel that sees it up. MasterNotFoundError: none does."""
        reasons = []
        best = _answered_last.get(self._hosts)
        for asked in sorted(self._hosts, key=lambda host: host != best):
            try:
                state = self._state(*asked)
            except ResponseError as error:
                unknown = "No such master" in str(error)
                reasons.append((asked, "knows no such master" if unknown else str(error)))
            except redis.AuthenticationError as error:
                reasons.append((asked, f"{error} (PETIOLE_SENTINEL_PASSWORD)"))
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                reasons.append((asked, str(error)))
            else:
                if state["is_master"] and not (state["is_sdown"] or state["is_odown"]):
                    _answered_last[self._hosts] = asked
                    return state["ip"], state["port"]
                reasons.append((asked, f"says that {netloc(state['ip'], state['port'])} is down"))
        said = "; ".join(f"{netloc(*asked)}: {reason.rstrip('.')}" for asked, reason in reasons)
        raise MasterNotFoundError(f"the sentinels name no master {self._name!r} (PETIOLE_SENTINEL_MASTER): {said}")

    def _state(self, host: str, port: int) -> Any:
        with redis.Redis(host, port, **self._options) as sentinel:
            return sentinel.execute_command("SENTINEL MASTER", self._name)  # redis-py 6's method fails


def why(error: BaseException, url: str, options: Mapping[str, Any]) -> str:
    """What is wrong when kombu's own transport has found no master: it shows its clients, and no setting."""
    if isinstance(error.__cause__, MasterNotFoundError):
        try:
            Sentinels(SentinelUrl.parse(url).hosts, options).master()
        except MasterNotFoundError as clearer:
            return str(clearer)
        return "the sentinels named no master"
    return str(error)


class _Asking:
    def __init__(self, *args: Any, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sentinels = sentinels


class SentinelConnection(_Asking, redis.Connection):
    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.master()
        connection: Any = super()
        return connection._connect()


class AsyncSentinelConnection(_Asking, redis.asyncio.Connection):
    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._sentinels.master)
        connection: Any = super()
        await connection._connect()

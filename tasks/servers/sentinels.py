"""Redis Sentinel: connections that ask the sentinels for the master's address each time they connect.

Clients need no code for a failover: the connection is lost, or its server refuses a write (see `masters`), and
reconnecting leads to the new master. The only state that is kept is which sentinel answered last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ResponseError
from redis.sentinel import MasterNotFoundError

from petiole.contract.settings.urls import DEFAULT_MASTER, SENTINEL, SentinelUrl, netloc, scheme
from petiole.tasks.servers import redis_py
from petiole.tasks.settings import Settings

ANSWER_S = 2.0
"""Connect and read timeout of each sentinel, after which the next one is asked."""


class _Password(redis.UsernamePasswordCredentialProvider):
    """A credential provider that is safe to print and to send to `celery inspect`."""

    def __json__(self) -> str:  # called by kombu's JSON encoder
        return "***"

    def __repr__(self) -> str:
        return "***"


def sentinel_options(master: str, password: str, tls: Mapping[str, str | bool]) -> dict[str, Any]:
    """Celery's transport options for the sentinels.

    A sentinel that cannot be reached is not retried; redis-py by default tries it four times. The password is in a
    credential provider, because kombu's errors show the options, and before redis-py 8 also the password.
    """
    timeouts = {"socket_connect_timeout": ANSWER_S, "socket_timeout": ANSWER_S}
    provider = _Password(password=password) if password else None
    secured = {"ssl": True, **tls} if tls else {}
    sentinel_kwargs = {**timeouts, "retry": None, **redis_py.RESP2, "credential_provider": provider, **secured}
    return {"master_name": master, "sentinel_kwargs": sentinel_kwargs}


def options_for(settings: Settings, url: str) -> dict[str, Any]:
    """Celery's transport options for the sentinels of `url`; empty for other schemes."""
    if scheme(url) != SENTINEL:
        return {}
    tls = SentinelUrl.parse(url).tls
    return sentinel_options(settings.sentinel_master, settings.sentinel_password.get_secret_value(), tls)


_answered_last: dict[tuple[tuple[str, int], ...], tuple[str, int]] = {}
"""Shared by the process, so that a hanging sentinel delays only the first connection by `ANSWER_S`."""


class Sentinels:
    """The sentinels of one master."""

    def __init__(self, hosts: tuple[tuple[str, int], ...], options: Mapping[str, Any]) -> None:
        self._hosts = hosts
        self._name = options.get("master_name") or DEFAULT_MASTER
        self._options = options.get("sentinel_kwargs") or {}

    def __repr__(self) -> str:
        return f"Sentinels({self._name!r} at {', '.join(netloc(*host) for host in self._hosts)})"

    def master(self) -> tuple[str, int]:
        """The master's address, from the first sentinel that sees it up. Raises MasterNotFoundError."""
        reasons = []
        last = _answered_last.get(self._hosts)
        for address in sorted(self._hosts, key=lambda host: host != last):
            try:
                state = self._state(*address)
            except ResponseError as error:
                unknown = "No such master" in str(error)
                reasons.append((address, "knows no such master" if unknown else str(error)))
            except redis.AuthenticationError as error:
                reasons.append((address, f"{error} (PETIOLE_SENTINEL_PASSWORD)"))
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                reasons.append((address, str(error)))
            else:
                if state["is_master"] and not (state["is_sdown"] or state["is_odown"]):
                    _answered_last[self._hosts] = address
                    return state["ip"], state["port"]
                reasons.append((address, f"says that {netloc(state['ip'], state['port'])} is down"))
        said = "; ".join(f"{netloc(*address)}: {reason.rstrip('.')}" for address, reason in reasons)
        raise MasterNotFoundError(f"the sentinels name no master {self._name!r} (PETIOLE_SENTINEL_MASTER): {said}")

    def _state(self, host: str, port: int) -> Any:
        with redis.Redis(host, port, **self._options) as sentinel:
            return sentinel.execute_command("SENTINEL MASTER", self._name)  # redis-py 6's sentinel_master() fails


def why(error: BaseException, url: str, options: Mapping[str, Any]) -> str:
    """The reason for `error`. When kombu's own transport finds no master, its message has no reason: ask again."""
    if isinstance(error.__cause__, MasterNotFoundError):
        try:
            Sentinels(SentinelUrl.parse(url).hosts, options).master()
        except MasterNotFoundError as clearer:
            return str(clearer)
        return "the sentinels named no master"
    return str(error)


def pool_parameters(url: SentinelUrl, options: Mapping[str, Any], classes: tuple[type, type]) -> dict[str, Any]:
    """The parameters of a connection pool. `classes` are the connection classes without and with TLS."""
    return {
        "connection_class": classes[bool(url.tls)],
        "sentinels": Sentinels(url.hosts, options),
        "username": url.username,
        "password": url.password,
        "db": url.db,
        **url.tls,
    }


class _HasSentinels:
    def __init__(self, *args: Any, sentinels: Sentinels, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sentinels = sentinels


class _ResolvesMaster(_HasSentinels):
    def _connect(self) -> Any:
        self.host, self.port = self._sentinels.master()
        connection: Any = super()
        return connection._connect()


class _AsyncResolvesMaster(_HasSentinels):
    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._sentinels.master)
        connection: Any = super()
        await connection._connect()


class SentinelConnection(_ResolvesMaster, redis.Connection):
    pass


class SentinelSSLConnection(_ResolvesMaster, redis.SSLConnection):
    pass


class AsyncSentinelConnection(_AsyncResolvesMaster, redis.asyncio.Connection):
    pass


class AsyncSentinelSSLConnection(_AsyncResolvesMaster, redis.asyncio.SSLConnection):
    pass


SYNC = SentinelConnection, SentinelSSLConnection
ASYNC = AsyncSentinelConnection, AsyncSentinelSSLConnection

"""Redis Sentinel: connections that ask the sentinels for the master's address each time they connect.

Clients need no code for a failover: the connection is lost, or its server refuses a write (see `masters`), and
reconnecting leads to the new master. The only state that is kept is which sentinel answered last.

The sentinels of broker, streams and results are configured in Celery's way: by a URL
`sentinel://[user:password@]host:port;sentinel://host:port/db?ssl_...`, whose user, password and database are the
master's, and by the options `master_name` and `sentinel_kwargs`. `ssl_` options enable TLS to the master and to
the sentinels; they are in `sentinel_kwargs` as well, where kombu's own transport reads them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import redis
import redis.asyncio
from redis.exceptions import ResponseError
from redis.sentinel import MasterNotFoundError

SCHEME = "sentinel"
DEFAULT_PORT = 26379
DEFAULT_MASTER = "mymaster"
ANSWER_S = 2.0
"""Connect and read timeout of each sentinel, after which the next one is asked."""

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = {
    "ssl_cert_reqs": "(cert_)?(required|optional|none)",
    "ssl_check_hostname": "true|false",
    **dict.fromkeys(TLS_FILES, ".+"),
}

_FORM = "must be sentinel://[USER:PASSWORD@]HOST:PORT;sentinel://HOST:PORT.../DB, with one user, password and DB"
_TLS_FORM = (
    "must have no options but ssl_cert_reqs=required, optional or none, ssl_check_hostname=true or false, "
    "ssl_ca_certs=FILE, and ssl_certfile=FILE with ssl_keyfile=FILE or without; the same for all sentinels"
)


@dataclass(frozen=True)
class SentinelUrl:
    """The sentinels' addresses and the master's connection options."""

    hosts: tuple[tuple[str, int], ...]
    username: str | None
    password: str | None
    db: int
    tls: Mapping[str, str | bool] = field(default_factory=dict)
    """TLS options of redis-py; empty: no TLS."""

    @classmethod
    def parse(cls, url: str) -> SentinelUrl:
        """Raises ValueError, without the URL in its message."""
        try:
            parts = [urlsplit(part if "://" in part else f"{SCHEME}://{part}") for part in url.split(";")]
            hosts = tuple((part.hostname or "", part.port or DEFAULT_PORT) for part in parts)
            users = {(part.username, part.password) for part in parts} - {(None, None)}
            dbs = {int(path) for part in parts if (path := part.path.strip("/"))}
            queries = {part.query for part in parts} - {""}
        except ValueError:
            raise ValueError(_FORM) from None
        plain = all(part.scheme == SCHEME and part.hostname for part in parts)
        one = len(users) <= 1 and len(dbs) <= 1 and all(password for _, password in users)
        if not (plain and one and min(dbs, default=0) >= 0):
            raise ValueError(_FORM)
        username, password = users.pop() if users else (None, None)
        user = unquote(username or "") or None, unquote(password or "") or None
        return cls(hosts, *user, max(dbs, default=0), _tls(queries))

    def __str__(self) -> str:
        """The URL with user, database and options in each part, because Celery and kombu read different parts."""
        user = f"{quote(self.username or '', safe='')}:{quote(self.password, safe='')}@" if self.password else ""
        tls = f"?{urlencode(self.tls, safe='/')}" if self.tls else ""
        return ";".join(f"{SCHEME}://{user}{netloc(*host)}/{self.db}{tls}" for host in self.hosts)

    def parameters(self, options: Mapping[str, Any], classes: tuple[type, type]) -> dict[str, Any]:
        """The parameters of a connection pool. `classes` are the connection classes without and with TLS."""
        return {
            "connection_class": classes[bool(self.tls)],
            "sentinels": Sentinels(self.hosts, options),
            "username": self.username,
            "password": self.password,
            "db": self.db,
            **self.tls,
        }


def _tls(queries: set[str]) -> dict[str, str | bool]:
    """redis-py's TLS options from URL queries. By default certificates and host names are verified."""
    given = dict(parse_qsl("&".join(queries), keep_blank_values=True))
    known = all(re.fullmatch(_TLS_OPTIONS.get(name, "(?!)"), given[name], re.IGNORECASE) for name in given)
    usable = "ssl_certfile" in given or "ssl_keyfile" not in given
    if len(queries) > 1 or not (known and usable):
        raise ValueError(_TLS_FORM)
    if not given:
        return {}
    checks = given.get("ssl_cert_reqs", "required").lower().removeprefix("cert_")
    names = given.get("ssl_check_hostname", "true").lower() == "true"
    return {**given, "ssl_cert_reqs": checks, "ssl_check_hostname": names}


def netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Password(redis.UsernamePasswordCredentialProvider):
    """A provider that is safe to print and to send to `celery inspect`."""

    def __json__(self) -> str:  # called by kombu's JSON encoder
        return "***"

    def __repr__(self) -> str:
        return "***"


def options(master: str, password: str, tls: Mapping[str, str | bool]) -> dict[str, Any]:
    """Celery's transport options for the sentinels.

    A sentinel that cannot be reached is not retried; redis-py by default tries it four times. The password is in a
    credential provider, because kombu's errors show the options, and before redis-py 8 also the password.
    """
    timeouts = {"socket_connect_timeout": ANSWER_S, "socket_timeout": ANSWER_S}
    provider = _Password(password=password) if password else None
    secured = {"ssl": True, **tls} if tls else {}
    sentinel_kwargs = {**timeouts, "retry": None, "protocol": 2, "credential_provider": provider, **secured}
    return {"master_name": master, "sentinel_kwargs": sentinel_kwargs}


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

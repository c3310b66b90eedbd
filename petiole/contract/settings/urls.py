"""The URLs of brokers and of Redis: their schemes, the sentinels' form, TLS, and passwords that are not shown.

The sentinels of broker, streams and results are configured in Celery's way: by a URL
`sentinel://[user:password@]host:port;sentinel://host:port/db?ssl_...`, whose user, password and database are the
master's, and by the options `master_name` and `sentinel_kwargs`. `ssl_` options enable TLS to the master and to
the sentinels; they are in `sentinel_kwargs` as well, where kombu's own transport reads them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

REDIS = ("redis", "rediss", "redis+socket", "unix")
SENTINEL = "sentinel"
EMBEDDED = "embedded"
RABBITMQ = ("amqp", "amqps")
DEFAULT_PORT = 26379
DEFAULT_MASTER = "mymaster"

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = {
    "ssl_cert_reqs": "(cert_)?(required|optional|none)",
    "ssl_check_hostname": "true|false",
    **dict.fromkeys(TLS_FILES, ".+"),
}

URL_OPTIONS = {
    "rediss": tuple(_TLS_OPTIONS),
    "redis+socket": ("virtual_host",),
    "unix": ("db",),
    **dict.fromkeys(RABBITMQ, ("heartbeat", "connect_timeout", "failover_strategy", *_TLS_OPTIONS)),
}
"""By scheme, the options that all who read the URL know; `redis://` has none."""

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
        """Parse a URL. Raises ValueError, without the URL in its message."""
        try:
            parts = [urlsplit(part if "://" in part else f"{SENTINEL}://{part}") for part in url.split(";")]
            hosts = tuple((part.hostname or "", part.port or DEFAULT_PORT) for part in parts)
            users = {(part.username, part.password) for part in parts} - {(None, None)}
            dbs = {int(path) for part in parts if (path := part.path.strip("/"))}
            queries = {part.query for part in parts} - {""}
        except ValueError:
            raise ValueError(_FORM) from None
        plain = all(part.scheme == SENTINEL and part.hostname for part in parts)
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
        return ";".join(f"{SENTINEL}://{user}{netloc(*host)}/{self.db}{tls}" for host in self.hosts)


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


def scheme(url: str) -> str:
    return url.partition("://")[0].lower()


def verified(url: str) -> str:
    """`url`; if it is `rediss://`, with `ssl_cert_reqs` in redis-py's spelling, "required" if missing.

    Without that option Celery's result backend refuses the URL and its broker checks no certificates, and Celery
    and redis-py spell the values differently.
    """
    if scheme(url) != "rediss":
        return url
    url = re.sub(r"(?<=ssl_cert_reqs=)(?:CERT_)?(\w+)", lambda match: match[1].lower(), url)
    return url if "ssl_cert_reqs=" in url else f"{url}{'&' if '?' in url else '?'}ssl_cert_reqs=required"


_URL = re.compile(
    r"(?:(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://)?"
    r"(?:(?P<user>[^/#?\[\]]*)@)?"
    r"(?P<host>\[[0-9A-Fa-f:.%]*\]|[^/#?@\[\]:\s]*)(?P<port>:[0-9]{1,5})?"
    r"(?P<path>/[^#?@]*)?"
    r"(?:\?(?P<query>[^#@]*))?"
)
_MANY_HOSTS = re.compile(r"[^/:]+://[^/#?\[\]]*(\[[0-9A-Fa-f:.%]*\][^/#?@\[\]]*)?(/[^#?@]*)?(\?[^#@]*)?")
_SHOWN_OPTION = re.compile("virtual_host|db|heartbeat|master_name|ssl_(?!.*password)[a-z_]{1,30}")
ENCODED = "must have each of / # ? [ ] ; in a user or password percent-encoded (/ as %2F)"
"""The limit on a URL that `is_whole` refuses."""


def is_whole(url: str) -> bool:
    """Whether the URL can be taken apart in one way only. If a password has a `/`, say, then a part of it looks
    like a port or a path."""
    if "://" in url and scheme(url) in (*REDIS, SENTINEL, *RABBITMQ, EMBEDDED):
        return _parts(url) is not None
    return "@" not in url or _MANY_HOSTS.fullmatch(url) is not None


def _parts(url: str) -> list[re.Match[str]] | None:
    """The parts of each of the URLs that `;` separates. Sentinels after the first may lack the scheme."""
    found = [_URL.fullmatch(one) for one in url.split(";")]
    kinds = {match["scheme"] for match in found if match}
    ports = [int(match["port"][1:]) for match in found if match and match["port"]]
    named = None not in kinds or scheme(url) == SENTINEL
    return [match for match in found if match] if all(found) and named and max(ports, default=0) < 2**16 else None


def redacted(url: str) -> str:
    """`url` without its passwords, for display. Of a URL that cannot be taken apart, only the scheme is shown."""
    kind, separator, _ = url.partition("://")
    if not separator and "@" not in url:
        return url
    parts = _parts(url)
    if parts is None:
        return f"{kind}://***" if separator and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", kind) else "***"
    queries = [_options(match["query"]) for match in parts]
    return ";".join(
        _before_options(match) + (query if query not in queries[k + 1 :] else "")
        for k, (match, query) in enumerate(zip(parts, queries, strict=True))
    )


def _before_options(match: re.Match[str]) -> str:
    user, separator, _ = (match["user"] or "").partition(":")
    known = "" if match["user"] is None else f"{user}:***@" if separator else "***@"
    kind = "" if match["scheme"] is None else f"{match['scheme']}://"
    return f"{kind}{known}{match['host']}{match['port'] or ''}{match['path'] or ''}"


def _options(query: str | None) -> str:
    if query is None:
        return ""
    given = (option.partition("=") for option in query.split("&"))
    return "?" + "&".join(
        f"{name}{equals}{value}"
        if _SHOWN_OPTION.fullmatch(name)
        else "password=***"
        if name == "password"
        else "***"
        for name, equals, value in given
    )

"""Images that a request names by http URLs, fetched where a setting allows it.

Whoever may ask the gateway for an answer could ask it for any address that it reaches. So it fetches from hosts
that `PETIOLE_GATEWAY_IMAGE_HOSTS` names and from no others, on the usual ports, never from an address that is not
public, and follows no redirect. The address that was checked is the one that is connected to, whatever the name
leads to later."""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import SplitResult, urlsplit

from petiole.gateway.serving.egress import public
from petiole.tasks.app.thread_executor import ProcessThreads
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import settings

WAIT_S = 10.0
_THREADS = ProcessThreads("fetch", size=8, most=1000)
_PORTS = {"http": 80, "https": 443}
_LOCATED = "must be a data URL, or an http URL of a host that the gateway's settings allow"


async def fetched(urls: Iterable[tuple[str, str]]) -> dict[str, str]:
    """By URL, the data URL of its image. `urls`: pairs of a client's field and a URL. Raises `InvalidRequest`."""
    known = settings()
    hosts, most = hosts_of(known.gateway_image_hosts), known.image_max_bytes
    fields = {url: field for field, url in urls}
    for url, field in fields.items():
        allowed(field, url, hosts)
    bodies = await asyncio.gather(*(_THREADS.run(fetch, field, url, most) for url, field in fields.items()))
    return dict(zip(fields, bodies, strict=True))


def hosts_of(setting: str) -> frozenset[str]:
    return frozenset(filter(None, (host.strip().lower() for host in setting.split(","))))


def allowed(field: str, url: str, hosts: frozenset[str]) -> SplitResult:
    """The parts of a URL that may be fetched. Raises `InvalidRequest`."""
    shown = f"{url[:60]}…" if len(url) > 60 else url
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").lower()
    except ValueError:
        raise InvalidRequest(field, _LOCATED, shown) from None
    of_wildcard = any(one.startswith("*.") and host.endswith(one[1:]) for one in hosts)
    fine = parts.scheme in _PORTS and port in (None, _PORTS[parts.scheme]) and not parts.username
    if not fine or not (host in hosts or of_wildcard) or not url.isascii() or any(one <= " " for one in url):
        raise InvalidRequest(field, _LOCATED, shown)
    return parts


def fetch(
    field: str, url: str, most: int, may_reach: Callable[[str], bool] = public, port: int | None = None
) -> str:
    """The image as a data URL. `port`: another than the usual one. Raises `InvalidRequest`."""
    parts, give_up_at = urlsplit(url), time.monotonic() + WAIT_S
    host = parts.hostname or ""
    try:
        connection = _connection(parts, host, port or _PORTS[parts.scheme], may_reach)
        try:
            path = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
            connection.request("GET", path, headers={"Host": host, "Accept": "image/*", "Connection": "close"})
            return _body(field, connection.getresponse(), most, give_up_at)
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        raise InvalidRequest(field, "must be an image that can be fetched", type(error).__name__) from None


def _connection(parts: SplitResult, host: str, port: int, may_reach: Callable[[str], bool]) -> HTTPConnection:
    addresses = [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not addresses or not all(may_reach(address) for address in addresses):
        raise OSError("not a public address")
    connection = HTTPConnection(host, port, timeout=WAIT_S)
    connected = socket.create_connection((addresses[0], port), WAIT_S)
    if parts.scheme == "https":
        connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
    connection.sock = connected
    return connection


def _body(field: str, answer: HTTPResponse, most: int, give_up_at: float) -> str:
    if answer.status != 200:
        raise InvalidRequest(field, "must lead to an image with status 200", f"status {answer.status}")
    kind = (answer.headers.get_content_type() or "").lower()
    if not kind.startswith("image/"):
        raise InvalidRequest(field, "must lead to an image", kind[:64])
    body = bytearray()
    while part := answer.read1(65_536):
        body += part
        if len(body) > most:
            raise InvalidRequest(field, f"must lead to an image of at most {most} bytes", "more")
        if time.monotonic() > give_up_at:
            raise InvalidRequest(field, f"must lead to an image that comes within {WAIT_S:g} s", "more time")
    return f"data:{kind};base64,{base64.b64encode(body).decode()}"

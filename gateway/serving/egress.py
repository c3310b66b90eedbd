"""Which addresses a gateway may connect to when somebody else has named the host, and a request to one of them.

A name is looked up once, every address that it has is checked, and the connection goes to one of them: so a name
that later leads elsewhere (DNS rebinding) leads nowhere. No redirect is followed."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from ipaddress import IPv4Network, IPv6Network
from urllib.parse import urlsplit

import h11

from petiole.tasks.app.thread_executor import ProcessThreads

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PORTS = {"http": 80, "https": 443}
_MOST_HEADERS_BYTES = 16_384
_NAMES = ProcessThreads("names", size=4, most=1000)
"""A name server that is slow takes no thread of anybody else."""
_UNICAST = ipaddress.ip_network("2000::/3")
"""All that is given out of IPv6. What is not has old ways to write an IPv4 address, or a site's own."""


def public(address: str) -> bool:
    """Whether the address is one of the public internet: not private, loopback, link-local or multicast."""
    found = ipaddress.ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        translated = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF) if found in _NAT64 else None
        as_v4 = found.ipv4_mapped or found.sixtofour or translated
        if as_v4 is None and found not in _UNICAST:
            return False
        found = as_v4 or found
    return found.is_global and not found.is_multicast


def networks_of(setting: str) -> Sequence[IPv4Network | IPv6Network]:
    """Raises ValueError."""
    return [ipaddress.ip_network(one.strip()) for one in setting.split(",") if one.strip()]


def inner(address: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    """Whether the address is in one of these networks."""
    found = ipaddress.ip_address(address)
    return any(found in network for network in networks)


# ---------------------------------------------------------------- a request


async def answered(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    check: Callable[[str, bool], None],
    most_bytes: int = 0,
) -> tuple[int, bytes]:
    """The status of the answer, and its body if that is asked for: at most `most_bytes`. `check`: raises for an
    address that may not be asked, with TLS or without. Raises, too, OSError, ValueError for a longer body, and
    `h11.RemoteProtocolError`. The caller sets a time."""
    parts = urlsplit(url)
    reader, writer = await _connected(
        parts.hostname or "", parts.port or _PORTS[parts.scheme], parts.scheme, check
    )
    try:
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        told = {"host": parts.netloc, "user-agent": "petiole", "connection": "close", **headers}
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_HEADERS_BYTES)
        sent = (h11.Request(method=method, target=target, headers=[*told.items()]), h11.Data(data=body))
        writer.write(b"".join(connection.send(event) or b"" for event in (*sent, h11.EndOfMessage())))
        status, got = 0, bytearray()
        while True:
            match connection.next_event():
                case h11.NEED_DATA:
                    connection.receive_data(await reader.read(_MOST_HEADERS_BYTES))
                case h11.InformationalResponse():
                    pass
                case h11.Response(status_code=status):
                    if not most_bytes:
                        return status, b""
                case h11.Data(data=part):
                    got += part
                    if len(got) > most_bytes:
                        raise ValueError(f"the answer must have at most {most_bytes} bytes")
                case h11.EndOfMessage():
                    return status, bytes(got)
                case _:
                    raise ConnectionResetError
    finally:
        writer.close()


async def _connected(
    host: str, port: int, scheme: str, check: Callable[[str, bool], None]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    secure = scheme == "https"
    found = await _NAMES.run(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found]
    for address in addresses:
        check(address, secure)
    lost: OSError = ConnectionRefusedError()
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address, port, ssl=_tls() if secure else None, server_hostname=host if secure else None
            )
        except OSError as error:
            lost = error
    raise lost


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes long."""
    return ssl.create_default_context()

"""One try: a POST to the address that was checked, within `WAIT_S` in all. No redirect is followed, and of the
answer only the status is read."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Mapping
from functools import cache
from urllib.parse import urlsplit

import h11

from petiole.gateway.serving.egress import inner, networks_of, public
from petiole.tasks.app.thread_executor import ProcessThreads
from petiole.tasks.settings import settings

WAIT_S = 10.0
_PORTS = {"http": 80, "https": 443}
_MOST_BYTES = 16_384
"""The most bytes of an answer's headers."""

_NAMES = ProcessThreads("names", size=4, most=1000)
"""A name server that is slow takes no thread of anybody else."""


class NotTaken(Exception):  # noqa: N818
    """The server has not taken it. The message says why, and nothing of the URL, which may have a secret."""


async def post(url: str, headers: Mapping[str, str], body: bytes) -> None:
    """Raises `NotTaken`."""
    try:
        async with asyncio.timeout(WAIT_S):
            status = await _posted(url, headers, body)
    except TimeoutError:
        raise NotTaken(f"no answer within {WAIT_S:g} s") from None
    except (OSError, ValueError, h11.RemoteProtocolError) as error:
        raise NotTaken(type(error).__name__) from None
    if not 200 <= status < 300:
        raise NotTaken(f"status {status}")


async def _posted(url: str, headers: Mapping[str, str], body: bytes) -> int:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    reader, writer = await _connected(host, port, parts.scheme == "https")
    try:
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        told = {
            "host": parts.netloc,
            "content-type": "application/json",
            "content-length": str(len(body)),
            "user-agent": "petiole",
            "connection": "close",
            **headers,
        }
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_BYTES)
        sent = (h11.Request(method="POST", target=target, headers=[*told.items()]), h11.Data(data=body))
        writer.write(b"".join(connection.send(event) or b"" for event in (*sent, h11.EndOfMessage())))
        while not isinstance(event := connection.next_event(), h11.Response):
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_MOST_BYTES))
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionResetError
        return event.status_code
    finally:
        writer.close()


async def _connected(host: str, port: int, secure: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    found = await _NAMES.run(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    addresses = [str(one[4][0]) for one in found]
    networks = networks_of(settings().gateway_webhook_networks)
    if not all(inner(address, networks) or (secure and public(address)) for address in addresses):
        raise NotTaken("its address is not public" if secure else "only inner networks are told without TLS")
    name = host if secure else None
    lost: OSError = ConnectionRefusedError()
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address, port, ssl=_tls() if secure else None, server_hostname=name
            )
        except OSError as error:
            lost = error
    raise lost


@cache
def _tls() -> ssl.SSLContext:
    """Reading the certificates takes long."""
    return ssl.create_default_context()

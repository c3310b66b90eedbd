"""A client's HTTP connection, on uvicorn's: a request that does not arrive ends.

    begun   with its first byte; a connection without one is late, too
    whole   with the last byte of its body
    late    `PETIOLE_GATEWAY_RECEIVE_S` after it has begun, and a second more for each `BYTES_A_SECOND` that came

A late request is answered 408, if nothing was answered, and its connection is closed. While the gateway itself
reads no further, the time does not count. Between two requests the connection is uvicorn's (`server.KEPT_S`).

HTTP/1.0 knows no chunks: an answer without a length ends with its connection.

Java's client asks for HTTP/2 with each request (`Upgrade: h2c`), and goes on with HTTP/1.1 if nobody answers that.
The parser would take the body for another protocol, so it does not see the wish.

The parser keeps headers until they have ended, so they are counted as they come. `headers` counts the rest."""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from petiole.gateway.http.headers import MOST_BYTES
from petiole.tasks.settings import settings

BYTES_A_SECOND = 1000
_WISH = re.compile(rb"(\r\n)(upgrade:[ \t]*h2c[ \t]*\r\n)", re.I)
_LATE, _TOO_LARGE = "408 Request Timeout", "431 Request Header Fields Too Large"


class _ToTheEnd(int):
    """The length of a body that ends with its connection: uvicorn counts what it sends, and may send anything."""

    def __lt__(self, sent: int) -> bool:
        return False

    def __sub__(self, sent: int) -> _ToTheEnd:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's protocol. `_since`: when the request has begun that is not whole; None: there is none."""

    _since: float | None = None
    _received = 0
    _in_headers = True
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._received:
            self._begin()
        self._received += len(data)
        if self._in_headers and b"h2c" in data:
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _WISH.sub(rb"\1x-\2", head + end, 1) + rest
        super().data_received(data)
        if self._since is not None and self._in_headers and self._received > MOST_BYTES:
            self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        if self._since is None:  # it came with the end of the request before
            self._begin()
            self._received = 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _ToTheEnd()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        self._arrived()
        super().handle_websocket_upgrade()

    # ------------------------------------------------------------ the request that arrives

    def _begin(self) -> None:
        self._arrived()
        self._since, self._in_headers = self.loop.time(), True
        self._look_at(self._late_at)

    def _arrived(self) -> None:
        self._since, self._received = None, 0
        if self._look is not None:
            self._look.cancel()
            self._look = None

    @property
    def _late_at(self) -> float:
        assert self._since is not None
        return self._since + settings().gateway_receive_s + self._received / BYTES_A_SECOND

    def _look_at(self, at: float) -> None:
        self._look = self.loop.call_at(at, self._looked)

    def _looked(self) -> None:
        if self.flow.read_paused:
            self._since = self.loop.time()
        if self.loop.time() < self._late_at:
            self._look_at(self._late_at)
        else:
            self._refuse(_LATE)

    def _refuse(self, status: str) -> None:
        """Close the connection; with an answer, if this request has begun and no other answer runs."""
        begun, cycle = self._received > 0, self.cycle
        self._arrived()
        if self.transport.is_closing():
            return
        if cycle is not None and not cycle.response_complete:
            begun = not self._in_headers and not cycle.response_started
        if begun:
            self.transport.write(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n".encode())
        self.transport.close()

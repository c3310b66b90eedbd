"""A proxy before a server, whose connections can be cut, made to hang, or to answer garbage."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path

Address = Path | tuple[str, int]
"""A socket's path, or a host and a port."""


class Proxy:
    """Forwards bytes between its own socket and the server's, with two threads a connection."""

    def __init__(self, path: Address, upstream: Address) -> None:
        self.path, self.upstream = path, upstream
        self._listener = socket.socket(_family(path))
        self._listener.bind(_plain(path))
        self._listener.listen(128)
        self._mutex = threading.Lock()
        self._open: set[socket.socket] = set()
        self._hanging: set[socket.socket] = set()
        self._garbage: bytes | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis+socket://{self.path}?virtual_host=0"

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def cut(self) -> None:
        """Cut all connections."""
        with self._mutex:
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """What is connected now stays so, and nothing comes through any more."""
        with self._mutex:
            self._hanging |= self._open

    def garble(self, garbage: bytes | None) -> None:
        """Every reply is replaced by this, until it is called with None."""
        self._garbage = garbage

    def lead_to(self, upstream: Address) -> None:
        """Another Redis, from now on."""
        self.upstream = upstream
        self.cut()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        if isinstance(self.path, Path):
            self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(_family(self.upstream))
            try:
                server.connect(_plain(self.upstream))
            except OSError:
                client.close()
                server.close()
                continue
            with self._mutex:
                self._open |= {client, server}
            for one, other, replies in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=(one, other, replies), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket, replies: bool) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                if one not in self._hanging:
                    other.sendall(self._garbage if replies and self._garbage is not None else data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._mutex:
            self._open.discard(one)
            self._hanging.discard(one)
        one.close()


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET


def _plain(address: Address) -> str | tuple[str, int]:
    return str(address) if isinstance(address, Path) else address

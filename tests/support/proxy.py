"""A proxy before a Redis socket, whose connections can be cut, made to hang, or to answer garbage."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from pathlib import Path


class Proxy:
    """Forwards bytes between its own socket and Redis's, with two threads a connection."""

    def __init__(self, path: Path, upstream: Path) -> None:
        self.path, self.upstream = path, upstream
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)
        self._mutex = threading.Lock()
        self._open: set[socket.socket] = set()
        self._hanging: set[socket.socket] = set()
        self._garbage: bytes | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis+socket://{self.path}?virtual_host=0"

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

    def lead_to(self, upstream: Path) -> None:
        """Another Redis, from now on."""
        self.upstream = upstream
        self.cut()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                server.connect(str(self.upstream))
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

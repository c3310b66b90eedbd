"""A CA of one's own, and one certificate for all servers and clients on this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def server_with_tls() -> str:
    """What speaks TLS is Debian's redis-server; the one that comes with the tests does not."""
    server = shutil.which("redis-server")
    if not (server and shutil.which("openssl") and "libssl" in Path(server).read_bytes().decode("latin-1")):
        pytest.skip("needs openssl, and a redis-server with TLS")
    return server


class Certificates:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        # Since Python 3.13 a certificate that signs others must say so.
        use = ["-addext", "keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign"]
        ca = ["-subj", "/CN=a CA", *use, "-keyout", "ca.key", "-out", "ca.pem"]
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", *use]
        own = [*names, "-CA", "ca.pem", "-CAkey", "ca.key", "-keyout", "own.key", "-out", "own.pem"]
        for options in (ca, own):
            subprocess.run([*key, *options], cwd=folder, check=True, capture_output=True)
        self.ca, self.certificate, self.key = (str(folder / name) for name in ("ca.pem", "own.pem", "own.key"))

    @property
    def server(self) -> tuple[str, ...]:
        """Options of redis-server's, which asks clients for certificates unless told otherwise."""
        files = {"cert": self.certificate, "key": self.key, "ca-cert": self.ca}
        return tuple(word for name, file in files.items() for word in (f"--tls-{name}-file", file))

    @property
    def client(self) -> dict[str, str]:
        """redis-py's options, in a URL or not."""
        return {"ssl_ca_certs": self.ca, "ssl_certfile": self.certificate, "ssl_keyfile": self.key}

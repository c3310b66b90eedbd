"""An issuer of JSON Web Tokens, with its keys at a URL.

with Issuer() as issuer:
    issuer.token(tenant="acme")         # signed by its newest key
    issuer.rotate()                     # a new one; the old ones stay listed
    issuer.asked                        # how often its keys were asked for
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

NAME, AUDIENCE = "https://issuer.example/", "petiole"


def rsa_key(bits: int = 2048) -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, bits)


def public(key: Any, **more: Any) -> dict[str, Any]:
    """A private key's public half, as a JWKS has it."""
    algorithm: Any = jwt.algorithms.ECAlgorithm
    if isinstance(key, rsa.RSAPrivateKey):
        algorithm = jwt.algorithms.RSAAlgorithm
    elif isinstance(key, ed25519.Ed25519PrivateKey):
        algorithm = jwt.algorithms.OKPAlgorithm
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), **more}


class Issuer:
    """`answer`: what is sent in place of its keys. `open`: while it is not set, nothing is answered."""

    def __init__(self) -> None:
        self.asked = 0
        self.listed: list[dict[str, Any]] = []
        self.answer: tuple[int, bytes] | None = None
        self.open = threading.Event()
        self.open.set()
        self.rotate()
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked += 1
                issuer.open.wait()
                status, body = issuer.answer or (200, json.dumps({"keys": issuer.listed}).encode())
                self.send_response(status)
                self.send_header("location", "/elsewhere")
                self.end_headers()
                with contextlib.suppress(OSError):  # enough for whoever has asked
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/keys.json"

    def rotate(self, key: Any = None, **more: Any) -> None:
        self.key, self.kid = key or ec.generate_private_key(ec.SECP256R1()), f"key-{len(self.listed)}"
        self.listed.append(public(self.key, kid=self.kid, use="sig", **more))

    def token(
        self, key: Any = None, algorithm: str = "ES256", headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """What is None is left out."""
        now = int(time.time())
        told = {"iss": NAME, "aud": AUDIENCE, "iat": now, "exp": now + 600, "sub": "somebody", "tenant": "acme"}
        told = {name: value for name, value in {**told, **claims}.items() if value is not None}
        header = {name: value for name, value in {"kid": self.kid, **(headers or {})}.items() if value is not None}
        return jwt.encode(told, key or self.key, algorithm, header)

    @property
    def settings(self) -> dict[str, str]:
        return {
            "PETIOLE_GATEWAY_JWKS_URL": self.url,
            "PETIOLE_GATEWAY_JWT_ISSUER": NAME,
            "PETIOLE_GATEWAY_JWT_AUDIENCE": AUDIENCE,
        }

    def __enter__(self) -> Issuer:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def __exit__(self, *_: object) -> None:
        self.close()

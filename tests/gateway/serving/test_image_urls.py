"""Images by URL: from allowed hosts alone, never from an address that is not public, within limits."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from petiole.gateway.serving.image_urls import allowed, fetch, hosts_of, public
from petiole.tasks.errors import InvalidRequest

HOSTS = hosts_of("cdn.example.com, *.example.org")


class Pictures(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 302 if self.path == "/moved" else 200
        body = b"x" * (100 if self.path == "/small?a=b" else 5000)
        self.send_response(status)
        self.send_header("Content-Type", "text/html" if self.path == "/page" else "image/png")
        self.send_header("Location", "http://127.0.0.1/small")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example.com/x.png",
        "https://example.org/x.png",
        "https://cdn.example.com.evil.net/x.png",
        "https://user@cdn.example.com/x.png",
        "https://cdn.example.com:8080/x.png",
        "http://cdn.example.com:443/x.png",
        "ftp://cdn.example.com/x.png",
        "https://cdn.example.com/x.png\r\nHost: evil",
        "https://cdn.example.com:port/",
        "http://[::1/",
        "http://169.254.169.254/latest",
    ],
)
def test_other_urls_are_refused_before_anything_is_looked_up(url: str) -> None:
    with pytest.raises(InvalidRequest, match="must be a data URL, or an http URL of a host"):
        allowed("image", url, HOSTS)


def test_allowed_hosts() -> None:
    for url in ("https://cdn.example.com/x.png?y=1", "http://CDN.example.com:80/", "https://a.b.example.org/x"):
        assert allowed("image", url, HOSTS).hostname
    with pytest.raises(InvalidRequest):
        allowed("image", "https://cdn.example.com/x.png", hosts_of(""))


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
     "::1", "fe80::1", "fc00::1", "::ffff:10.0.0.1", "2002:0a00:0001::1", "ff02::1", "::",
     "::7f00:1", "::ffff:0:7f00:1", "64:ff9b:1::7f00:1", "64:ff9b::7f00:1", "fec0::1"],
)  # fmt: skip
def test_addresses_that_are_not_public(address: str) -> None:
    assert not public(address)
    assert public("93.184.216.34")
    assert public("2606:2800:220:1::1")
    assert public("64:ff9b::5db8:d822")


def test_an_image_within_limits_becomes_a_data_url(port: int) -> None:
    def get(path: str) -> str:
        return fetch("image", f"http://localhost{path}", 1000, lambda _: True, port)

    assert get("/small?a=b") == f"data:image/png;base64,{base64.b64encode(b'x' * 100).decode()}"
    for path, said in (("/large", "at most 1000 bytes"), ("/page", "an image"), ("/moved", "status 200")):
        with pytest.raises(InvalidRequest, match=said):
            get(path)
    with pytest.raises(InvalidRequest, match="can be fetched"):
        fetch("image", "http://localhost/small", 1000, port=port)

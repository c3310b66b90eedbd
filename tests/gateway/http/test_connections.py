"""Requests that do not arrive, spoken byte by byte over sockets to `petiole serve`."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from websockets.sync.client import connect

from petiole.gateway.http import headers
from petiole.gateway.http.connections import BYTES_A_SECOND
from tests.support.gateway import Gateway
from tests.support.site import RedisServer, eventually

LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
PATIENCE_S = 60


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """It receives for a second."""
    folder: Path = tmp_path_factory.mktemp("connections")
    redis = RedisServer(folder)
    try:
        with Gateway(folder, PETIOLE_BROKER_URL=redis.url, PETIOLE_GATEWAY_RECEIVE_S=1) as served:
            assert served.port
            yield served
    finally:
        redis.kill()


@contextlib.contextmanager
def connected(gateway: Gateway) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S) as one:
        yield one


def told(one: socket.socket) -> bytes:
    """All that the gateway says until it closes the connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := one.recv(65_536):
            said += part
    return said


def answer(one: socket.socket) -> bytes:
    """An answer whose connection stays open."""
    said = b""
    while b"\r\n\r\n" not in said or not said.endswith(b"}"):
        part = one.recv(65_536)
        assert part, said
        said += part
    return said


@pytest.mark.parametrize(
    "half",
    [
        pytest.param(b"POST /v1/ch", id="a line"),
        pytest.param(LINE + b"x-a: b\r\nx-c", id="headers"),
        pytest.param(LINE + b"content-length: 100\r\n\r\n{", id="a body"),
        pytest.param(LINE + b"transfer-encoding: chunked\r\n\r\n5\r\n{", id="a chunk"),
    ],
)
def test_a_request_that_is_sent_by_half_ends(gateway: Gateway, half: bytes) -> None:
    with connected(gateway) as one:
        one.sendall(half)
        assert told(one).startswith(b"HTTP/1.1 408 ")


def test_a_connection_that_says_nothing_ends_without_a_word(gateway: Gateway) -> None:
    with connected(gateway) as one:
        assert told(one) == b""


@pytest.mark.parametrize(
    "rest", [b"\r\n", b"GET /hea", WHOLE + b"GET"], ids=["a line feed", "half", "one and half"]
)
def test_so_does_a_later_request_of_a_connection(gateway: Gateway, rest: bytes) -> None:
    with connected(gateway) as one:
        one.sendall(WHOLE)
        assert answer(one).startswith(b"HTTP/1.1 200 ")
        one.sendall(rest)
        said = told(one)
    assert said.endswith(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"), said
    assert said.count(b"200 OK") == (WHOLE in rest)


@pytest.mark.parametrize("before", [LINE, LINE + b"content-length: 100000\r\n\r\n"], ids=["headers", "a body"])
def test_one_that_comes_a_byte_at_a_time_ends(gateway: Gateway, before: bytes) -> None:
    """Each byte is sent when the gateway has said nothing for a moment."""
    with connected(gateway) as one:
        one.sendall(before)
        one.settimeout(0.05)
        said, sent = b"", 0
        with contextlib.suppress(ConnectionError):
            while not said:
                one.send(b"a")
                sent += 1
                with contextlib.suppress(TimeoutError):
                    said = one.recv(65_536)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert sent < BYTES_A_SECOND


def test_one_that_comes_fast_enough_has_the_time(gateway: Gateway) -> None:
    """By its bytes it has longer than the second that the gateway waits for one without any."""
    with connected(gateway) as one:
        size = 60 * BYTES_A_SECOND
        one.sendall(LINE + b"content-length: %d\r\n\r\n" % (size + 2) + b" " * size)
        one.settimeout(2)
        with pytest.raises(TimeoutError):
            one.recv(1)
        one.settimeout(PATIENCE_S)
        one.sendall(b"[]")
        assert b"must be a JSON object" in answer(one)


@pytest.mark.parametrize("part", [b"x", b"x: y\r\n"], ids=["one", "many"])
def test_headers_without_an_end_are_refused(gateway: Gateway, part: bytes) -> None:
    """At this size they would have minutes to arrive. The answer may be lost: more was sent than is read."""
    with connected(gateway) as one:
        said = b""
        with contextlib.suppress(ConnectionError):
            one.sendall(LINE + part * (2 * headers.MOST_BYTES // len(part)))
            said = told(one)
    assert said == b"" or said.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        (b"".join(b"x-%d: y\r\n" % k for k in range(headers.MOST)), b"100 fields"),
        (b"x-a: " + b"y" * headers.MOST_BYTES + b"\r\n", b"65536 bytes"),
        (b"x-a: " + b"y" * 1000 + b"\r\n", None),
    ],
    ids=["too many", "too large", "large"],
)
def test_headers_that_have_ended_are_counted(gateway: Gateway, more: bytes, limit: bytes | None) -> None:
    with connected(gateway) as one:
        one.sendall(WHOLE[:-2] + more + b"\r\n")
        said = answer(one)
    if limit is None:
        assert said.startswith(b"HTTP/1.1 200 ")
    else:
        assert (said[:13], limit in said) == (b"HTTP/1.1 431 ", True), said


def test_a_websocket_outlives_the_time_of_its_request(gateway: Gateway) -> None:
    with connect(f"{gateway.url.replace('http', 'ws', 1)}/responses") as one:
        with pytest.raises(TimeoutError):
            one.recv(2)
        one.send("{}")
        assert json.loads(one.recv(PATIENCE_S))["type"] == "error"


@pytest.mark.parametrize("path", ["/health", "/v1/chat/completions"])
def test_http_1_0_gets_no_chunks(gateway: Gateway, path: str) -> None:
    asked = {"model": "petiole-tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "nope": 1}
    body = b"" if path == "/health" else json.dumps(asked).encode()
    method = "POST" if body else "GET"
    with connected(gateway) as one:
        one.sendall(
            f"{method} {path} HTTP/1.0\r\nHost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
        )
        answered, _, rest = told(one).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in answered.lower()
    assert rest.startswith(b"{")


def test_a_wish_for_http_2_leaves_the_body_where_it_is(gateway: Gateway) -> None:
    """As Java's client asks with each request."""
    wishes = (
        b"connection: Upgrade, HTTP2-Settings\r\nUPGRADE:  h2c\r\nhttp2-settings: AAMAAABkAARAAAAAAAIAAAAA\r\n"
    )
    body = b'{"upgrade: h2c": 1}'
    with connected(gateway) as one:
        for _ in range(2):
            one.sendall(LINE + wishes + b"content-length: %d\r\n\r\n" % len(body) + body)
            said = answer(one)
            assert b"model: is required" in said, said


def test_a_path_says_which_methods_it_has(gateway: Gateway) -> None:
    with connected(gateway) as one:
        one.sendall(b"OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\r\n")
        said = answer(one)
    assert said.startswith(b"HTTP/1.1 405")
    assert b"\r\nallow: POST\r\n" in said


@pytest.mark.parametrize("coding", ["gzip", "ZSTD", "gzip, gzip", "identity,GZIP", "gzip , identity"])
def test_a_compressed_body_is_refused_by_name(gateway: Gateway, coding: str) -> None:
    with connected(gateway) as one:
        one.sendall(LINE + b"content-encoding: %b\r\ncontent-length: 2\r\n\r\n{}" % coding.encode())
        said = answer(one)
    assert said.startswith(b"HTTP/1.1 415")
    assert f"content-encoding: must be identity, got {coding.lower()}".encode() in said


def test_two_slashes_are_one(gateway: Gateway) -> None:
    with connected(gateway) as one:
        one.sendall(WHOLE.replace(b"/health", b"//health"))
        assert answer(one).startswith(b"HTTP/1.1 200")


def test_figures_name_the_route_of_a_path_with_more_slashes(gateway: Gateway) -> None:
    def counted() -> float:
        told = httpx2.get(f"{gateway.url.removesuffix('/v1')}/metrics").text
        found = re.search(r'requests_total{method="GET",path="/ping",status="200"} (\S+)', told)
        return float(found[1]) if found else 0.0

    before = counted()
    for path in (b"/ping", b"//ping", b"/ping/"):
        with connected(gateway) as one:
            one.sendall(WHOLE.replace(b"/health", path))
            assert answer(one).startswith(b"HTTP/1.1 200")
    eventually(lambda: counted() == before + 3, "all three are counted")

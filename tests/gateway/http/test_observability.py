"""The access log and the figures have no text of a request; a fault of the gateway's own is one line and a 500."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient

from petiole.gateway.http.observability import METRICS, ObservabilityMiddleware

SECRET = "a prompt that nobody may see"


async def answers(_: Request) -> Response:
    return Response("well")


async def breaks(_: Request) -> Response:
    raise RuntimeError(SECRET)


def test_no_text_of_a_request_is_logged_or_counted(caplog: pytest.LogCaptureFixture) -> None:
    routes = [Mount("/v1", routes=[Route("/things/{id}", answers), Route("/broken", breaks)])]
    client = TestClient(ObservabilityMiddleware(Starlette(routes=routes)), raise_server_exceptions=True)
    with caplog.at_level(logging.INFO):
        assert (
            client.get("/v1/things/chatcmpl-secret?x=secret", headers={"x-request-id": "a-1"}).status_code == 200
        )
        assert client.get("/v1/broken").status_code == 500
        for path in ("/secret", "/v1/secret", "/v1/things/secret/more", "/v1/things/a%2Fsecret"):
            assert client.get(path).status_code == 404
        inside = TestClient(
            Starlette(routes=[Mount("/llm", app=ObservabilityMiddleware(Starlette(routes=routes)))])
        )
        assert inside.get("/llm/secret").status_code == inside.get("/llm/v1/secret").status_code == 404
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("petiole")]
    figures = generate_latest(METRICS).decode()
    assert SECRET not in caplog.text + figures
    assert not [line for line in [*lines, figures] if "secret" in line]
    assert [line.rsplit(" ", 3)[0].partition(" ")[2] for line in lines if " ms " in line] == [
        "GET /v1/things/{id} 200",
        "GET /v1/broken 500",
        *(["GET other 404"] * 6),
    ]
    assert lines[0].endswith(" ms a-1")
    assert client.get("/v1/broken", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")
    [fault] = [line for line in lines if "has failed" in line]
    assert "RuntimeError at" in fault
    assert "breaks" in fault
    sample: Any = METRICS.get_sample_value(
        "petiole_gateway_requests_total", {"method": "GET", "path": "/v1/things/{id}", "status": "200"}
    )
    assert sample == 1

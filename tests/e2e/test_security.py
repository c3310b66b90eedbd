"""Pickle is never read, and TLS checks certificates."""

from __future__ import annotations

import base64
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.streams.api import stream
from tests.support.certificates import Certificates, server_with_tls
from tests.support.fake_engine import expected
from tests.support.site import Site, eventually


def test_pickle_is_never_read(own_site: Site) -> None:
    site = own_site
    worker = site.worker()
    marker = site.folder / "executed"
    pickled = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    site.redis.lpush(
        "petiole",
        json.dumps(
            {
                "body": base64.b64encode(pickled).decode(),
                "content-type": "application/x-python-serialize",
                "content-encoding": "binary",
                "headers": {"task": "tasks.generate", "id": "pickled"},
                "properties": {
                    "delivery_info": {"exchange": "", "routing_key": "petiole"},
                    "body_encoding": "base64",
                    "delivery_tag": "1",
                },
            }
        ),
    )
    with pytest.raises(ValueError, match="body cannot be decoded"):
        site.get(site.app.AsyncResult("pickled"))
    assert not marker.exists()
    assert worker.alive()


@pytest.fixture
def tls_site(tmp_path: Path) -> Iterator[Site]:
    server, files = server_with_tls(), Certificates(tmp_path / "tls")
    with closing(socket.create_server(("localhost", 0))) as free:
        port = free.getsockname()[1]
    options = ("--tls-port", str(port), *files.server, "--tls-auth-clients", "no")
    with Site(tmp_path, binary=server, options=options) as site:
        site.use(f"rediss://localhost:{port}/0?ssl_ca_certs={files.ca}")
        yield site


def test_a_worker_over_tls(tls_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", tls_site.environment["PETIOLE_BROKER_URL"])
    settings.cache_clear()
    first = tls_site.worker(PETIOLE_DRAIN_SECONDS=0)
    result = tls_site.generate("in private", max_tokens=400, seed=1)
    tls_site.streaming(result)
    first.signal(signal.SIGTERM)
    first.ended()
    tls_site.worker()
    read = [token for delta in stream(result) for token in delta.token_ids]
    assert tls_site.get(result)["token_ids"] == read == expected("in private", 1, 400)
    connections._streams.cache_clear()
    settings.cache_clear()


def test_a_certificate_that_nobody_vouches_for_is_refused(tls_site: Site) -> None:
    url = tls_site.environment["PETIOLE_BROKER_URL"].partition("?")[0]
    worker = tls_site.start_worker(PETIOLE_BROKER_URL=url)
    eventually(lambda: "certificate verify failed" in worker.output.lower(), "the worker says why")
    assert "ready." not in worker.output

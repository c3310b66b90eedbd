"""TLS that checks certificates.

Needs a redis-server built with TLS, and openssl.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from petiole.contract.settings.urls import verified

PRODUCER = """
import json
from petiole.tasks import cancel, celery_app, generate, stream
from petiole.tasks.fleet import control, queues, reports

result = generate.delay(prompt="hello")
celery_app.backend.mark_as_done(result.id, {"text": "hello"})
reader = stream(result)
reader.open()
cancel(result)
reports.workers(), control.state_of(result.id), control.state_of("unknown")
print(json.dumps([result.id, result.state]))
"""


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("rediss://host/0", "rediss://host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_ca_certs=ca.pem", "rediss://host/0?ssl_ca_certs=ca.pem&ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_cert_reqs=CERT_REQUIRED", "rediss://host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_cert_reqs=none&a=1", "rediss://host/0?ssl_cert_reqs=none&a=1"),
        ("redis://host/0", "redis://host/0"),
        ("amqps://host", "amqps://host"),
    ],
)
def test_certificates_are_checked_unless_one_says_otherwise(url: str, expected: str) -> None:
    assert verified(url) == expected


@dataclass
class SecureRedis:
    port: int
    certificate: Path

    def url(self, *, user: str = "", password: str = "p@ss/word", known: bool = True) -> str:
        trust = f"?ssl_ca_certs={self.certificate}" if known else ""
        return f"rediss://{user}:{quote(password, safe='')}@localhost:{self.port}/0{trust}"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureRedis]:
    openssl, server = shutil.which("openssl"), shutil.which("redis-server")
    if not openssl or not server:
        pytest.skip("openssl and a redis-server of the system's are not both installed")
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            "key.pem",
            "-out",
            "cert.pem",
            *subject,
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    files = ["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "cert.pem"]
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "p@ss/word"]
    process = subprocess.Popen(
        [server, *options, *files, "--unixsocket", "r.sock", "--save", ""], cwd=folder, stdout=subprocess.DEVNULL
    )
    while not listens(folder / "r.sock"):
        if process.poll() is not None:
            pytest.skip("this redis-server was built without TLS")
    yield SecureRedis(port, folder / "cert.pem")
    process.kill()
    process.wait()


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def produce(url: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PETIOLE_BROKER_URL": url, "PETIOLE_REDIS_URL": "", "PETIOLE_RESULT_BACKEND": ""}
    return subprocess.run(
        [sys.executable, "-c", PRODUCER], env=environment, capture_output=True, text=True, check=False
    )


def test_a_tls_url_serves_broker_streams_and_results(secure: SecureRedis) -> None:
    ran = produce(secure.url())
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)[1] == "SUCCESS"


def test_an_unknown_certificate_is_refused(secure: SecureRedis) -> None:
    ran = produce(secure.url(known=False))
    assert ran.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in ran.stderr
    assert "p@ss" not in ran.stderr

"""`petiole doctor` on real servers: each fault is named, and no server is blamed for another that is away."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.site import REPOSITORY, RedisServer, Site

pytestmark = pytest.mark.e2e
AWAY = "redis://127.0.0.1:1/0"


def found(site: Site, **environment: str) -> list[tuple[str, str]]:
    """Names of findings, and what is wrong."""
    command = [sys.executable, "-m", "petiole.tasks.commands.cli", "doctor", "--json"]
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=site.environment | environment, capture_output=True, text=True, check=False
    )
    findings = [(one["name"], one["what"]) for one in json.loads(ran.stdout)]
    assert ran.returncode == (1 if findings else 0), ran.stderr
    return findings


def names(site: Site, **environment: str) -> set[str]:
    return {name for name, _ in found(site, **environment)}


def test_faults_of_a_real_fleet_are_named(own_site: Site, tmp_path: Path) -> None:
    site = own_site
    assert found(site) == []
    site.generate("nobody is there")
    assert names(site) == {"PetioleNoWorker"}
    site.redis.config_set("maxmemory-policy", "allkeys-lru")
    assert names(site) == {"PetioleNoWorker", "RedisEvicts"}
    site.redis.config_set("maxmemory-policy", "noeviction")
    site.redis.config_set("maxmemory", 1)
    assert {"PetioleRedisReadOnly", "RedisNearlyFull"} <= names(site)
    site.redis.config_set("maxmemory", 0)
    site.redis.config_set("appendonly", "no")
    assert names(site) == {"PetioleNoWorker", "RedisForgets"}
    site.redis.config_set("appendonly", "yes")
    [(name, what), *others] = found(site, PETIOLE_REDIS_URL=site.url, PETIOLE_BROKER_URL=AWAY)
    assert (name, others) == ("PetioleRedisDown", []), "the streams' Redis answers"
    assert what.startswith("the broker does not answer")
    (tmp_path / "streams").mkdir()
    streams = RedisServer(tmp_path / "streams")
    try:
        assert names(site, PETIOLE_REDIS_URL=streams.url, PETIOLE_BROKER_URL=site.url) == {"PetioleNoWorker"}
    finally:
        streams.kill()

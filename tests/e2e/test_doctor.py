"""`petiole doctor` on real servers: each fault is named, and no server is blamed for another that is away."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis

from petiole.tasks.fleet import usage
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from tests.support.nursery import petiole
from tests.support.scraping import exporting
from tests.support.site import RedisServer, Site, eventually

pytestmark = pytest.mark.e2e
AWAY = "redis://127.0.0.1:1/0"


def found(site: Site, **environment: str) -> list[tuple[str, str]]:
    """Names of findings, and what is wrong."""
    ran = petiole("doctor", "--json", **site.environment | environment)
    findings = json.loads(ran.stdout)
    assert ran.returncode == any(one["grade"] == "problem" for one in findings), ran.stderr
    return [(one["name"], one["what"]) for one in findings]


def names(site: Site, **environment: str) -> set[str]:
    return {name for name, _ in found(site, **environment)}


def test_a_redis_that_cannot_save_is_not_called_away(own_site: Site, tmp_path: Path) -> None:
    """It answers what only reads, but refuses PING as it refuses writes."""
    folder = tmp_path / "full"
    (folder / "taken.rdb").mkdir(parents=True)
    server = RedisServer(folder, "--dbfilename", "taken.rdb")
    own_site.environment |= {"PETIOLE_REDIS_URL": server.url, "PETIOLE_BROKER_URL": server.url}
    try:
        with exporting(own_site) as scrape, redis.Redis(unix_socket_path=str(server.socket)) as client:
            client.config_set("save", "3600 1")
            client.bgsave()
            eventually(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "no snapshot")
            assert names(own_site) == {"PetioleRedisReadOnly", "RedisDiskFails"}
            figures = scrape()
    finally:
        server.kill()
    assert figures["petiole_redis_up", ""] == 1
    assert figures["petiole_redis_writable", "broker"] == figures["petiole_redis_writable", "streams"] == 0


def test_a_used_up_budget_is_a_remark(own_site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", own_site.url)
    settings.cache_clear()
    try:
        connections.perform([usage.telling([usage.BudgetShare("acme", "day_tokens", 100, 100)])])
        assert names(own_site) == {"PetioleBudgetUsedUp"}
    finally:
        settings.cache_clear()


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

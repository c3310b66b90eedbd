"""Keys and tenants over HTTP, for a key with the right `admin`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest
import redis

from petiole.gateway.serving.auth.api_keys import TENANTS, WEBHOOKS, digest_of
from petiole.tasks.wire.keys import usage_keys
from tests.support.gateway import Gateway
from tests.support.issuer import Issuer
from tests.support.site import RedisServer, eventually

pytestmark = pytest.mark.e2e

ADMIN, PLAIN = "ptl-admin", "ptl-plain"
OF_ADMIN = digest_of(ADMIN)[:12]
DOCUMENT = {
    "tenants": {"operators": {"salt": "a-secret-salt"}},
    "keys": {
        digest_of(ADMIN): {"tenant": "operators", "rights": ["admin"]},
        digest_of(PLAIN): {"tenant": "operators"},
    },
}


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    with Issuer() as issuer:
        yield issuer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("admin"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def gateway(server: RedisServer, issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    told = {"PETIOLE_BROKER_URL": server.url, "PETIOLE_GATEWAY_KEYS": json.dumps(DOCUMENT), **issuer.settings}
    with Gateway(tmp_path_factory.mktemp("admin"), **told, PETIOLE_GATEWAY_JWT_RIGHTS="scope") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx2.Client]:
    with client(gateway, ADMIN) as http:
        yield http


def client(of: Gateway, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=of.url, timeout=60, headers={"authorization": f"Bearer {key}"})


def made(http: httpx2.Client, tenant: str, **more: Any) -> dict[str, Any]:
    answer = http.post("/admin/keys", json={"tenant": tenant, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def listed(http: httpx2.Client, what: str) -> dict[str, dict[str, Any]]:
    answer = http.get(f"/admin/{what}")
    assert answer.status_code == 200, answer.text
    return {one["id"]: one for one in answer.json()["data"]}


def test_a_key_is_made_changed_and_revoked(http: httpx2.Client, gateway: Gateway) -> None:
    asked = {"note": "of the job", "limits": {"requests": 5, "concurrent": 2}, "expires_at": 4_102_444_800}
    key = made(http, "acme", **asked)
    secret, name = key.pop("key"), key["id"]
    assert digest_of(secret).startswith(name)
    assert key == listed(http, "keys")[name]
    expected = {**asked, "tenant": "acme", "rights": [], "source": "redis"}
    assert {field: key[field] for field in expected} == expected
    with client(gateway, secret) as own:
        assert own.get("/models").status_code == 200
        assert own.get("/key").json()["limits"] == asked["limits"]
        assert own.get("/admin/keys").status_code == 403
        changed = http.post(
            f"/admin/keys/{name}", json={"limits": {"requests": None, "concurrent": 3}, "note": ""}
        )
        assert changed.json() == {**key, "limits": {"concurrent": 3}, "note": ""}
        given = http.post(f"/admin/keys/{name}", json={"rights": ["admin"], "expires_at": None}).json()
        assert (given["rights"], given["expires_at"]) == (["admin"], None)
        eventually(lambda: own.get("/admin/keys").status_code == 200, "it has the right")
        gone = http.delete(f"/admin/keys/{name}")
        assert gone.json() == {"id": name, "object": "key.deleted", "deleted": True}
        eventually(lambda: own.get("/models").status_code == 401, "it is revoked")
    assert http.delete(f"/admin/keys/{name}").status_code == 404
    assert name not in listed(http, "keys")
    assert f"key {name} revoked by key {OF_ADMIN} of tenant operators" in gateway.output
    assert secret not in gateway.output


def test_null_takes_away_whatever_it_is(http: httpx2.Client) -> None:
    more = {"note": "x", "rights": ["admin"], "limits": {"requests": 5}, "expires_at": 4_102_444_800}
    key = made(http, "acme", **more)
    del key["key"]
    nothing: dict[str, Any] = {"note": "", "rights": [], "limits": {}, "expires_at": None}
    changed = http.post(f"/admin/keys/{key['id']}", json=dict.fromkeys(more))
    assert changed.json() == key | nothing, changed.text
    fresh = made(http, "acme", **dict.fromkeys(more))
    assert {name: fresh[name] for name in nothing} == nothing
    more = {"models": ["m"], "queue": "q", "priority": 3, "limits": {"requests": 5, "day_tokens": 9}}
    tenant = http.post("/admin/tenants/bare", json=more).json()
    changed = http.post("/admin/tenants/bare", json=dict.fromkeys(more))
    assert changed.json() == tenant | dict.fromkeys(more) | {"limits": {}}


def test_a_new_key_is_told_whatever_else_cannot_be_read(http: httpx2.Client, server: RedisServer) -> None:
    with redis.Redis(unix_socket_path=str(server.socket)) as store:
        store.hset(WEBHOOKS, "acme", b"{")
        try:
            key = made(http, "acme")
            changed = http.post(f"/admin/keys/{key['id']}", json={"note": "x"})
            assert (changed.status_code, changed.json()["note"]) == (200, "x")
        finally:
            store.hdel(WEBHOOKS, "acme")
    assert key["id"] in listed(http, "keys")


def test_a_tenant_has_what_it_used_against_its_budgets(http: httpx2.Client, server: RedisServer) -> None:
    asked = {"models": ["chat", "q*"], "priority": 3, "limits": {"day_tokens": 100, "month_tokens": 1000}}
    first = http.post("/admin/tenants/later", json=asked).json()
    nothing = {"day_tokens": 0, "month_tokens": 0}
    expected = {**asked, "usage": nothing, "queue": None, "source": "redis", "expires_at": None}
    assert {field: first[field] for field in expected} == expected
    with redis.Redis(unix_socket_path=str(server.socket)) as store:
        salt = json.loads(store.hget(TENANTS, "later"))["salt"]
        sums = usage_keys(f"{datetime.now(UTC):%Y-%m-%d}")[1]
        store.hset(sums, mapping={'["later","m"] prompt': 40, '["later","m"] output': 2})
        eventually(lambda: listed(http, "tenants")["later"]["usage"]["day_tokens"] == 42, "it is counted")
        changes = {"models": None, "priority": None, "limits": {"day_tokens": 0}}
        changed = http.post("/admin/tenants/later", json=changes).json()
        assert {field: changed[field] for field in changes} == {**changes, "limits": {"month_tokens": 1000}}
        assert json.loads(store.hget(TENANTS, "later"))["salt"] == salt


def test_nothing_that_is_secret_is_shown(http: httpx2.Client) -> None:
    secret = made(http, "hidden")["key"]
    for path in ("/admin/keys", "/admin/tenants", "/key"):
        text = http.get(path).text
        assert not [one for one in (secret, digest_of(secret), ADMIN, digest_of(ADMIN), "salt") if one in text], (
            path
        )
    assert listed(http, "keys")[OF_ADMIN]["source"] == "settings"


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("keys", {}, 400, "tenant: is required"),
        ("keys", {"tenant": "a/b"}, 400, "tenant: "),
        ("keys", {"tenant": "acme\n"}, 400, "tenant: "),
        ("keys", {"tenant": "acme", "key": "ptl-mine"}, 400, "key: is not a parameter"),
        ("keys", {"tenant": "acme", "rights": ["root"]}, 400, "rights: must be of admin, adapters, got root"),
        ("keys", {"tenant": "acme", "limits": {"more": 1}}, 400, "limits: must be one of requests, "),
        ("keys", {"tenant": "acme", "limits": {"requests": -1}}, 400, "limits.requests: must be from 0 to "),
        ("keys", {"tenant": "acme", "limits": {"requests": 10**16}}, 400, "limits.requests: must be from 0 to "),
        ("keys", {"tenant": "acme", "limits": {"requests": True}}, 400, "limits.requests: "),
        (
            "keys",
            {"tenant": "acme", "limits": {"day_tokens": 1}},
            400,
            "limits.day_tokens: must be given for a tenant",
        ),
        ("keys", {"tenant": "acme", "expires_at": "soon"}, 400, "expires_at: "),
        ("keys", {"tenant": "acme", "expires_at": 10**12}, 400, "expires_at: "),
        ("keys", {"tenant": "acme", "note": "x" * 257}, 400, "note: "),
        ("keys", {"tenant": "acme", "models": ["m"]}, 400, "models: is not a parameter"),
        ("keys/000000000000", {"note": "x"}, 404, "id: must be the name of a key in Redis"),
        (f"keys/{OF_ADMIN}", {"note": "x"}, 404, "id: must be the name of a key in Redis"),
        ("keys/acme", {"note": "x"}, 404, "id: must be the name of a key in Redis"),
        ("tenants/operators", {"priority": 1}, 400, "id: must be a tenant in Redis, got one of the settings"),
        ("tenants/a.b", {"priority": 1}, 400, "tenant: must be a name of the form"),
        ("tenants/acme", {"priority": 10}, 400, "priority: must be from 0 to 9, got 10"),
        ("tenants/never", {"limits": {"more": 1}}, 400, "limits: must be one of requests, "),
        ("tenants/acme", {"salt": "mine"}, 400, "salt: is not a parameter"),
        ("tenants/acme", {"models": ["m"] * 65}, 400, "models: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    http: httpx2.Client, path: str, body: dict[str, Any], status: int, told: str
) -> None:
    before = [listed(http, what) for what in ("keys", "tenants")]
    answer = http.post(f"/admin/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, told in error["message"]) == (status, True), answer.text
    assert error["param"] == error["message"].partition(":")[0], "the client's own field"
    assert [listed(http, what) for what in ("keys", "tenants")] == before


def test_a_key_without_the_right_is_told_which(gateway: Gateway, issuer: Issuer) -> None:
    with client(gateway, PLAIN) as plain:
        assert plain.get("/key").json()["rights"] == []
        refused = plain.post("/admin/keys", json={"tenant": "acme", "rights": ["admin"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_right")
        assert "the right admin" in refused.json()["error"]["message"]
    for scope, status in (("openid", 403), ("openid petiole:admin", 200)):
        with client(gateway, issuer.token(scope=scope)) as person:
            assert person.get("/admin/keys").status_code == status


def test_without_keys_nobody_makes_the_first_one_over_http(tmp_path: Path) -> None:
    """Whoever came first would lock out all others."""
    server = RedisServer(tmp_path)
    try:
        with Gateway(tmp_path, PETIOLE_BROKER_URL=server.url) as for_all:
            answer = httpx2.post(f"{for_all.url}/admin/keys", json={"tenant": "acme", "rights": ["admin"]})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_right")
            own = httpx2.get(f"{for_all.url}/key").json()
            assert (own["tenant"], own["rights"]) == (None, [])
    finally:
        server.kill()


def test_a_page_of_another_origin_changes_nothing(http: httpx2.Client) -> None:
    refused = http.post("/admin/keys", json={"tenant": "acme"}, headers={"origin": "https://evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_origin")

"""Keys and tenants: who gets in, and what a tenant with a key of its own finds of another's."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from petiole.gateway.core import caller
from petiole.gateway.core.caller import MOST, Caller, Key, Limits, Tenant
from petiole.gateway.core.failures import Failure
from petiole.gateway.openai.responses.conversation_store import LISTED
from petiole.gateway.serving.auth import api_keys, callers, hosts, manage
from petiole.gateway.serving.auth.hosts import is_loopback
from petiole.tasks.commands import cli
from petiole.tasks.errors import InvalidRequest, InvalidSettings
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import account_keys, stream_keys
from tests.support.gateway import Gateway
from tests.support.nursery import petiole
from tests.support.site import RedisServer, Site, eventually

ACME, INITECH = "ptl-" + "a" * 43, "ptl-" + "i" * 43
DOCUMENT = {
    "tenants": {
        "acme": {"salt": "one", "priority": 3},
        "initech": {"salt": "other", "models": ["other-*"]},
        "globex": {"salt": "third"},
        "texts": {"salt": "t", "limits": {"requests": 1}},
        "small": {"salt": "s", "limits": {"requests": 2, "output_tokens": 1000, "concurrent": 5}},
    },
    "keys": {
        api_keys.digest_of(ACME): {"tenant": "acme"},
        api_keys.digest_of(INITECH): {"tenant": "globex"},
        api_keys.digest_of("few"): {"tenant": "initech"},
        api_keys.digest_of("little"): {"tenant": "small"},
        api_keys.digest_of("texts"): {"tenant": "texts"},
    },
}
CHAT: dict[str, Any] = {
    "model": "petiole-tiny",
    "messages": [{"role": "user", "content": "Count from 1 to 5."}],
    "temperature": 0,
    "max_tokens": 4,
}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that asks for keys, on the site of all."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys.json").write_text(json.dumps(DOCUMENT))
    told = {"PETIOLE_BROKER_URL": site.url, "PETIOLE_GATEWAY_KEYS_FILE": folder / "keys.json"}
    with Gateway(folder, **told) as gateway:
        yield gateway


@pytest.fixture
def http(keyed: Gateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=keyed.root, timeout=60) as client:
        yield client


# ---------------------------------------------------------------- who gets in


def test_nobody_gets_in_without_a_known_key(http: httpx2.Client, keyed: Gateway) -> None:
    for path in ("/v1/models", "/v1/responses/resp_x", "/v1/nothing", "/tokenize"):
        assert http.get(path).json()["error"]["code"] == "missing_api_key", path
    for headers in (bearer("ptl-wrong"), {"x-api-key": "x"}, {"authorization": b"Bearer \xff\xe9"}):
        refused = http.get("/v1/models", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    told = http.post("/v1/messages").json()
    assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
    assert http.get("/health").status_code == http.get("/metrics").status_code == 200
    for headers in (bearer(ACME), {"x-api-key": ACME}, {"authorization": f"bearer {ACME}"}):
        assert http.get("/v1/models", headers=headers).status_code == 200
    assert "ptl-" not in keyed.output + http.get("/metrics").text


def test_no_page_of_another_origin_is_let_in(http: httpx2.Client) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = http.options("/v1/models", headers=asked)
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "PETIOLE_GATEWAY_ORIGINS" in answer.json()["error"]["message"]
    sent = json.dumps(CHAT)
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": str(http.base_url).rstrip("/"), "sec-fetch-site": "cross-site"},
    ):
        refused = http.post("/v1/chat/completions", content=sent, headers=bearer(ACME) | headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_origin"), headers
    own = {"origin": str(http.base_url).rstrip("/")}
    behind_a_proxy = {"origin": "https://llm.example", "sec-fetch-site": "same-origin"}
    for headers in (own, behind_a_proxy):
        assert http.post("/v1/chat/completions", content=sent, headers=bearer(ACME) | headers).status_code == 200


def test_a_tenant_sees_and_asks_for_the_models_it_is_allowed(http: httpx2.Client) -> None:
    assert http.get("/v1/models", headers=bearer("few")).json()["data"] == []
    assert http.get("/v1/models/petiole-tiny", headers=bearer("few")).status_code == 404
    refused = http.post("/v1/chat/completions", json=CHAT, headers=bearer("few"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "petiole-tiny" not in refused.json()["error"]["message"].partition(", got")[0]


# ---------------------------------------------------------------- one tenant's things


def test_no_worker_counts_for_who_is_beyond_a_limit(http: httpx2.Client, site: Site) -> None:
    """A worker makes texts of messages and of tokens first: that is a request of its own."""
    said = [{"role": "user", "content": "x"}]

    def asked(**what: Any) -> int:
        told = {"model": "petiole-tiny", **what}
        return http.post("/v1/embeddings", json=told, headers=bearer("texts")).status_code

    counted = set(site.redis.keys("celery-task-meta-*"))
    asked(messages=said)
    before = set(site.redis.keys("celery-task-meta-*"))
    assert before - counted, "the first is counted"
    assert [asked(messages=said), asked(input=[1, 2]), asked(input="x")] == [429] * 3
    assert set(site.redis.keys("celery-task-meta-*")) <= before


def test_a_tenant_lists_the_conversations_that_are_marked(http: httpx2.Client, site: Site) -> None:
    def talk(metadata: dict[str, str]) -> str:
        made = http.post("/v1/conversations", json={"metadata": metadata}, headers=bearer(ACME))
        name: str = made.json()["id"]
        return name

    def listed(key: str) -> list[str]:
        return [one["id"] for one in http.get("/v1/conversations", headers=bearer(key)).json()["data"]]

    own, first, second = talk({"title": "mine"}), talk({LISTED: "true"}), talk({LISTED: "true"})
    assert listed(ACME)[:2] == [second, first]
    told = {"model": "petiole-tiny", "input": "x", "max_output_tokens": 2}
    for name in (own, first):
        answer = http.post("/v1/responses", json={**told, "conversation": name}, headers=bearer(ACME))
        assert answer.status_code == 200
    assert listed(ACME)[:2] == [first, second], "the one that was used last"
    assert own not in listed(ACME)
    assert listed(INITECH) == []
    [talks] = site.redis.keys("*acme/:talks")
    assert site.redis.ttl(talks) > 0


def test_what_a_tenant_has_is_another_ones_404(http: httpx2.Client) -> None:
    mine, theirs = bearer(ACME), bearer(INITECH)
    chat = http.post("/v1/chat/completions", json=CHAT, headers=mine).json()["id"]
    told = {"model": "petiole-tiny", "input": "x", "max_output_tokens": 2}
    response = http.post("/v1/responses", json=told, headers=mine).json()
    talk = http.post("/v1/conversations", json={"items": [{"role": "user", "content": "x"}]}, headers=mine)
    paths = [
        ("GET", f"/v1/chat/completions/{chat}"),
        ("GET", f"/v1/chat/completions/{chat}?stream=true"),
        ("DELETE", f"/v1/chat/completions/{chat}"),
        ("GET", f"/v1/responses/{response['id']}"),
        ("GET", f"/v1/responses/{response['id']}?stream=true"),
        ("GET", f"/v1/responses/{response['id']}/input_items"),
        ("POST", f"/v1/responses/{response['id']}/cancel"),
        ("DELETE", f"/v1/responses/{response['id']}"),
        ("GET", f"/v1/conversations/{talk.json()['id']}"),
        ("GET", f"/v1/conversations/{talk.json()['id']}/items"),
        ("DELETE", f"/v1/conversations/{talk.json()['id']}"),
    ]
    for method, path in paths:
        assert http.request(method, path, headers=theirs).status_code == 404, path
    item = response["output"][0]["id"]
    for more in (
        {"previous_response_id": response["id"]},
        {"previous_response_id": f"acme/{response['id']}"},
        {"previous_response_id": f"../acme/{response['id']}"},
        {"conversation": talk.json()["id"]},
        {"input": [{"type": "item_reference", "id": item}, {"role": "user", "content": "x"}]},
    ):
        assert http.post("/v1/responses", json=told | more, headers=theirs).status_code in (400, 404), more
    for method, path in paths:
        if method != "DELETE":
            assert http.request(method, path, headers=mine).status_code == 200, path


def test_a_task_has_the_tenants_name_and_priority(http: httpx2.Client, site: Site) -> None:
    paused = {**CHAT, "model": "petiole-tiny", "priority": 0, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=paused, headers=bearer(ACME)) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    task = json.loads(lines[0].removeprefix("data: "))["id"]
    assert site.redis.exists(stream_keys(task).log)
    assert site.redis.exists(f"petiole:gateway:acme/{task}")
    assert not site.redis.exists(f"petiole:gateway:{task}")


def test_a_tenant_sees_what_it_has_used_and_nothing_of_others(http: httpx2.Client, site: Site) -> None:
    def used(key: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = http.get("/v1/usage?days=2", headers=bearer(key)).json()["data"]
        return found

    before = sum(day["output_tokens"] for day in used(ACME))
    answer = http.post("/v1/chat/completions", json=CHAT, headers=bearer(ACME)).json()
    made = answer["usage"]
    assert sum(day["output_tokens"] for day in used(ACME)) == before + made["completion_tokens"]
    assert {day["tenant"] for day in used(ACME)} == {"acme"}
    assert {day["model"] for day in used(ACME)} == {"petiole-tiny"}
    assert used("few") == []
    assert http.get("/v1/usage?days=0", headers=bearer(ACME)).status_code == 400
    told = {"PETIOLE_BROKER_URL": site.url}
    lines = petiole("usage", "--days", "2", "--tenant", "acme", "--tasks", **told).stdout.splitlines()
    [entry] = [one for one in map(json.loads, lines) if one["task"] == answer["id"]]
    assert (entry["prompt"], entry["output"]) == (made["prompt_tokens"], made["completion_tokens"])
    assert "acme" in petiole("usage", "--days", "2", **told).stdout
    assert petiole("usage", "--days", "0", **told).returncode == 1


def test_a_limit_is_told_and_what_ran_counts_as_what_it_used(http: httpx2.Client, site: Site) -> None:
    first = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 400}, headers=bearer("little"))
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    task, made = first.json()["id"], first.json()["usage"]["completion_tokens"]
    used, running = account_keys("small")
    eventually(lambda: site.redis.zscore(running, task) is None, "its end was counted")
    counted = {name: int(value) for name, value in site.redis.hgetall(used).items()}
    assert sum(value for name, value in counted.items() if name.startswith(b"output")) == made
    told = {"model": "petiole-tiny", "input": "x", "max_output_tokens": 2}
    assert http.post("/v1/responses", json=told, headers=bearer("little")).status_code == 200
    counts = {"model": "petiole-tiny", "prompt": "x", "input": "x", "tokens": [1], "messages": CHAT["messages"]}
    for path, fields in (
        ("/v1/chat/completions", CHAT),
        ("/v1/responses", told),
        ("/tokenize", ("model", "prompt")),
        ("/detokenize", ("model", "tokens")),
        ("/v1/messages/count_tokens", ("model", "messages")),
        ("/v1/responses/input_tokens", ("model", "input")),
    ):
        asked = fields if isinstance(fields, dict) else {name: counts[name] for name in fields}
        refused = http.post(path, json=asked, headers=bearer("little"))
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error"), path
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert http.get("/v1/models", headers=bearer("little")).status_code == 200


@pytest.mark.parametrize("url", ["redis://localhost/0", "amqp://localhost//"])
def test_a_tenant_is_no_more_urgent_than_it_may_be(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", url)
    settings.cache_clear()
    asks = Caller("acme", "", Tenant(salt="x", priority=3))
    first = (lambda number: number) if url.startswith("redis") else (lambda number: 9 - number)
    found = [
        caller.submission(asks, given)["priority"]
        for given in ({}, {"priority": first(0)}, {"priority": first(7)})
    ]
    assert found == [first(3), first(3), first(7)]
    assert caller.submission(asks, {"headers": {"a": 1}})["headers"] == {"a": 1, "tenant": "acme"}
    settings.cache_clear()


def test_salts_of_tenants_meet_nowhere() -> None:
    """Neither with a salt of the client's own, nor with one that is made like another tenant's."""
    acme, globex = (Caller(name, "", Tenant(salt=salt)) for name, salt in (("acme", "a"), ("globex", "ab")))
    of_acme = caller.options(acme, {})["salt"]
    tried = ["", "a", "a\0", of_acme, "\0", "b"]
    found = [caller.options(asks, {"salt": salt})["salt"] for asks in (acme, globex) for salt in tried]
    assert len(set(found)) == len(found)
    assert of_acme not in found[1:]
    assert max(map(len, found)) <= 256


# ---------------------------------------------------------------- keys in Redis and in the settings


@pytest.fixture
def own_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """That of this process's settings."""
    redis = RedisServer(tmp_path)
    monkeypatch.setenv("PETIOLE_BROKER_URL", redis.url)
    settings.cache_clear()
    yield redis
    settings.cache_clear()
    redis.kill()


Command = Callable[..., tuple[int, str]]


@pytest.fixture
def keys(own_redis: RedisServer, capsys: pytest.CaptureFixture[str]) -> Command:
    """`petiole keys` in this process: its status, and what it prints."""

    def done(*arguments: str) -> tuple[int, str]:
        status = cli.main(["keys", *arguments])
        return status, "".join(capsys.readouterr())

    return done


def test_keys_are_made_listed_and_revoked(keys: Command, own_redis: RedisServer, tmp_path: Path) -> None:
    told = {"PETIOLE_BROKER_URL": own_redis.url}
    with Gateway(tmp_path, **told) as gateway, httpx2.Client(base_url=gateway.root) as http:
        assert http.get("/v1/models").status_code == 200, "no key exists, and it listens on loopback"
        made = petiole("keys", "add", "acme", "--models", "chat,q*", "--limit", "requests=60", **told)
        key = made.stdout.strip()
        assert (made.returncode, key[:4], len(key)) == (0, "ptl-", 47), made.stderr
        eventually(lambda: http.get("/v1/models").status_code == 401, "keys are asked for")
        assert http.get("/v1/models", headers=bearer(key)).status_code == 200
        other = keys("add", "acme", "--note", "of the nightly job", "--key-limit", "concurrent=7")[1].strip()
        shown = keys("list")[1]
        assert shown.count("acme") == 2
        assert shown.count("requests 60") == 2, "the tenant's limits stay"
        assert shown.count("concurrent 7") == 1, "a key has its own"
        assert not [one for one in (key, other) if one in shown]
        assert keys("webhook", "acme", "https://a.example/x")[1].startswith("whsec_")
        assert keys("list")[1].count("https://a.example/x") == 2
        assert keys("webhook", "acme")[0] == 1
        assert keys("webhook", "acme", "--remove") == (0, "removed\n")
        assert keys("revoke", "zzzz")[0] == 1
        assert keys("revoke", api_keys.name_of(api_keys.digest_of(key)))[0] == 0
        eventually(lambda: http.get("/v1/models", headers=bearer(key)).status_code == 401, "it is revoked")
        assert http.get("/v1/models", headers=bearer(other)).status_code == 200
        keys("revoke", other)
        eventually(lambda: http.get("/v1/models", headers=bearer(other)).status_code == 401, "it is revoked")
        assert http.get("/v1/models").status_code == 401, "who has seen a key never opens again"
    assert keys("add", "a/b")[0] == 1
    assert keys("add", "acme", "--limit", "more=1")[0] == 1
    assert keys("add", "acme", "--rights", "all")[1] == "petiole: rights: must be of admin, adapters, got all\n"


def test_a_tenant_and_a_key_are_changed_without_a_new_key(keys: Command) -> None:
    key = keys("add", "acme", "--limit", "requests=60", "--key-limit", "requests=5", "--note", "old")[1].strip()
    name = api_keys.name_of(api_keys.digest_of(key))
    limits = ("--limit", "requests=7", "--limit", "concurrent=2")
    assert keys("set", "acme", *limits) == (0, "changed: tenant acme\n")
    assert keys("set", name, "--limit", "requests=0", "--note", "new") == (0, f"changed: key {name}\n")
    assert keys("set", name, "--expires", "2020-01-31", "--rights", "admin")[0] == 0
    shown = keys("list")[1]
    assert "requests 7, concurrent 2" in shown
    assert "2020-01-31T00:00Z" in shown
    assert "admin" in shown
    assert ("requests 5" in shown, "new" in shown, "old" in shown) == (False, True, False)
    assert keys("set", name, "--rights", "")[0] == 0
    assert "admin" not in keys("list")[1]


def test_a_tenant_of_tokens_is_made_before_its_first_token(keys: Command) -> None:
    assert keys("set", "later", "--limit", "requests=7")[0] == 1, "a misspelt name makes no tenant"
    assert keys("set", "later", "--make", "--limit", "requests=7") == (0, "changed: tenant later\n")
    salt = asyncio.run(api_keys.tenants())["later"].salt
    assert keys("set", "later", "--make", "--limit", "concurrent=2")[0] == 0
    assert asyncio.run(api_keys.tenants())["later"] == Tenant(salt, limits=Limits(requests=7, concurrent=2))
    assert keys("set", "a/b", "--make")[0] == 1
    for wrong in (("--limit", "more=1"), ("--priority", "10"), ("--note", "of a key")):
        assert keys("set", "never", "--make", *wrong)[0] == 1
    assert "never" not in asyncio.run(api_keys.tenants()), "what is refused makes no tenant"


def test_an_expired_key_is_told_when_it_expired(own_redis: RedisServer) -> None:
    def asked() -> Caller:
        return asyncio.run(callers.KeyCache().of(key))

    key, _ = manage.add("acme", {}, {}, {})
    for name in ("acme", key):
        manage.change(name, {"expires": 1_600_000_000}, {})
        with pytest.raises(Failure, match="expired at 2020-09-13T12:26:40Z"):
            asked()
        manage.change(name, {"expires": 0}, {})
        assert asked().name == "acme"


def test_a_change_that_cannot_be_is_refused_and_brings_no_revoked_key_back(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = manage.add("acme", {}, {}, {})
    for name, changes, limits, why in (
        (key, {"models": ["a"]}, {}, "models: must be given for a tenant"),
        ("acme", {"note": "x"}, {}, "note: must be given for a key"),
        ("acme", {"rights": ["admin"]}, {}, "rights: must be given for a key"),
        ("acme", {"priority": 10}, {}, "priority: must be from 0 to 9, got 10"),
        ("acme", {}, {"more": 1}, "limits: must be one of .*, got more"),
        (key, {"rights": ["admin", "all"]}, {}, "rights: must be of admin, adapters, got all"),
        (key, {}, {"day_tokens": 1}, "limits.day_tokens: must be given for a tenant, got 1"),
        ("nobody", {}, {}, "key: must be the name of one key"),
    ):
        with pytest.raises(InvalidRequest, match=why):
            manage.change(name, changes, limits)
    decoded = manage._decoded

    def revoked_meanwhile(raw: bytes, kind: type[Any]) -> Any:
        connections.streams().hdel(api_keys.KEYS, api_keys.digest_of(key))
        return decoded(raw, kind)

    monkeypatch.setattr(manage, "_decoded", revoked_meanwhile)
    with pytest.raises(InvalidRequest, match="name: must be a tenant or a key in Redis"):
        manage.change(key, {"note": "x"}, {})
    assert not connections.streams().hlen(api_keys.KEYS)


def test_a_new_key_keeps_what_is_changed_of_its_tenant_meanwhile(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Tenant] = []

    def meanwhile() -> Tenant:
        """Another gateway makes the tenant at its first token, and somebody gives it a limit."""
        if not made:
            made.append(Tenant("of-the-token", limits=Limits(requests=7)))
            stored = msgspec.json.encode(made[0])
            connections.streams().hset(api_keys.TENANTS, "acme", stored)
        return Tenant("of-the-key")

    monkeypatch.setattr(manage, "new_tenant", meanwhile)
    manage.add("acme", {"priority": 3}, {}, {})
    expected = Tenant("of-the-token", priority=3, limits=Limits(requests=7))
    assert asyncio.run(api_keys.tenants())["acme"] == expected


def test_a_revoked_key_ends_its_websocket(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        told = {"PETIOLE_BROKER_URL": redis.url}
        key = petiole("keys", "add", "acme", **told).stdout.strip()
        with Gateway(tmp_path, **told) as gateway:
            url = f"{gateway.url.replace('http', 'ws', 1)}/responses"
            with connect(url, additional_headers=bearer(key)) as socket:

                def answer() -> str:
                    socket.send(json.dumps({"type": "response.create", "model": "none", "input": "x"}))
                    return str(json.loads(socket.recv(60))["error"]["code"])

                assert answer() == "model_not_found"
                petiole("keys", "revoke", key, **told)
                eventually(lambda: answer() == "invalid_api_key", "it is refused")
                with pytest.raises(ConnectionClosed) as closed:
                    socket.recv(60)
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == callers.DENIED
    finally:
        redis.kill()


def test_a_key_is_printed_with_its_settings() -> None:
    of_tenant = ("--models", "chat,q*", "--limit", "day_tokens=9")
    of_key = ("--rights", "admin", "--expires", "2027-01-31", "--note", "Joe's", "--key-limit", "requests=5")
    done = petiole("keys", "add", "acme", *of_tenant, *of_key, "--print-settings")
    key, setting = done.stdout.splitlines()
    [assigned] = shlex.split(setting)
    document = json.loads(assigned.removeprefix("PETIOLE_GATEWAY_KEYS="))
    assert [*document["keys"]] == [api_keys.digest_of(key)]
    assert key not in setting
    [stored] = document["keys"].values()
    assert stored.pop("created") > 0
    expected = {"tenant": "acme", "rights": ["admin"], "note": "Joe's", "limits": {"requests": 5}}
    assert stored == {**expected, "expires": 1_801_353_600}
    tenant = document["tenants"]["acme"]
    assert len(tenant.pop("salt")) == 32
    assert tenant == {"models": ["chat", "q*"], "limits": {"day_tokens": 9}}
    assert petiole("keys", "add", "a/b", "--print-settings").returncode == 1


@pytest.mark.parametrize(
    "document",
    [
        "{",
        '{"keys": {"x": {"tenant": "acme"}}}',
        '{"tenants": {"acme": {}}}',
        '{"tenants": {"a/b": {"salt": "x"}}}',
        '{"tenants": {"acme": {"salt": "x", "colour": 1}}}',
    ],
)
def test_settings_that_are_no_keys_are_refused_by_name(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_GATEWAY_KEYS", document)
    settings.cache_clear()
    with pytest.raises(InvalidSettings, match="PETIOLE_GATEWAY_KEYS: must"):
        api_keys.of_settings()
    settings.cache_clear()


@pytest.mark.parametrize(
    ("tenant", "key", "said"),
    [
        ({"priority": 10}, {}, "tenants.acme.priority: must be from 0 to 9, got 10"),
        ({"priority": -1}, {}, "tenants.acme.priority: must be from 0 to 9, got -1"),
        ({"limits": {"requests": -1}}, {}, f"tenants.acme.limits.requests: must be from 0 to {MOST}, got -1"),
        ({}, {"limits": {"files": MOST + 1}}, f"keys.0123456789ab.limits.files: must be from 0 to {MOST}, got"),
        ({}, {"limits": {"day_tokens": 1}}, "keys.0123456789ab.limits.day_tokens: must be given for a tenant"),
        ({}, {"rights": ["root"]}, "keys.0123456789ab.rights: must be of admin, adapters, got 'root'"),
    ],
)
def test_settings_keep_the_rules_of_the_keys_in_redis(
    tenant: dict[str, Any], key: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {
        "tenants": {"acme": {"salt": "x", **tenant}},
        "keys": {"0123456789abcdef": {"tenant": "acme", **key}},
    }
    monkeypatch.setenv("PETIOLE_GATEWAY_KEYS", json.dumps(document))
    settings.cache_clear()
    with pytest.raises(InvalidSettings, match=f"^PETIOLE_GATEWAY_KEYS: {re.escape(said)}"):
        api_keys.of_settings()
    settings.cache_clear()


def test_settings_are_read_again_only_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for salt in ("one", "one", "other"):
        monkeypatch.setenv("PETIOLE_GATEWAY_KEYS", json.dumps({"tenants": {"acme": {"salt": salt}}}))
        settings.cache_clear()
        found.append(api_keys.of_settings())
    settings.cache_clear()
    assert found[0] is found[1]
    assert [one.tenants["acme"].salt for one in found] == ["one", "one", "other"]


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("gateway.example", False), ("", False)],
)  # fmt: skip
def test_which_addresses_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("host", "known"),
    [("localhost:8000", True), ("127.0.0.1", True), ("[::1]:80", True), ("a.localhost", True),
     ("LLM.example", True), ("evil.example:8000", False), ("127.0.0.1.evil.example", False),
     ("localhost.evil.example", False), ("[::2]", False), ("", False), (None, True)],
)  # fmt: skip
def test_by_which_names_it_is_called_without_keys(
    host: str | None, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = {"headers": [] if host is None else [(b"host", host.encode())]}
    assert hosts.is_known(scope), "nobody has asked for it"
    monkeypatch.setattr(hosts, "_named", None)
    monkeypatch.setenv("PETIOLE_GATEWAY_HOSTS", "llm.example, other.example")
    settings.cache_clear()
    hosts.guard()
    settings.cache_clear()
    assert hosts.is_known(scope) is known


def test_without_keys_it_listens_on_loopback_alone_and_says_so(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    try:
        with Gateway(tmp_path, host="0.0.0.0", PETIOLE_BROKER_URL=redis.url) as gateway:
            assert gateway.url.startswith("http://127.0.0.1:")
            assert "no key exists, so this gateway listens on 127.0.0.1 alone, not on 0.0.0.0" in gateway.output
            refused = httpx2.get(f"{gateway.url}/models", headers={"host": f"rebound.example:{gateway.port}"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "foreign_host")
            assert httpx2.get(f"{gateway.url}/models").status_code == 200
        with Gateway(
            tmp_path, host="0.0.0.0", PETIOLE_BROKER_URL=redis.url, PETIOLE_GATEWAY_KEYS=json.dumps(DOCUMENT)
        ) as gateway:
            assert gateway.url.startswith("http://0.0.0.0:")
        with Gateway(
            tmp_path,
            host="0.0.0.0",
            PETIOLE_BROKER_URL=redis.url,
            PETIOLE_GATEWAY_OPEN="true",
            PETIOLE_GATEWAY_HOSTS="gateway,0.0.0.0",
        ) as gateway:
            assert gateway.url.startswith("http://0.0.0.0:")
            for host, status in (("gateway:8000", 200), ("rebound.example", 403)):
                answer = httpx2.get(f"{gateway.url}/models", headers={"host": host})
                assert answer.status_code == status
    finally:
        redis.kill()


def test_a_key_names_its_tenant_in_the_settings_alone() -> None:
    """What is stored of a key is its hash: the entries have no key in them."""
    assert ACME not in json.dumps(DOCUMENT)
    assert Key("acme").tenant == "acme"

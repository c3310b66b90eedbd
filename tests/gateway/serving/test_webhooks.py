"""Notices of webhooks: signed, told until they are taken, to no address that is not allowed, and bounded."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest
import redis
from openai import InvalidWebhookSignatureError

from petiole.gateway.core import webhook_events
from petiole.gateway.core.caller import Caller, as_caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.webhook_events import Notice, Webhook, problem
from petiole.gateway.serving.auth.api_keys import TENANTS, WEBHOOKS, of_settings
from petiole.gateway.serving.auth.manage import no_webhook, webhook
from petiole.gateway.serving.webhooks import dispatcher, queue
from petiole.gateway.serving.webhooks.dispatcher import WebhookDispatcher
from petiole.tasks.errors import InvalidRequest, InvalidSettings
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import watched_key
from petiole.tasks.wire.record import ledger, scripts
from tests.support.receiver import Receiver
from tests.support.site import PATIENCE_S, RedisServer

SECRET = webhook_events.new_secret()
TENANT = "acme"
NOW = int(time.time())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("webhooks"))
    yield server
    server.kill()


@pytest.fixture
def client(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setenv("PETIOLE_GATEWAY_WEBHOOK_NETWORKS", "127.0.0.0/8")
    settings.cache_clear()
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.flushall()
        client.hset(TENANTS, TENANT, b'{"salt":"x"}')
        yield client
    settings.cache_clear()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


async def runs(name: str) -> str | None:
    return None


def told(
    until: Callable[[], bool],
    *before: Callable[[], Awaitable[Any]],
    ended_as: Callable[[str], Awaitable[str | None]] = runs,
) -> Counter[str]:
    """What a dispatcher counts until this is true. `before`: what the tenant does first."""
    counted: Counter[str] = Counter()
    tenant(*before)

    async def dispatcher() -> None:
        own = WebhookDispatcher(ended_as, lambda outcome: counted.update([outcome]))
        async with asyncio.timeout(PATIENCE_S):
            await own.round()
            while not until() or own._telling:
                await asyncio.sleep(0.01)
                await own.round()

    asyncio.run(dispatcher())
    return counted


def tenant(*does: Callable[[], Awaitable[Any]]) -> None:
    async def done() -> None:
        with as_caller(Caller(TENANT)):
            for work in does:
                await work()

    asyncio.run(done())


def ended(number: int = 1, type: str = "batch.completed") -> Callable[[], Awaitable[int]]:
    return lambda: queue.notify(type, f"batch_{number}", NOW)


def test_a_notice_is_signed_as_openais_client_checks_it(client: redis.Redis, receiver: Receiver) -> None:
    secret = webhook(TENANT, receiver.url)
    told(lambda: not client.exists(queue._key(TENANT)), ended(), ended())
    [got] = receiver.got
    event = got.event(secret)
    assert (got.path, event.type, event.data.id) == ("/told?by=petiole", "batch.completed", "batch_1")
    assert event.id == got.headers["webhook-id"]
    with pytest.raises(InvalidWebhookSignatureError):
        got.event(SECRET)
    with pytest.raises(InvalidWebhookSignatureError):
        got._replace(body=got.body.replace("batch_1", "batch_2")).event(secret)
    newer = webhook(TENANT, receiver.url)
    told(lambda: len(receiver.got) == 2, ended(2))
    assert receiver.got[1].event(secret) == receiver.got[1].event(newer), "a receiver changes at its leisure"
    assert no_webhook(TENANT)
    assert not told(lambda: True, ended(3)), "nobody wants to know"


def test_it_is_told_again_with_the_same_id_until_it_is_taken(
    client: redis.Redis, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "pause_s", lambda age_s: 0.0)
    for status in (500, 302, 404, 204):
        receiver.answers.put(status)
    webhook(TENANT, receiver.url)
    counted = told(lambda: not client.exists(queue._key(TENANT)), ended())
    assert counted == {"failed": 3, "delivered": 1}
    assert len(set(receiver.ids())) == 1
    assert {one.path for one in receiver.got} == {"/told?by=petiole"}, "no redirect is followed"
    assert not client.keys("petiole:gateway:/notices*")


def test_what_a_dead_gateway_has_taken_is_told_by_another(client: redis.Redis, receiver: Receiver) -> None:
    webhook(TENANT, receiver.url)

    async def dies() -> None:
        assert await queue.take(TENANT, 8)

    tenant(ended(), dies)
    told(lambda: True)
    assert not receiver.got
    [(_, due_at)] = client.zrange(queue._key(TENANT), 0, -1, withscores=True)
    assert 0 < due_at - 1000 * time.time() <= 1000 * queue.LEASE_S
    everything_is_due(client)
    told(lambda: not client.exists(queue._key(TENANT)))
    assert len(receiver.got) == 1


def test_a_watched_response_is_told_when_it_has_ended(client: redis.Redis, receiver: Receiver) -> None:
    secret = webhook(TENANT, receiver.url)
    states = {"resp_1": None, "resp_2": "response.failed", "resp_3": "gone", "resp_4": "away"}
    asked: list[str] = []

    async def ended_as(name: str) -> str | None:
        asked.append(name)
        if (state := states[name]) in ("gone", "away"):
            raise Failure(404 if state == "gone" else 503, "")
        return state

    client.zadd(watched_key(), {f"{TENANT}/{name}": 2e15 for name in states})
    told(lambda: True, ended_as=ended_as)
    assert not asked, "no time has come"
    for name in ("resp_2", "resp_3", "resp_4"):  # as the script that ends a task says it
        account = ledger.Account(TENANT, None, "m", "", 7)
        at = time.time()
        entry = ledger.entry(account, name, 1, {"finish_reason": "stop"}, 1, 1, at)
        of_task = scripts.SOURCES["close"]
        keys = [f"{key}:{name}" for key in ("log", "state", "asked", "runs", "messages")]
        keys += ledger.keys_of(account, at)
        client.eval(of_task, len(keys), *keys, 60_000, "channel", "{", "", "}", "done", "", 1, entry)
    told(lambda: bool(receiver.got), ended_as=ended_as)
    assert sorted(asked) == ["resp_2", "resp_3", "resp_4"]
    assert receiver.got[0].event(secret).type == "response.failed"
    assert client.zrange(watched_key(), 0, -1) == [b"acme/resp_4", b"acme/resp_1"]
    assert client.zscore(watched_key(), "acme/resp_4") <= 1000 * (time.time() + queue.LEASE_S)


def test_a_dead_server_leaves_no_more_than_a_bound(
    client: redis.Redis, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "MOST_NOTICES", 5)
    webhook(TENANT, receiver.url)
    tenant(*(ended(number) for number in range(5)))
    client.zincrby(queue._key(TENANT), 1e9, client.zrange(queue._key(TENANT), 0, 0)[0])  # has failed often
    gone: list[int] = []

    async def one_more() -> None:
        gone.append(await ended(5)())

    tenant(one_more)
    left = {msgspec.json.decode(one)["about"] for one in client.zrange(queue._key(TENANT), 0, -1)}
    assert (gone, left) == ([1], {f"batch_{number}" for number in (1, 2, 3, 4, 5)})
    assert 0 < client.ttl(queue._key(TENANT)) <= queue.TRIED_FOR_S

    monkeypatch.setattr(queue, "TRIED_FOR_S", -1)
    for _ in range(5):
        receiver.answers.put(500)
    everything_is_due(client)
    assert told(lambda: not client.exists(queue._key(TENANT))) == {"dropped": 5}
    everything_is_due(client)
    told(lambda: not client.keys("petiole:gateway:/notices*"))


def test_a_slow_server_holds_up_nobody_elses_notices(client: redis.Redis, receiver: Receiver) -> None:
    webhook(TENANT, receiver.url)
    with Receiver() as slow:
        slow.open.clear()
        client.hset(TENANTS, "slow", b'{"salt":"x"}')
        webhook("slow", slow.url)

        async def both() -> None:
            with as_caller(Caller("slow")):
                for number in range(20):
                    await ended(number)()
            for number in range(20):
                await ended(number)()

        def delivered() -> bool:
            if slow.got and len(receiver.got) == 20:
                slow.open.set()
            return not client.keys("petiole:gateway:/notices*")

        told(delivered, both)
        assert len(slow.got) == 20


def test_who_does_not_know_where_to_leaves_it_to_others(client: redis.Redis, receiver: Receiver) -> None:
    """Gateways may have different settings, while they are changed."""
    webhook(TENANT, receiver.url)
    known = client.hget(WEBHOOKS, TENANT)
    tenant(ended())
    assert no_webhook(TENANT)
    told(lambda: True)
    assert client.zscore(queue.TENANTS, TENANT) > 1000 * time.time(), "not looked at all the time"
    client.hset(WEBHOOKS, TENANT, known)
    everything_is_due(client)
    told(lambda: bool(receiver.got))


def test_what_cannot_be_read_holds_up_nothing(client: redis.Redis, receiver: Receiver) -> None:
    webhook(TENANT, receiver.url)

    async def damaged() -> None:
        client.zadd(queue._key(TENANT), {b"\xff": 0, b"{}": 0, b'"resp"': 0})

    told(lambda: not client.keys("petiole:gateway:/notices*"), damaged, ended())
    assert len(receiver.got) == 1
    client.hset(WEBHOOKS, TENANT, b'{"url": 1}')
    told(lambda: True, ended(2))
    assert len(receiver.got) == 1


# ---------------------------------------------------------------- where it goes


def posted(url: str) -> str:
    try:
        asyncio.run(dispatcher.post(url, {}, b"{}"))
    except dispatcher.NotTaken as why:
        return str(why)
    return ""


def test_only_public_addresses_are_told_unless_a_setting_says_otherwise(
    client: redis.Redis, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert posted(receiver.url) == ""
    monkeypatch.setenv("PETIOLE_GATEWAY_WEBHOOK_NETWORKS", "10.0.0.0/8")
    settings.cache_clear()
    assert posted(receiver.url) == "only inner networks are told without TLS"
    assert posted("http://93.184.216.34/") == "only inner networks are told without TLS"
    for host in ("127.0.0.1", "169.254.169.254", "[::1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]", "localhost"):
        assert posted(f"https://{host}/") == "its address is not public", host
    assert len(receiver.got) == 1
    monkeypatch.setenv("PETIOLE_GATEWAY_WEBHOOK_NETWORKS", "10.0.0.0/99")
    settings.cache_clear()
    with pytest.raises(InvalidSettings, match="GATEWAY_WEBHOOK_NETWORKS: must be networks"):
        settings()


def test_a_name_that_leads_elsewhere_later_is_looked_up_once(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [["93.184.216.34"], ["127.0.0.1"]]
    connected: list[str] = []

    def looked_up(host: str, port: int, **_: object) -> list[Any]:
        return [(None, None, None, "", (address, port)) for address in answers.pop(0)]

    async def opened(address: str, port: int, **tls: Any) -> Any:
        connected.append(f"{address} {tls['server_hostname']}")
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setattr(asyncio, "open_connection", opened)
    monkeypatch.setenv("PETIOLE_GATEWAY_WEBHOOK_NETWORKS", "")
    settings.cache_clear()
    assert posted("https://rebinding.example/") == "ConnectionRefusedError"
    assert connected == ["93.184.216.34 rebinding.example"]
    answers[:] = [["93.184.216.34", "127.0.0.1"]]
    assert posted("https://rebinding.example/") == "its address is not public", "each of them is checked"


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x" * 99_999])
def test_a_server_that_speaks_no_http_has_not_taken_it(client: redis.Redis, answer: bytes) -> None:
    async def tried() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(dispatcher.NotTaken, match=r"RemoteProtocolError|Connection"):
                await dispatcher.post(f"http://127.0.0.1:{port}/", {}, b"{}")

    asyncio.run(tried())


def test_a_server_that_answers_byte_by_byte_has_a_time(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "WAIT_S", 0.2)

    async def tried() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nx:")
            while not writer.is_closing():
                writer.write(b"x")
                await asyncio.sleep(0.01)

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(dispatcher.NotTaken, match=r"no answer within 0\.2 s"):
                await dispatcher.post(f"http://127.0.0.1:{port}/", {}, b"{}")

    asyncio.run(tried())


# ---------------------------------------------------------------- what is told where


@pytest.mark.parametrize(
    "url",
    ["", "example.com", "ftp://example.com/", "https://", "https://user:word@example.com/", "https://a/#b",
     "https://a/ b", "https://a/\r\nx: y", "https://ä.example/", "https://a:0/", "https://a:x/", "https://[::1",
     "https://a/" + "x" * 2048],
)  # fmt: skip
def test_urls_that_are_no_webhooks(url: str, client: redis.Redis) -> None:
    with pytest.raises(InvalidRequest, match="url"):
        webhook(TENANT, url)
    assert problem(Webhook("https://example.com:8443/a?b=c", [SECRET])) is None


def test_a_webhook_needs_a_tenant_and_settings_have_good_ones(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="tenant: must be one that has keys"):
        webhook("nobody", "https://example.com/")
    assert webhook("", "https://example.com/"), "everybody's, without keys"
    for bad in ({"url": "https://a/", "secrets": []}, {"url": "https://a/", "secrets": ["whsec_x"]}, {"url": "a"}):
        monkeypatch.setenv("PETIOLE_GATEWAY_KEYS", json.dumps({"webhooks": {"acme": bad}}))
        settings.cache_clear()
        with pytest.raises(InvalidSettings, match="PETIOLE_GATEWAY_KEYS"):
            of_settings()


def test_a_notice_has_the_same_id_for_the_same_tenant_alone() -> None:
    one = Notice("response.completed", "resp_1", 1)
    assert one.id_for("acme") == Notice("response.completed", "resp_1", 2).id_for("acme")
    others = {one.id_for("other"), Notice("response.failed", "resp_1", 1).id_for("acme")}
    assert len({one.id_for("acme"), *others}) == 3


def everything_is_due(client: redis.Redis) -> None:
    """Everything is due."""
    for key in client.scan_iter("petiole:gateway:/notices*"):
        for member in client.zrange(key, 0, -1):
            client.zadd(key, {member: 0})

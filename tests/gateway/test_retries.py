"""Requests that repeat others: one task with an `Idempotency-Key`, whatever happens; and an SDK's own retries."""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from petiole.gateway.core.caller import Caller, ClientRequest, as_caller
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.task_plan import Plan
from petiole.gateway.openai.responses import submitting
from petiole.gateway.openai.responses.request import CreateResponse
from petiole.gateway.serving import records
from petiole.gateway.serving.auth import idempotency
from petiole.gateway.serving.generations import begin
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import stream_keys
from tests.gateway.test_keys import ACME, DOCUMENT, INITECH, bearer, keyed
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

__all__ = ["keyed"]

SHORT: dict[str, Any] = {"model": "petiole-tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
STREAM: dict[str, Any] = {**SHORT, "stream": True}
RESPONSE: dict[str, Any] = {"model": "petiole-tiny", "input": "x", "max_output_tokens": 2}


@pytest.fixture
def http(keyed: Gateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=keyed.root, timeout=60) as client:
        yield client


@pytest.fixture
def idle(site: Site, tmp_path: Path) -> Iterator[httpx2.Client]:
    """Of a gateway that begins streams at once, on a worker that does nothing: no request ends."""
    told = {"PETIOLE_BROKER_URL": site.url, "PETIOLE_GATEWAY_KEYS": json.dumps(DOCUMENT)}
    with (
        Gateway(tmp_path, **told, PETIOLE_GATEWAY_PREPARED_S="0") as gateway,
        httpx2.Client(base_url=gateway.root, timeout=60) as client,
    ):
        worker = site.workers[0]
        worker.signal(signal.SIGSTOP)
        try:
            yield client
        finally:
            worker.signal(signal.SIGCONT)


def once(key: str, of: str = ACME) -> dict[str, str]:
    return {**bearer(of), "idempotency-key": key}


def tried(times: int) -> dict[str, str]:
    return {**bearer(ACME), "x-stainless-retry-count": str(times)}


def test_equal_requests_with_one_key_are_one_task(http: httpx2.Client) -> None:
    """Eight at once, and one later."""
    key = uuid.uuid4().hex
    with ThreadPoolExecutor(8) as threads:
        answers = [
            *threads.map(lambda _: http.post("/v1/chat/completions", json=SHORT, headers=once(key)), range(8))
        ]
    answers.append(http.post("/v1/chat/completions", json=SHORT, headers=once(key)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.text for answer in answers}) == 1


def test_a_key_is_one_request_of_one_tenant(http: httpx2.Client) -> None:
    key = uuid.uuid4().hex
    first = http.post("/v1/chat/completions", json=SHORT, headers=once(key)).json()["id"]
    other = http.post("/v1/chat/completions", json={**SHORT, "seed": 1}, headers=once(key))
    assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_key_reused")
    completion = {"model": "petiole-tiny", "prompt": "x"}
    assert http.post("/v1/completions", json=completion, headers=once(key)).status_code == 400
    theirs = http.post("/v1/chat/completions", json=SHORT, headers=once(key, INITECH)).json()["id"]
    assert theirs != first
    assert http.post("/v1/chat/completions", json=SHORT, headers=once("x" * 256)).status_code == 400


def test_the_order_of_its_fields_makes_no_other_request(http: httpx2.Client) -> None:
    """A client may write its body anew for each try."""
    key, told = uuid.uuid4().hex, {**SHORT, "logit_bias": {"1": 2.0, "3": 4}}
    turned = {**dict(reversed(told.items())), "logit_bias": {"3": 4, "1": 2.0}}
    bodies = [json.dumps(told), json.dumps(turned), json.dumps(turned, indent=1), json.dumps(told)]
    assert len({*bodies}) == 3
    headers = {**once(key), "content-type": "application/json"}
    with ThreadPoolExecutor(4) as threads:
        answers = [
            *threads.map(lambda body: http.post("/v1/chat/completions", content=body, headers=headers), bodies)
        ]
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.text for answer in answers}) == 1
    more = [{"role": "assistant", "content": "x"}, *SHORT["messages"]]
    for other in (more, more[::-1]):
        refused = http.post("/v1/chat/completions", json={**told, "messages": other}, headers=once(key))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "idempotency_key_reused")


def test_a_body_is_known_by_its_bytes_and_one_of_json_by_its_sense() -> None:
    made = ClientRequest("/v1/x", "key")
    made.has(b'{"a":1,"b":2}')
    assert made.says(made.digest, "")
    turned = ClientRequest("/v1/x", "key")
    turned.has(b'{"b":2, "a":1}')
    assert not turned.says(made.digest, "")
    assert turned.says(made.digest, made.sense)
    odd = ClientRequest("/v1/x", "key")
    odd.has(b"no JSON")
    assert not odd.says("", ""), "nothing is like nothing"


def test_a_request_that_was_refused_may_be_tried_again(http: httpx2.Client) -> None:
    key = uuid.uuid4().hex
    wrong = {**SHORT, "temperature": -1}
    for _ in range(2):
        assert http.post("/v1/chat/completions", json=wrong, headers=once(key)).status_code == 400
    assert http.post("/v1/chat/completions", json=SHORT, headers=once(key)).status_code == 200


@pytest.mark.parametrize("more", [{}, {"background": True}])
def test_a_response_is_made_once_and_joins_its_conversation_once(
    http: httpx2.Client, more: dict[str, Any]
) -> None:
    talk = http.post("/v1/conversations", json={}, headers=bearer(ACME)).json()["id"]
    told = {"model": "petiole-tiny", "input": "x", "max_output_tokens": 2, "conversation": talk, **more}
    key = uuid.uuid4().hex
    ids = {http.post("/v1/responses", json=told, headers=once(key)).json()["id"] for _ in range(3)}
    [name] = ids
    path = f"/v1/responses/{name}"
    eventually(
        lambda: http.get(path, headers=bearer(ACME)).json()["status"] in ("completed", "incomplete"),
        "it has ended",
    )
    items = http.get(f"/v1/conversations/{talk}/items", headers=bearer(ACME)).json()["data"]
    assert [item["role"] for item in items] == ["assistant", "user"]


def begun(http: httpx2.Client, headers: dict[str, str], asked: dict[str, Any]) -> tuple[Any, str]:
    """A stream that has begun, and its id."""
    stream = http.stream("POST", "/v1/chat/completions", json=asked, headers=headers)
    answer = stream.__enter__()
    assert answer.status_code == 200, answer.read()
    lines = answer.iter_lines()
    first = next(line for line in lines if line.startswith("data: "))
    stream.unread = lines  # who forgets it closes the connection
    return stream, json.loads(first.removeprefix("data: "))["id"]


def leave(stream: Any, name: str, site: Site) -> None:
    """The client goes away, and the gateway has noticed."""
    stream.__exit__(None, None, None)
    marks = "petiole:gateway:acme/same:*"
    eventually(
        lambda: any(site.redis.hget(key, name) == b"gone" for key in site.redis.scan_iter(marks)), "it is noted"
    )


def test_an_sdks_retry_joins_what_its_client_has_left(idle: httpx2.Client, site: Site) -> None:
    asked = {**STREAM, "seed": 11}
    streams = [begun(idle, tried(0), asked) for _ in range(3)]
    assert len({name for _, name in streams}) == 3, "equal samples are tasks of their own"
    lost, name = streams[1]
    leave(lost, name, site)
    again, joined = begun(idle, tried(1), asked)
    assert joined == name
    another, new = begun(idle, tried(1), asked)
    assert new not in {name for _, name in streams}, "it was taken"
    for stream in (again, another, streams[0][0], streams[2][0]):
        stream.__exit__(None, None, None)


def test_a_retry_that_could_be_of_two_requests_is_a_new_one(idle: httpx2.Client, site: Site) -> None:
    asked = {**STREAM, "seed": 12}
    streams = [begun(idle, tried(0), asked) for _ in range(2)]
    for stream, name in streams:
        leave(stream, name, site)
    stream, new = begun(idle, tried(1), asked)
    assert new not in {name for _, name in streams}
    stream.__exit__(None, None, None)


def test_a_retry_joins_no_other_body_no_other_key_and_nothing_that_has_ended(
    idle: httpx2.Client, site: Site
) -> None:
    asked = {**STREAM, "seed": 13}
    stream, name = begun(idle, tried(0), asked)
    leave(stream, name, site)
    theirs = {**bearer(INITECH), "x-stainless-retry-count": "1"}
    others = [begun(idle, tried(1), {**asked, "seed": 14}), begun(idle, theirs, asked)]
    assert name not in {one for _, one in others}
    site.redis.hset(stream_keys(name).asked, "cancel", "1")
    others.append(begun(idle, tried(1), asked))
    assert others[-1][1] != name
    for one, _ in others:
        one.__exit__(None, None, None)


# ---------------------------------------------------------------- whose first request is no more


def test_what_was_deleted_or_is_not_kept_is_made_anew(http: httpx2.Client) -> None:
    key = uuid.uuid4().hex
    first = http.post("/v1/responses", json=RESPONSE, headers=once(key)).json()["id"]
    assert http.delete(f"/v1/responses/{first}", headers=bearer(ACME)).status_code == 200
    assert http.post("/v1/responses", json=RESPONSE, headers=once(key)).json()["id"] != first
    key, told = uuid.uuid4().hex, {"model": "petiole-tiny", "input": "x"}
    answers = [http.post("/v1/responses/compact", json=told, headers=once(key)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]


def test_what_was_cancelled_because_its_client_left_is_made_anew(idle: httpx2.Client, site: Site) -> None:
    key = uuid.uuid4().hex
    stream, name = begun(idle, once(key), STREAM)
    again, joined = begun(idle, once(key), STREAM)
    assert joined == name
    site.redis.hset(stream_keys(name).asked, "cancel", "1")
    for one in (stream, again):
        one.__exit__(None, None, None)
    another, new = begun(idle, once(key), STREAM)
    assert new != name
    another.__exit__(None, None, None)


@pytest.fixture
def made(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClientRequest]:
    """A request with a key, in this process."""
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
    settings.cache_clear()
    yield ClientRequest("/v1/responses", uuid.uuid4().hex, digest="x")
    settings.cache_clear()


def claimed(site: Site) -> set[bytes]:
    return set(site.redis.scan_iter("petiole:gateway:here/once:*"))


def test_a_key_is_its_requests_for_as_long_as_its_record_is_kept(made: ClientRequest, site: Site) -> None:
    """A gateway that is killed before it has written the record keeps a key for a moment only."""
    record = RequestRecord(
        id="chatcmpl-kept", kind="chat", created=1, model="petiole-tiny", tasks=["chatcmpl-kept"]
    )

    async def kept() -> None:
        with as_caller(Caller("here"), made):
            assert await idempotency.earlier(record.id, record.kind) is None
            [key] = claimed(site)
            assert 0 < site.redis.ttl(key) <= idempotency.SUBMITTED_WITHIN_S
            await connections.aperform([records.written(record, 1000), *idempotency.keeping(record, 1000)])
            assert idempotency.SUBMITTED_WITHIN_S < site.redis.ttl(key) <= 1000
            found = await idempotency.earlier("chatcmpl-later", record.kind)
            assert found is not None
            assert found.id == record.id
            await idempotency.forget("chatcmpl-later")
            assert claimed(site) == {key}, "it is not this one's"
            await idempotency.forget(record.id)
            await records.forget(record.id)

    asyncio.run(kept())
    assert not claimed(site)


@pytest.mark.parametrize("of", ["a response", "others"])
def test_a_client_that_leaves_while_its_key_is_claimed_leaves_no_claim(
    made: ClientRequest, site: Site, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Redis has taken the claim, and nobody has read its reply."""
    of_key = idempotency._of_key

    async def cut(*given: Any) -> None:
        assert await of_key(*given) is None
        assert claimed(site)
        raise asyncio.CancelledError

    async def ended() -> None:
        record = RequestRecord(
            id="chatcmpl-cut", kind="chat", created=1, model="petiole-tiny", tasks=["chatcmpl-cut"]
        )
        begun = submitting.once(CreateResponse(**RESPONSE)) if of == "a response" else begin(Plan(record, []))
        with as_caller(Caller("here"), made), pytest.raises(asyncio.CancelledError):
            await begun

    monkeypatch.setattr(idempotency, "_of_key", cut)
    asyncio.run(ended())
    assert not claimed(site)


@pytest.mark.parametrize("fault", [asyncio.CancelledError, Failure(400, "x"), ValueError])
def test_a_request_that_ends_before_its_submission_has_no_key(
    made: ClientRequest, site: Site, monkeypatch: pytest.MonkeyPatch, fault: BaseException | type[BaseException]
) -> None:
    async def told(_: object) -> None:
        assert claimed(site)
        raise fault

    async def ended() -> None:
        with as_caller(Caller("here"), made), pytest.raises(BaseException) as raised:
            await submitting.once(CreateResponse(**RESPONSE))
        assert raised.value is fault or raised.type is fault

    monkeypatch.setattr(submitting, "told", told)
    asyncio.run(ended())
    assert not claimed(site)

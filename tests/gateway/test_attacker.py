"""An attacker with a tenant's key asks every route of the gateway for what another tenant has.

The routes are the application's own. A route with a name in its path is asked for each thing of the victim's. A
route without one stands in `ASKED` or in `OPEN`, so a new one fails here until it says what an attacker gets.
Batches that have run are `batches/test_jobs.py`'s, and notices of webhooks `serving/test_webhooks.py`'s."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from starlette.routing import Mount, Route, WebSocketRoute
from websockets.sync.client import connect

from petiole.gateway.http import application
from petiole.gateway.http.authentication import is_open
from petiole.gateway.openai.responses.conversation_store import LISTED
from petiole.gateway.serving.auth.api_keys import digest_of
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

pytest.importorskip("python_multipart", reason="an environment from before files could be uploaded")

VICTIM, ATTACKER, NARROW = "ptl-victim", "ptl-attacker", "ptl-narrow"
DOCUMENT = {
    "tenants": {
        "acme": {"salt": "of-acme"},
        "globex": {"salt": "of-globex"},
        "narrow": {"salt": "of-narrow", "models": ["other-*"]},
    },
    "keys": {
        digest_of(VICTIM): {"tenant": "acme"},
        digest_of(ATTACKER): {"tenant": "globex"},
        digest_of(NARROW): {"tenant": "narrow"},
    },
}
SECRET = "zanzibar7351"
MODEL = "petiole-tiny"
SAID = [{"role": "user", "content": f"Spell the word {SECRET}."}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": SAID, "max_tokens": 4}
TOLD: dict[str, Any] = {"model": MODEL, "input": f"Spell the word {SECRET}.", "max_output_tokens": 4}


class Way(NamedTuple):
    """A route of the application: `method` is WEBSOCKET for one that is spoken over."""

    method: str
    path: str


def routes() -> list[Way]:
    found = list[Way]()

    def walk(before: str, of: Any) -> None:
        for route in of:
            match route:
                case Mount():
                    walk(before + route.path, route.routes)
                case WebSocketRoute():
                    found.append(Way("WEBSOCKET", before + route.path))
                case Route():
                    methods = (route.methods or {"GET"}) - {"HEAD"}
                    found.extend(Way(method, before + route.path) for method in sorted(methods))
                case _:
                    raise AssertionError(f"{route} is of a kind that this test does not know")

    walk("", application.make().routes)
    return sorted(set(found))


ROUTES = routes()
NEEDED = {
    "/v1/admin/": "admin",
    **{f"{at}/{do}load_lora_adapter": "adapters" for at in ("", "/v1") for do in ("", "un")},
}
"""By the beginning of a path, the right that its routes need."""
RIGHTS = {one: right for one in ROUTES for begin, right in NEEDED.items() if one.path.startswith(begin)}
NAMED = [one for one in ROUTES if "{" in one.path and not is_open(one.path) and one not in RIGHTS]
OPEN = [one for one in ROUTES if is_open(one.path)]
REST = [one for one in ROUTES if one not in NAMED and one not in OPEN and one not in RIGHTS]


@dataclass
class Victim:
    """What the victim has, by what it is."""

    ids: Mapping[str, str]
    handle: str

    @property
    def names(self) -> list[str]:
        return [*self.ids.values(), self.handle]

    @property
    def ways_to_them(self) -> list[str]:
        """As paths of the victim's: no name leads out of the attacker's own."""
        return [before + name for name in self.ids.values() for before in ("acme%2F", "..%2Facme%2F")]


@pytest.fixture(scope="module")
def served(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder: Path = tmp_path_factory.mktemp("attacked")
    told = {"PETIOLE_BROKER_URL": site.url, "PETIOLE_GATEWAY_FILES": folder / "files"}
    (folder / "files").mkdir()
    with Gateway(folder, **told, PETIOLE_GATEWAY_KEYS=json.dumps(DOCUMENT)) as gateway:
        yield gateway


def client(of: Gateway, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=of.root, timeout=60, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def theirs(served: Gateway) -> Iterator[httpx2.Client]:
    """The victim's own client."""
    with client(served, VICTIM) as http:
        yield http


@pytest.fixture(scope="module")
def http(served: Gateway) -> Iterator[httpx2.Client]:
    """The attacker's."""
    with client(served, ATTACKER) as http:
        yield http


@pytest.fixture(scope="module")
def victim(theirs: httpx2.Client) -> Victim:
    def made(path: str, **body: Any) -> dict[str, Any]:
        answer = theirs.post(path, **body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    asked = {"custom_id": SECRET, "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
    sent = {"file": (f"{SECRET}.jsonl", json.dumps(asked) + "\n")}
    file = made("/v1/files", files=sent, data={"purpose": "batch"})["id"]
    talk = made("/v1/conversations", json={"items": SAID, "metadata": {LISTED: "true"}})["id"]
    response = made("/v1/responses", json=TOLD)
    ids = {
        "chat": made("/v1/chat/completions", json=CHAT)["id"],
        "completion": made("/v1/completions", json={"model": MODEL, "prompt": SECRET, "max_tokens": 2})["id"],
        "message": made("/v1/messages", json=CHAT)["id"],
        "response": response["id"],
        "output": response["output"][0]["id"],
        "conversation": talk,
        "item": theirs.get(f"/v1/conversations/{talk}/items").json()["data"][0]["id"],
        "file": file,
    }
    return Victim(ids, hashlib.sha256(ids["response"].encode()).hexdigest()[:16])


def body_for(method: str, path: str) -> dict[str, Any]:
    """A body that the route would take from the victim."""
    if method != "POST":
        return {}
    if path == "/v1/conversations/{id}":
        return {"json": {"metadata": {"taken": "over"}}}
    return {"json": {"items": [{"role": "user", "content": "x"}]} if path.endswith("/items") else {}}


def tells_nothing(answer: httpx2.Response, victim: Victim, asked: str = "") -> None:
    """`asked`: the ids that the attacker has said itself."""
    known = [SECRET, victim.handle, "acme", *victim.ids.values()]
    told = [word for word in known if word in answer.text and word not in asked]
    assert not told, (answer.request.url, answer.text[:500])


# ---------------------------------------------------------------- routes with a name in their path


@pytest.mark.parametrize("route", NAMED, ids=" ".join)
def test_a_thing_of_another_tenant_is_unknown(http: httpx2.Client, victim: Victim, route: Way) -> None:
    method, path = route
    streamed = [("?stream=true", {"last-event-id": "0"}), ("?stream=true&starting_after=0", {})]
    tried: list[tuple[str, str, dict[str, str]]] = [
        (name, "", {}) for name in [*victim.names, *victim.ways_to_them]
    ]
    if method == "GET":
        tried += [(name, *more) for name in victim.names for more in streamed]
    for name, query, headers in tried:
        at = path.replace("{id:path}", name).replace("{id}", name).replace("{handle}", name)
        at = at.replace("{item}", victim.ids["item"]) + query
        answer = http.request(method, at, headers=headers, **body_for(method, path))
        assert answer.status_code == 404, (method, at, answer.text)
        tells_nothing(answer, victim, at)


def test_nothing_of_the_victims_is_changed_by_it(theirs: httpx2.Client, victim: Victim) -> None:
    """After the test before: all is there, as it was."""
    for name, path in (
        ("chat", "/v1/chat/completions/{}"),
        ("completion", "/v1/completions/{}"),
        ("message", "/v1/messages/{}"),
        ("response", "/v1/responses/{}"),
        ("conversation", "/v1/conversations/{}"),
        ("file", "/v1/files/{}/content"),
    ):
        assert theirs.get(path.format(victim.ids[name])).status_code == 200, name
    talk = f"/v1/conversations/{victim.ids['conversation']}"
    assert theirs.get(talk).json()["metadata"] == {LISTED: "true"}
    assert [one["id"] for one in theirs.get(f"{talk}/items").json()["data"]] == [victim.ids["item"]]
    assert theirs.get(f"/v1/responses/{victim.ids['response']}").json()["status"] in ("completed", "incomplete")


# ---------------------------------------------------------------- routes without one


def references(victim: Victim) -> list[dict[str, Any]]:
    """The ways in which a request names an earlier one's things."""
    of = victim.ids
    return [
        {"previous_response_id": of["response"]},
        {"previous_response_id": f"acme/{of['response']}"},
        {"conversation": of["conversation"]},
        {"conversation": {"id": f"../acme/{of['conversation']}"}},
        *({"input": [{"type": "item_reference", "id": of[name]}]} for name in ("item", "output")),
    ]


ASKED: Mapping[str, Any] = {
    "GET /v1/models": None,
    "GET /v1/usage": None,
    "GET /v1/fleet": None,
    "GET /v1/files": None,
    "GET /v1/batches": None,
    "GET /v1/conversations": None,
    "POST /v1/chat/completions": CHAT,
    "POST /v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 2},
    "POST /v1/messages": CHAT,
    "POST /v1/messages/count_tokens": {"model": MODEL, "messages": SAID},
    "POST /v1/responses": TOLD,
    "POST /v1/responses/input_tokens": {"model": MODEL, "input": "x"},
    "POST /v1/responses/compact": {"model": MODEL, "input": "x"},
    "POST /v1/conversations": {"items": []},
    "GET /tokenizer_info": None,
    "GET /v1/tokenizer_info": None,
    "POST /invocations": CHAT,
    "POST /v1/files": None,
    "POST /v1/batches": {"endpoint": "/v1/chat/completions", "completion_window": "24h"},
    "WEBSOCKET /v1/responses": {"type": "response.create", **TOLD},
    **{
        f"POST {before}/{name}": {"model": MODEL, **more}
        for before in ("", "/v1")
        for name, more in {
            "tokenize": {"prompt": "x"},
            "detokenize": {"tokens": [1]},
            "rerank": {"query": "x", "documents": ["y"]},
            "score": {"text_1": "x", "text_2": ["y"]},
            "classify": {"input": "x"},
        }.items()
    },
    "POST /v2/rerank": {"model": MODEL, "query": "x", "documents": ["y"]},
    "POST /v1/embeddings": {"model": MODEL, "input": "x"},
    "GET /version": None,
    "GET /v1/key": None,
}
"""By route, a request that it takes; None: it takes no JSON."""

OF_MODELS = [name for name, body in ASKED.items() if body and "model" in body and not name.startswith("WEBSOCKET")]
REFERRING = ("POST /v1/responses", "POST /v1/responses/compact", "POST /v1/responses/input_tokens")


def test_every_route_is_asked() -> None:
    assert {" ".join(one) for one in REST} == set(ASKED), "say what an attacker gets of it"
    assert {one.path for one in OPEN} == {"/", "/health", "/ping", "/ready", "/metrics", "/page/{name}"}


@pytest.mark.parametrize("route", ROUTES, ids=" ".join)
def test_nobody_without_a_key_gets_more_than_the_page(served: Gateway, victim: Victim, route: Way) -> None:
    method, path = route
    if method == "WEBSOCKET":
        return  # a key is asked for before the handshake: `test_a_revoked_key_ends_its_websocket`
    at = path.replace("{id:path}", MODEL).replace("{name}", "page.js")
    answer = httpx2.request(method, served.root + at, timeout=60)
    if route in OPEN:
        assert answer.status_code == 200
        tells_nothing(answer, victim)
    else:
        assert (answer.status_code, victim.handle in answer.text) == (401, False)


@pytest.mark.parametrize("route", RIGHTS, ids=" ".join)
def test_whoever_lacks_the_right_neither_sees_nor_changes_a_key_or_an_adapter(
    http: httpx2.Client, route: Way
) -> None:
    (method, path), right = route, RIGHTS[route]
    bodies = {
        "admin": {"tenant": "globex", "rights": ["admin"]},
        "adapters": {"lora_name": "acme-adapter", "lora_path": "/etc"},
    }
    for name in ("acme", digest_of(VICTIM)[:12], digest_of(ATTACKER)[:12]):
        asked = {"json": bodies[right]} if method == "POST" else {}
        answer = http.request(method, path.replace("{id}", name), **asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_right")
        assert f"the right {right}:" in answer.json()["error"]["message"]
        assert digest_of(VICTIM)[:12] not in answer.text


@pytest.mark.parametrize("name", [name for name, body in ASKED.items() if body is None and name.startswith("GET")])
def test_a_list_has_nothing_of_another_tenant(http: httpx2.Client, victim: Victim, name: str) -> None:
    path = name.partition(" ")[2]
    for query in ("", f"?after={victim.ids['file']}", "?days=7"):
        tells_nothing(http.get(path + query), victim, query)


@pytest.mark.parametrize("name", REFERRING)
def test_no_request_takes_up_what_another_tenant_has_said(http: httpx2.Client, victim: Victim, name: str) -> None:
    path, asked = name.partition(" ")[2], ASKED[name]
    for more in references(victim):
        answer = http.post(path, json={**asked, "input": "x", **more})
        assert answer.status_code in (400, 404), (more, answer.text)
        tells_nothing(answer, victim, json.dumps(more))
    items = {"items": [{"type": "item_reference", "id": victim.ids["item"]}]}
    assert http.post("/v1/conversations", json=items).status_code in (400, 404)


def test_no_batch_is_made_of_another_tenants_file(http: httpx2.Client, victim: Victim) -> None:
    name = victim.ids["file"]
    for file in (name, f"acme/{name}", f"../acme/{name}"):
        answer = http.post("/v1/batches", json={**ASKED["POST /v1/batches"], "input_file_id": file})
        assert answer.status_code in (400, 404), answer.text
        tells_nothing(answer, victim, file)


def test_no_websocket_continues_another_tenants_response(served: Gateway, victim: Victim) -> None:
    url = f"{served.url.replace('http', 'ws', 1)}/responses"
    with connect(url, additional_headers={"authorization": f"Bearer {ATTACKER}"}) as socket:
        for more in references(victim):
            asked = {"type": "response.create", **TOLD, "input": "x", **more}
            socket.send(json.dumps(asked))
            answer = json.loads(socket.recv(60))
            assert answer["type"] == "error", (more, answer)
            assert SECRET not in str(answer)


@pytest.mark.parametrize("name", OF_MODELS)
def test_a_model_that_is_not_allowed_is_unknown(served: Gateway, name: str) -> None:
    with client(served, NARROW) as narrow:
        refused = narrow.post(name.partition(" ")[2], json=ASKED[name])
        assert refused.status_code == 404, refused.text
        assert MODEL not in refused.text.partition("got")[0]
        assert narrow.get("/v1/models").json()["data"] == []
        fleet = narrow.get("/v1/fleet").json()
        assert not [*fleet["workers"], *fleet["models"], *fleet["generations"]]


# ---------------------------------------------------------------- what passes between two requests


def test_the_cache_has_nothing_of_another_tenants_prompts(http: httpx2.Client, theirs: httpx2.Client) -> None:
    """Who could see that a prompt is cached could guess it, word by word. The client's own salt makes no other."""
    asked = {"model": MODEL, "prompt": f"{uuid.uuid4().hex} " * 20, "max_tokens": 1}

    def cached(of: httpx2.Client, **more: Any) -> int:
        answer = of.post("/v1/completions", json={**asked, **more})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(theirs) == 0
    assert cached(theirs) > 0
    assert (cached(http), cached(http, cache_salt="of-acme")) == (0, 0)
    assert cached(http) > 0, "it has a cache of its own"
    assert cached(theirs, cache_salt="apart") == 0


def test_an_idempotency_key_of_another_tenants_is_the_attackers_own(
    http: httpx2.Client, theirs: httpx2.Client
) -> None:
    headers = {"idempotency-key": uuid.uuid4().hex}
    ids = [one.post("/v1/responses", json=TOLD, headers=headers).json()["id"] for one in (theirs, http)]
    assert len(set(ids)) == 2


def test_a_running_generation_is_cancelled_by_its_own_tenant_alone(
    http: httpx2.Client, theirs: httpx2.Client
) -> None:
    asked = {**TOLD, "background": True, "max_output_tokens": 200}
    name = theirs.post("/v1/responses", json=asked).json()["id"]
    handle = hashlib.sha256(name.encode()).hexdigest()[:16]
    for path in (f"/v1/fleet/generations/{handle}/cancel", f"/v1/responses/{name}/cancel"):
        assert http.post(path).status_code == 404, path
    path = f"/v1/responses/{name}"
    eventually(lambda: theirs.get(path).json()["status"] not in ("queued", "in_progress"), "it has ended")
    assert theirs.get(path).json()["status"] in ("completed", "incomplete")

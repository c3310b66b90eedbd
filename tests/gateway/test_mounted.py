"""The gateway as a part of an application: mounted, without a lifespan of its own; and as a Redis user with the
fewest rights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from petiole.gateway import app as gateway
from petiole.gateway.core.webhook_events import Webhook, new_secret
from petiole.gateway.serving.auth.api_keys import WEBHOOKS
from petiole.tasks.settings import settings
from tests.support.gateway import Gateway
from tests.support.receiver import Receiver
from tests.support.rights import SECRET, documented, version_of
from tests.support.site import Site, eventually

CHAT: dict[str, Any] = {
    "model": "petiole-tiny",
    "messages": [{"role": "user", "content": "Count from 1 to 5."}],
    "temperature": 0,
}


def under_fastapi() -> Any:
    app = FastAPI()
    app.mount("/llm", gateway)
    return app


def under_starlette() -> Any:
    return Starlette(routes=[Mount("/llm", gateway)])


def beside_django() -> Any:
    """As its asgi.py would have it."""
    conf = pytest.importorskip("django.conf")
    from django.core.asgi import get_asgi_application

    before = conf.settings._wrapped
    conf.settings._wrapped = conf.UserSettingsHolder(conf.global_settings)
    try:
        return Starlette(routes=[Mount("/llm", gateway), Mount("/", get_asgi_application())])
    finally:
        conf.settings._wrapped = before


@pytest.mark.parametrize("application", [under_fastapi, under_starlette, beside_django])
def test_it_is_mounted_in_an_application(
    site: Site, monkeypatch: pytest.MonkeyPatch, application: Callable[[], Any]
) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
    settings.cache_clear()
    with TestClient(application()) as client:
        assert client.get("/llm/ready").json() == {"status": "ok"}
        assert [model["id"] for model in client.get("/llm/v1/models").json()["data"]] == ["petiole-tiny"]
        missing = client.post("/llm/v1/chat/completions", json={**CHAT, "model": "none"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    settings.cache_clear()


def test_it_needs_the_rights_of_a_producer_and_its_records(own_site: Site, tmp_path: Path) -> None:
    """Another gateway, which may call no private address, would take the notice of a webhook."""
    site = own_site
    version = version_of(site.redis)
    page = (Path(__file__).resolve().parents[2] / "docs" / "gateway.md").read_text()
    [found] = re.findall(r"`\((\+set [^`]*~petiole:gateway:\*\) [^`]*)\)`", page)
    more = found.split(") (")
    rules = documented(version)["webapp"]
    rules += [f"({rule})" for rule in more] if version >= (7,) else " ".join(more).split()
    site.redis.execute_command("ACL", "SETUSER", "gateway", *rules)
    url = site.url.replace("redis+socket://", f"redis+socket://gateway:{SECRET}@")
    networks = {"PETIOLE_GATEWAY_WEBHOOK_NETWORKS": "127.0.0.0/8"}
    with (
        Receiver() as receiver,
        Gateway(tmp_path, PETIOLE_BROKER_URL=url, **networks) as gateway,
        httpx2.Client(base_url=gateway.root) as http,
    ):
        assert http.get("/ready").status_code == 200
        whole = http.post("/v1/chat/completions", json=CHAT, timeout=60)
        assert whole.status_code == 200, whole.text + gateway.output
        path = f"/v1/chat/completions/{whole.json()['id']}"
        assert "[DONE]" in http.get(path, params={"stream": "true"}, timeout=60).text
        assert http.delete(path).status_code == 200
        asked = {"model": "petiole-tiny", "prompt": "x"}
        told = {"model": "petiole-tiny", "input": "x", "max_output_tokens": 2}
        talk = http.post("/v1/conversations", json={"items": [{"role": "user", "content": "x"}]}).json()["id"]
        one = http.post("/v1/responses", json={**told, "conversation": talk}, timeout=60)
        assert one.status_code == 200, one.text + gateway.output
        more_of_it = {**told, "previous_response_id": one.json()["id"]}
        assert http.post("/v1/responses", json=more_of_it, timeout=60).status_code == 200
        assert http.delete(f"/v1/responses/{one.json()['id']}").status_code == 200
        assert http.delete(f"/v1/conversations/{talk}").status_code == 200
        assert http.get("/v1/usage").json()["data"], gateway.output
        assert http.post("/tokenize", json=asked, timeout=60).json()["count"] == 1
        site.redis.hset(WEBHOOKS, "", msgspec.json.encode(Webhook(receiver.url, [new_secret()])))
        try:
            receiver.answers.put(500)
            begun = http.post("/v1/responses", json={**told, "background": True}, timeout=60)
            assert begun.status_code == 200, begun.text + gateway.output
            eventually(lambda: len(receiver.got) == 2, "it is told, and told again")
            eventually(lambda: not site.redis.zcard("petiole:gateway:/notices/"), "it was taken")
        finally:
            site.redis.hdel(WEBHOOKS, "")
        assert "cannot be told" not in gateway.output

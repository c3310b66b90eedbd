"""How background responses end is told to their tenant's server, whichever gateway dies meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from petiole.gateway.core.webhook_events import new_secret
from petiole.gateway.serving.auth.api_keys import digest_of
from petiole.tasks.fleet import models
from petiole.tasks.wire.keys import watched_key
from tests.support.gateway import Gateway
from tests.support.receiver import Receiver
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

SECRET, KEY, OTHER = new_secret(), "ptl-" + "a" * 43, "ptl-" + "b" * 43
ASKED: dict[str, Any] = {"model": "petiole-tiny", "input": "hello", "background": True, "max_output_tokens": 5}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


def start(site: Site, folder: Path, receiver: Receiver) -> Gateway:
    told = {
        "tenants": {"acme": {"salt": "x"}, "other": {"salt": "y"}},
        "keys": {digest_of(KEY): {"tenant": "acme"}, digest_of(OTHER): {"tenant": "other"}},
        "webhooks": {"acme": {"url": receiver.url, "secrets": [SECRET]}},
    }
    return Gateway(
        folder,
        PETIOLE_BROKER_URL=site.url,
        PETIOLE_GATEWAY_KEYS=json.dumps(told),
        PETIOLE_GATEWAY_WEBHOOK_NETWORKS="127.0.0.0/8",
    )


def client_of(gateway: Gateway, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url, api_key=key, max_retries=0)


def test_background_responses_are_told(tmp_path: Path, receiver: Receiver) -> None:
    def told(number: int) -> tuple[str, str]:
        eventually(lambda: len(receiver.got) >= number, "it is told")
        event = receiver.got[number - 1].event(SECRET)
        return event.data.id, event.type

    with Site(tmp_path, PETIOLE_FAKE_STEP_MS=5, PETIOLE_STREAM_TTL_S=1) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        with start(site, tmp_path, receiver) as first:
            client = client_of(first)
            client.responses.create(**{**ASKED, "background": False})
            client_of(first, OTHER).responses.create(**ASKED)
            ended = client.responses.create(**ASKED)
            assert told(1) == (ended.id, "response.incomplete"), "nobody else wants to know"
            eventually(lambda: not site.redis.zcard(watched_key()), "nothing is watched")
            assert client.responses.retrieve(ended.id).output_text, "it no longer needs its log"

            site.app.control.broadcast("pause_engine", reply=True, timeout=30, limit=1)
            waiting, unwanted = (client.responses.create(**ASKED) for _ in range(2))
            assert client.responses.cancel(unwanted.id).status == "cancelled"
            assert told(2) == (unwanted.id, "response.cancelled"), "no worker has seen it"
            first.kill()
        with start(site, tmp_path, receiver) as second:
            assert second.url
            site.app.control.broadcast("resume_engine", reply=True, timeout=30, limit=1)
            assert told(3) == (waiting.id, "response.incomplete"), "by a gateway that was asked for nothing"
            eventually(lambda: 'notices_total{outcome="delivered"} 1.0' in metrics(second), "it is counted")


def metrics(gateway: Gateway) -> str:
    return httpx2.get(f"{gateway.root}/metrics").text

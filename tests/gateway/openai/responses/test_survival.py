"""What dies while a response is made, and what an unmodified client sees of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from petiole.tasks.fleet import models
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

ASKED: dict[str, Any] = {
    "model": "petiole-tiny",
    "input": "hello",
    "max_output_tokens": 60,
    "extra_body": {"seed": 1},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with Site(folder, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, PETIOLE_FAKE_STEP_MS=20) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        yield site


def start(site: Site, folder: Path) -> Gateway:
    brief = {"PETIOLE_GATEWAY_UNREAD_S": 3, "PETIOLE_GATEWAY_WAIT_FOR_WORKER_S": 1}
    return Gateway(folder, PETIOLE_BROKER_URL=site.url, PETIOLE_GATEWAY_PREPARED_S="0.1", **brief)


def client_of(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0)


def test_a_stream_goes_on_when_its_worker_and_its_gateway_have_died(site: Site, tmp_path: Path) -> None:
    with start(site, tmp_path) as first, start(site, tmp_path) as second:
        undisturbed = client_of(second).responses.create(**ASKED)
        begun = client_of(first).responses.create(**ASKED, background=True, stream=True)
        seen: list[Any] = [next(begun) for _ in range(10)]
        site.workers[-1].kill()
        site.worker()
        first.kill()
        with contextlib.suppress(openai.APIError, httpx2.HTTPError):
            seen += begun
        name, number = seen[0].response.id, seen[-1].sequence_number
        rest = list(client_of(second).responses.retrieve(name, stream=True, starting_after=number))
        joined = [*seen, *rest]
        numbers = [event.sequence_number for event in joined]
        assert numbers == sorted({*numbers})
        text = "".join(event.delta for event in joined if event.type == "response.output_text.delta")
        assert text == undisturbed.output_text
        structural = sum(event.type != "response.output_text.delta" for event in joined)
        assert len(text) + structural == numbers[-1] + 1
        assert joined[-1].response.output_text == text


@pytest.mark.slow
def test_a_background_response_waits_for_a_worker(site: Site, tmp_path: Path) -> None:
    """The last test of this module: it stops the worker."""
    site.workers[-1].stop()
    eventually(lambda: not any(model.live for model in models.models(site.redis)), "it counts as gone")
    with start(site, tmp_path) as gateway:
        client = client_of(gateway)
        waiting, unwanted = (client.responses.create(**ASKED, background=True) for _ in range(2))
        assert client.responses.retrieve(waiting.id).status == "queued"
        assert client.responses.cancel(unwanted.id).status == "cancelled"
        with pytest.raises(openai.InternalServerError) as refused:
            client.responses.create(**ASKED)
        assert refused.value.code == "no_worker"
        events = client.responses.retrieve(waiting.id, stream=True)  # longer than others wait for a worker
        assert [next(events).type, next(events).type] == ["response.created", "response.queued"]
        eventually(lambda: b": alive" in alive(gateway, waiting.id), "silence")
        assert client.responses.retrieve(waiting.id).status == "queued"
        site.worker()
        kinds = [event.type for event in events]
        assert (kinds[0], kinds[-1]) == ("response.in_progress", "response.incomplete")
        assert client.responses.retrieve(unwanted.id).status == "cancelled"


def alive(gateway: Gateway, name: str) -> bytes:
    """What a stream has sent until its first comment."""
    sent = b""
    with httpx2.stream("GET", f"{gateway.url}/responses/{name}", params={"stream": "true"}, timeout=60) as answer:
        for part in answer.iter_bytes():
            sent += part
            if b": alive" in sent:
                break
    return sent

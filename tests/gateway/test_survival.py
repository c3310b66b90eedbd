"""What dies, and what a client sees of it: workers, gateways, Redis, and clients themselves."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from petiole.tasks.fleet import models
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

ASKED: dict[str, Any] = {
    "model": "petiole-tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 60,
    "seed": 1,
    "stream": True,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with Site(folder, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, PETIOLE_FAKE_STEP_MS=20) as site:
        site.worker()
        eventually(lambda: models.models(site.redis), "the worker has said what it serves")
        yield site


@pytest.fixture(scope="module")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with start(site, tmp_path_factory.mktemp("serve")) as gateway:
        yield gateway


def start(site: Site, folder: Path, **environment: Any) -> Gateway:
    settings = {"PETIOLE_GATEWAY_UNREAD_S": 3, "PETIOLE_GATEWAY_WAIT_FOR_WORKER_S": 2, **environment}
    return Gateway(folder, PETIOLE_BROKER_URL=site.url, **settings)


class Reader:
    """A client's reading of a stream, event by event."""

    def __init__(self, answer: httpx2.Response) -> None:
        assert answer.status_code == 200, answer.read()
        self.lines = answer.iter_lines()
        self.id = self.cursor = self.text = ""
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None

    def read(self, events: int = 10**6) -> Reader:
        """This many events more, or all."""
        while events and (line := next(self.lines, None)) is not None:
            name, _, value = line.partition(": ")
            if name == "id":
                self.cursor = value
            if name != "data" or value == "[DONE]":
                continue
            events -= 1
            chunk = json.loads(value)
            self.error = chunk.get("error", self.error)
            for choice in chunk.get("choices", ()):
                self.id = chunk["id"]
                self.text += choice["delta"].get("content", "")
                self.finish_reason = choice["finish_reason"]
        return self


def expected() -> str:
    from petiole.gpu_worker.request import Request, SamplingParams
    from tests.support.fake_engine import token, word

    request = Request(messages=ASKED["messages"], sampling=SamplingParams(seed=1))
    return "".join(word(token(request, index)) for index in range(ASKED["max_tokens"]))


def rest(gateway: Gateway, reader: Reader) -> str:
    """Come back for what the reader lacks. Returns the whole text."""
    path = f"{gateway.url}/chat/completions/{reader.id}"
    given = {"stream": "true", "starting_after": reader.cursor}
    with httpx2.stream("GET", path, params=given, timeout=60) as answer:
        again = Reader(answer).read()
    assert (again.finish_reason, again.error) == ("length", None)
    return reader.text + again.text


def test_a_stream_goes_on_at_another_gateway_when_its_own_has_died(site: Site, tmp_path: Path) -> None:
    with start(site, tmp_path) as first, start(site, tmp_path) as second:
        with httpx2.stream("POST", f"{first.url}/chat/completions", json=ASKED, timeout=60) as answer:
            reader = Reader(answer).read(5)
            first.kill()
        assert rest(second, reader) == expected()


def test_a_stream_goes_on_while_its_worker_is_killed(site: Site, gateway: Gateway) -> None:
    with httpx2.stream("POST", f"{gateway.url}/chat/completions", json=ASKED, timeout=60) as answer:
        reader = Reader(answer).read(5)
        site.workers[-1].kill()
        site.worker()
        assert (reader.read().text, reader.finish_reason) == (expected(), "length")


def test_a_generation_whose_client_has_gone_is_cancelled(site: Site, gateway: Gateway) -> None:
    body = {**ASKED, "max_tokens": 4000}
    with httpx2.stream("POST", f"{gateway.url}/chat/completions", json=body, timeout=60) as answer:
        left = Reader(answer).read(3)
    with httpx2.stream("POST", f"{gateway.url}/chat/completions", json={**body, "store": True}) as answer:
        stored = Reader(answer).read(3)
    with pytest.raises(httpx2.ReadTimeout):  # a whole answer, whose client gives up
        httpx2.post(f"{gateway.url}/chat/completions", json={**body, "stream": False, "seed": 7}, timeout=1)
    eventually(lambda: "done" in site.state(left.id), "the generation is cancelled")
    assert json.loads(site.state(left.id)["done"])["finish_reason"] == "cancelled"
    eventually(lambda: not site.redis.exists(f"petiole:{{{left.id}}}:interest"), "nobody reads it")
    assert "done" not in site.state(stored.id)
    assert httpx2.delete(f"{gateway.url}/chat/completions/{stored.id}").json()["deleted"]
    eventually(lambda: site.held() == 0, "all have ended")
    whole = httpx2.get(f"{gateway.url}/chat/completions/{left.id}")
    assert (whole.status_code, whole.json()["error"]["code"]) == (499, "cancelled")


def test_a_client_that_comes_back_in_time_finds_its_generation(site: Site, gateway: Gateway) -> None:
    body = {**ASKED, "max_tokens": 300}
    with httpx2.stream("POST", f"{gateway.url}/chat/completions", json=body, timeout=60) as answer:
        reader = Reader(answer).read(3)
    assert rest(gateway, reader).startswith(expected())
    assert len(site.tokens(reader.id)) == 300


def test_a_failover_of_redis_is_a_pause(site: Site, gateway: Gateway) -> None:
    with httpx2.stream("POST", f"{gateway.url}/chat/completions", json=ASKED, timeout=60) as answer:
        reader = Reader(answer).read(5)
        site.server.restart()
        assert (reader.read().text, reader.finish_reason) == (expected(), "length")
    site.server.process.terminate()
    site.server.process.wait()
    away = httpx2.post(f"{gateway.url}/chat/completions", json=ASKED, timeout=60)
    assert (away.status_code, away.json()["error"]["type"]) == (503, "service_unavailable_error")
    assert int(away.headers["retry-after"]) > 0
    site.server.start()
    eventually(lambda: httpx2.get(f"{gateway.root}/ready").status_code == 200, "Redis is back")
    again = httpx2.post(f"{gateway.url}/chat/completions", json={**ASKED, "stream": False}, timeout=60)
    assert again.json()["choices"][0]["message"]["content"] == expected()


def test_a_gateway_that_is_stopped_lets_its_streams_end(site: Site, tmp_path: Path) -> None:
    gateway = start(site, tmp_path)
    assert gateway.url
    with httpx2.stream("POST", f"{gateway.url}/chat/completions", json=ASKED, timeout=60) as answer:
        reader = Reader(answer).read(3)
        gateway.process.send_signal(signal.SIGTERM)
        assert (reader.read().text, reader.finish_reason) == (expected(), "length")
    assert gateway.process.wait(60) == 0


def test_a_models_name_finds_its_queue_and_its_adapters(site: Site, gateway: Gateway) -> None:
    adapter = {"PETIOLE_SERVED_ADAPTERS": "sql=org/sql-lora"}
    site.worker("-Q", "big", PETIOLE_MODEL="/models/big-8b", **adapter)
    with httpx2.Client(base_url=gateway.url, timeout=60) as http:

        def cards() -> dict[str, Any]:
            return {model["id"]: model for model in http.get("/models").json()["data"]}

        known = eventually(lambda: (found := cards()).keys() >= {"big-8b", "sql"} and found, "it is listed")
        assert (known["sql"]["parent"], known["sql"]["root"]) == ("big-8b", "org/sql-lora")
        answer = http.post("/chat/completions", json={**ASKED, "model": "sql", "stream": False, "max_tokens": 3})
        assert (answer.status_code, answer.json()["model"]) == (200, "sql")
        assert json.loads(site.state(answer.json()["id"])["done"])["model"] == "/models/big-8b"

    def loaded() -> list[list[str]]:
        return [model.loaded_adapters for model in models.models(site.redis)]

    eventually(lambda: ["org/sql-lora"] in loaded(), "the adapter was used")
    site.workers[-1].stop()


def test_a_model_without_a_worker_is_waited_for(site: Site, gateway: Gateway, tmp_path: Path) -> None:
    """The last test of this module: it stops the worker."""
    site.workers[-2].stop()
    eventually(lambda: not any(model.live for model in models.models(site.redis)), "it counts as gone")
    told = {**ASKED, "stream": False}
    headers = {"idempotency-key": "nobody"}
    whole = httpx2.post(f"{gateway.url}/chat/completions", json=told, headers=headers, timeout=60)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "no_worker")
    assert not list(site.redis.scan_iter("petiole:gateway:once:*")), "what repeats it is tried anew"
    assert int(whole.headers["retry-after"]) > 0
    with start(site, tmp_path, PETIOLE_GATEWAY_PREPARED_S="0.1") as soon:
        with httpx2.stream("POST", f"{soon.url}/chat/completions", json=ASKED, timeout=60) as answer:
            reader = Reader(answer).read()
        assert reader.error is not None
        assert reader.error["code"] == "no_worker"
        patient = start(site, tmp_path, PETIOLE_GATEWAY_PREPARED_S="0.1", PETIOLE_GATEWAY_WAIT_FOR_WORKER_S=60)
        with patient, httpx2.stream("POST", f"{patient.url}/chat/completions", json=ASKED, timeout=60) as answer:
            reader = Reader(answer).read(1)
            site.worker()
            assert reader.read().text == expected()

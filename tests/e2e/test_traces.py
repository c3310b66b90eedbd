"""One trace of a task: from the web request over its attempts to its reader, in a collector of OpenTelemetry's
protocol."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from petiole.gateway.serving.auth.api_keys import digest_of
from petiole.tasks.wire.keys import TRACEPARENT_HEADER, stream_keys
from petiole.tasks.wire.record.codec import begun_attempts
from tests.support.collector import Collector, Span
from tests.support.fake_engine import expected
from tests.support.gateway import Gateway
from tests.support.site import REPOSITORY, Site, eventually

PROMPT = "a prompt that no span has"
LONG = 2_000
CHILDREN = ["petiole.prepare", "petiole.wait", "petiole.prefill", "petiole.decode"]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0) as site:
        yield site


class WebApp:
    """`traced_app` on this site."""

    def __init__(self, site: Site, collector: Collector, tokens: int, *words: str) -> None:
        environment = {**os.environ, **site.environment, **collector.environment, "OTEL_SERVICE_NAME": "shop"}
        command = [sys.executable, "-m", "tests.support.traced_app", PROMPT, str(tokens), *words]
        self.process = subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.task_id = self.process.stdout.readline().strip()

    def read(self) -> list[int]:
        assert self.process.stdout is not None
        tokens: list[int] = json.loads(self.process.stdout.readline())
        assert self.process.wait(60) == 0
        return tokens


def test_a_killed_worker_is_in_the_trace_between_the_attempts(site: Site, collector: Collector) -> None:
    for worker in [site.start_worker(**collector.environment) for _ in range(2)]:
        worker.ready()
    app = WebApp(site, collector, LONG)
    site.streaming(app.task_id, 50)
    killed = site.holder()
    killed.kill()
    assert app.read() == expected(PROMPT, 3, LONG)
    [root] = eventually(lambda: collector.spans("GET /answer"), "the app's span")
    eventually(lambda: len(collector.spans(*CHILDREN)) == 4, "the spans of the engine")
    spans = {span.name: span for span in collector.spans()}
    assert [(span.name, span.service) for span in collector.spans() if span.trace != root.trace] == []
    sent, read = spans["send petiole"], spans["read stream"]
    assert (sent.kind, sent.parent) == ("PRODUCER", root.id)
    assert sent.attributes["messaging.message.id"] == app.task_id
    assert (read.kind, read.parent) == ("CLIENT", root.id)
    assert (read.attributes["petiole.tokens"], read.events) == (LONG, ("first token",))

    first, second = attempts(collector)
    assert first.parent == second.parent == spans["petiole.queue"].parent == sent.id
    assert (first.failed, first.attributes["error.type"], first.events) == (True, "WorkerLost", ("worker died",))
    assert first.attributes["petiole.worker"] == killed.node
    assert second.links == (first.id,)
    assert not second.failed
    assert first.end <= second.end
    assert second.attributes["gen_ai.usage.output_tokens"] == LONG
    assert second.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert second.attributes["gen_ai.request.max_tokens"] == LONG
    assert {spans[name].parent for name in CHILDREN} == {second.id}
    times = [spans[name].start for name in CHILDREN]
    assert times == sorted(times)
    assert PROMPT.encode() not in collector.bytes
    begun = begun_attempts(site.redis.hgetall(stream_keys(app.task_id).state))
    assert [(one.number, one.why) for one in begun] == [(1, "new"), (2, "died")]


def test_an_attempt_that_is_handed_back_is_linked(site: Site, collector: Collector) -> None:
    first = site.worker(**collector.environment)
    app = WebApp(site, collector, LONG)
    site.streaming(app.task_id, 10)
    second = site.start_worker(**collector.environment)
    assert first.stop() == 0
    second.ready()
    assert app.read() == expected(PROMPT, 3, LONG)
    eventually(lambda: len(attempts(collector)) == 2, "both attempts")
    one, other = attempts(collector)
    assert one.attributes["petiole.end"] == "handed_back"
    assert other.links == (one.id,)


def test_a_worker_without_traces_passes_them_on(site: Site, collector: Collector) -> None:
    """It submits the next link in the trace of the one before: to a queue of workers that record."""
    first = site.worker(OTEL_SDK_DISABLED="true")
    site.worker("-Q", "traced", **collector.environment)
    parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
    later = site.app.signature("tasks.generate", kwargs={"max_tokens": 3}, queue="traced")
    chain = site.signature("first", max_tokens=3).set(headers={TRACEPARENT_HEADER: parent}) | later
    site.get(chain.apply_async())
    [attempt] = eventually(lambda: attempts(collector), "the attempt")
    assert (attempt.trace, attempt.parent) == ("ab" * 16, "cd" * 8)
    assert first.alive()


def test_celerys_and_redis_instrumentation_have_no_doubles(site: Site, collector: Collector) -> None:
    site.worker(**collector.environment)
    app = WebApp(site, collector, 5, "celery", "redis")
    assert app.read() == expected(PROMPT, 3, 5)
    eventually(lambda: attempts(collector) and collector.spans("GET /answer"), "attempt and request")
    [sent] = [span for span in collector.spans() if span.kind == "PRODUCER"]
    assert sent.name == "apply_async/tasks.generate"
    [attempt] = attempts(collector)
    assert attempt.parent == sent.id
    assert PROMPT.encode() not in b"".join(
        span.name.encode() + json.dumps(span.attributes).encode()
        for span in collector.spans()
        if span.service != "shop"
    )


def test_a_request_to_the_gateway_is_one_trace(site: Site, collector: Collector, tmp_path: Path) -> None:
    site.worker(**collector.environment)
    parent = f"00-{'12' * 16}-{'34' * 8}-01"
    with Gateway(tmp_path, PETIOLE_BROKER_URL=site.url, **collector.environment) as gateway:
        client = openai.OpenAI(base_url=gateway.url, api_key="none", default_headers={TRACEPARENT_HEADER: parent})
        [model, *_] = client.models.list()
        client.completions.create(model=model.id, prompt=PROMPT, max_tokens=4)
        eventually(lambda: collector.spans("POST /v1/completions") and attempts(collector), "the spans")
    [served] = collector.spans("POST /v1/completions")
    found = [span for span in collector.spans() if span.trace == "12" * 16]
    assert (served.parent, served.kind, served.service) == ("34" * 8, "SERVER", "petiole-gateway")
    names = {span.name for span in found}
    assert {"read stream", "send petiole", *CHILDREN} <= names
    assert served.attributes["http.response.status_code"] == 200
    assert PROMPT.encode() not in collector.bytes


def test_rows_of_a_batch_belong_to_the_trace_of_whoever_began_it(
    site: Site, collector: Collector, tmp_path: Path
) -> None:
    """A runner of a worker's submits them, long after the request is answered."""
    site.worker(**collector.environment)
    told = {"PETIOLE_BROKER_URL": site.url, "PETIOLE_GATEWAY_FILES": tmp_path / "files", **collector.environment}
    with Gateway(tmp_path, **told) as gateway:
        client = openai.OpenAI(base_url=gateway.url, api_key="none")
        [model, *_] = client.models.list()
        body = {"model": model.id, "prompt": PROMPT, "max_tokens": 3}
        row = {"method": "POST", "url": "/v1/completions", "body": body}
        rows = "".join(json.dumps({"custom_id": str(i), **row}) + "\n" for i in range(3))
        file = client.files.create(file=("rows.jsonl", rows.encode()), purpose="batch")
        headers = {TRACEPARENT_HEADER: f"00-{'12' * 16}-{'34' * 8}-01"}
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", extra_headers=headers
        )
        found = eventually(lambda: len(attempts(collector)) == 3 and attempts(collector), "the rows' attempts")
        [began] = eventually(lambda: collector.spans("POST /v1/batches"), "the request that began it")
    assert {span.trace for span in found} == {began.trace} == {"12" * 16}
    sent = {span.id for span in collector.spans() if span.kind == "PRODUCER" and span.trace == began.trace}
    assert {span.parent for span in found} == sent
    assert len(sent) == 3
    assert PROMPT.encode() not in collector.bytes


def test_whoever_has_no_key_begins_no_span(site: Site, collector: Collector, tmp_path: Path) -> None:
    """Whatever its `traceparent` says."""
    site.worker()
    keys = {"tenants": {"acme": {"salt": "s"}}, "keys": {digest_of("known"): {"tenant": "acme"}}}
    told = {"PETIOLE_BROKER_URL": site.url, "PETIOLE_GATEWAY_KEYS": json.dumps(keys), **collector.environment}
    with Gateway(tmp_path, **told) as gateway:
        for key, trace, status in (("unknown", "ab", 401), ("known", "12", 200)):
            headers = {"authorization": f"Bearer {key}", TRACEPARENT_HEADER: f"00-{trace * 16}-{'34' * 8}-01"}
            assert httpx2.get(f"{gateway.url}/models", headers=headers).status_code == status
        eventually(lambda: collector.spans("GET /v1/models"), "the span")
        assert gateway.stop(signal.SIGTERM) == 0
    assert {span.trace for span in collector.spans()} == {"12" * 16}


def test_prompt_and_answer_if_a_setting_says_so(site: Site, collector: Collector) -> None:
    site.worker(**collector.environment, PETIOLE_TRACE_CONTENT="true")
    result = site.generate(PROMPT, max_tokens=3)
    text = site.get(result)["text"]
    [attempt] = eventually(lambda: attempts(collector), "the attempt")
    [asked] = json.loads(attempt.attributes["gen_ai.input.messages"])
    [said] = json.loads(attempt.attributes["gen_ai.output.messages"])
    assert (asked["role"], asked["parts"][0]["content"]) == ("user", PROMPT)
    assert (said["role"], said["parts"][0]["content"]) == ("assistant", text)


def test_a_decode_says_how_many_drafts_were_right(site: Site, collector: Collector) -> None:
    site.worker(**collector.environment, PETIOLE_SPECULATIVE_TOKENS="3")
    site.get(site.generate(PROMPT, max_tokens=5))
    [decode] = eventually(lambda: collector.spans("petiole.decode"), "the decode")
    drafts = {name: n for name, n in decode.attributes.items() if name.endswith("draft_tokens")}
    assert drafts == {"petiole.draft_tokens": 15, "petiole.accepted_draft_tokens": 5}


@pytest.mark.parametrize(
    "variables",
    [
        {"OTEL_TRACES_SAMPLER": "always_off"},
        {"OTEL_SDK_DISABLED": "true"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
    ids=lambda variables: " ".join(variables.values()),
)
def test_no_spans(site: Site, collector: Collector, variables: dict[str, Any]) -> None:
    worker = site.worker(**{**collector.environment, **variables})
    site.get(site.generate(PROMPT, max_tokens=3))
    assert worker.stop() == 0
    assert collector.spans() == []
    [(name, value)] = variables.items()
    wrong = value in ("zipkin", "grpc")
    assert (f"no traces: {name} must be" in worker.output) == wrong


def test_a_collector_that_is_away_holds_nobody_up(site: Site) -> None:
    worker = site.worker(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9", OTEL_BSP_SCHEDULE_DELAY="50")
    for prompt in ("one", "two"):
        assert site.get(site.generate(prompt, max_tokens=30, seed=3))["token_ids"] == expected(prompt, 3, 30)
    assert worker.stop() == 0
    assert "Traceback" not in worker.output


def attempts(collector: Collector) -> list[Span]:
    return [span for span in collector.spans() if "petiole.attempt" in span.attributes]

"""The page's files, and the fleet as JSON."""

from __future__ import annotations

import re
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from petiole.gateway.core.caller import Caller
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.page import fleet
from petiole.gateway.routes import page as endpoints
from petiole.tasks.fleet.models import ModelFacts
from petiole.tasks.fleet.queues import QueueReport
from petiole.tasks.fleet.reports import Generating, WorkerReport
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

MOST_BYTES = 150_000
QUEUES = ("petiole", "petiole.acme", "petiole.initech", "embed", "other")


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=endpoints.routes()))


def test_the_page_is_light_and_all_that_it_names_is_there(client: TestClient) -> None:
    page, size, waiting, seen = client.get("/"), 0, ["page/page.js"], set[str]()
    assert page.headers["content-type"].startswith("text/html")
    size += len(page.content)
    waiting += re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        found = client.get(f"/{path}")
        assert found.status_code == 200, path
        size += len(found.content)
        waiting += [f"page/{name}" for name in re.findall(r'from "\./([^"]+)"', found.text)]
    assert seen == {f"page/{name}" for name in endpoints.FILES}
    assert size <= MOST_BYTES


def test_nothing_from_elsewhere_and_nothing_inline_is_run(client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]* src=)", page.text)
    assert not re.search(r"https?://", page.text)
    for name in endpoints.FILES:
        found = client.get(f"/page/{name}")
        assert found.headers["content-security-policy"] == policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert "innerHTML" not in found.text


def test_a_file_that_has_not_changed_is_not_sent_again(client: TestClient) -> None:
    first = client.get("/page/page.css")
    assert first.headers["content-type"].startswith("text/css")
    again = client.get("/page/page.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_what_is_shown_of_the_fleet() -> None:
    reports = [
        WorkerReport(worker="a", age_s=1, model="m", generations=[Generating(task_id="resp_1", age_s=3)]),
        WorkerReport(worker="b", age_s=99, generations=[Generating(task_id="t", age_s=9)]),
        WorkerReport(worker="c", age_s=0, model="m", generations=[Generating(task_id="chatcmpl-1-0", age_s=7)]),
    ]
    queues = [QueueReport(queue="q", waiting=2, by_priority={0: 2}, workers=2)]
    records = {"resp_1": RequestRecord(id="resp_1", kind="response", created=1, model="mine", tasks=["resp_1"])}
    shown = fleet.shown(reports, queues, [ModelFacts(fingerprint="f", names=["mine"], chat=True)], records)
    assert [(one["worker"], one["state"]) for one in shown["workers"]] == [
        ("a", "ready"),
        ("b", "lost"),
        ("c", "ready"),
    ]
    assert [(one["kind"], one["model"], one["worker"]) for one in shown["generations"]] == [
        ("task", "m", "c"),
        ("response", "mine", "a"),
    ]
    assert "resp_1" not in str(shown)
    assert shown["models"][0]["takes"] == ["chat"]
    assert [one.record for one in fleet.generations(reports)] == ["chatcmpl-1", "resp_1"]
    assert fleet.shown(reports, None, [], {})["queues"] is None


def test_a_tenant_sees_what_is_its_own() -> None:
    own, other = Generating(task_id="resp_1", age_s=3), Generating(task_id="resp_2", age_s=4)
    reports = [
        WorkerReport(worker="a", age_s=1, fingerprint="f", generations=[own, other]),
        WorkerReport(worker="b", age_s=1, fingerprint="g"),
    ]
    queues = [QueueReport(queue=name, waiting=0, by_priority={}, workers=1) for name in QUEUES]
    models = [
        ModelFacts(fingerprint="f", names=["m"], queues=["embed"]),
        ModelFacts(fingerprint="g"),
    ]  # as the catalogue has them
    records = {"resp_1": RequestRecord(id="resp_1", kind="response", created=1, model="m", tasks=["resp_1"])}
    shown = fleet.shown(reports, queues, models, records, Caller(name="acme"))
    assert [one["worker"] for one in shown["workers"]] == ["a"]
    assert [one["age_s"] for one in shown["generations"]] == [3]
    assert [one["queue"] for one in shown["queues"]] == ["petiole", "petiole.acme", "embed"]
    assert [one["names"] for one in shown["models"]] == [["m"]]


def test_the_fleet_over_http(site: Site, gateway: Gateway) -> None:
    found: dict[str, Any] = httpx2.get(f"{gateway.url}/fleet").json()
    assert found["workers"][0]["model"] == "petiole-tiny"
    assert [queue["queue"] for queue in found["queues"]] == ["petiole"]
    assert found["models"][0]["names"] == ["petiole-tiny"]
    none = httpx2.post(f"{gateway.url}/fleet/generations/0123456789abcdef/cancel")
    assert (none.status_code, none.json()["error"]["code"]) == (404, "not_found")


@pytest.mark.e2e
def test_a_generation_is_cancelled_by_its_handle(slow_site: Site, slow_gateway: Gateway) -> None:
    asked = {"model": "petiole-tiny", "input": "x", "background": True, "max_output_tokens": 4000}
    name = httpx2.post(f"{slow_gateway.url}/responses", json=asked, timeout=60).json()["id"]

    def running() -> list[str]:
        shown = httpx2.get(f"{slow_gateway.url}/fleet").json()["generations"]
        return [one["handle"] for one in shown if one["kind"] == "response"]

    [handle] = eventually(running, "the generation is shown")
    assert httpx2.post(f"{slow_gateway.url}/fleet/generations/{handle}/cancel").json()["cancelled"]
    path = f"{slow_gateway.url}/responses/{name}"
    eventually(lambda: httpx2.get(path).json()["status"] == "cancelled", "the response is cancelled")

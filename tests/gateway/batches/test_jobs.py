"""openai-python's `client.files` and `client.batches`, unchanged."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from petiole.gateway.batches import file_storage
from petiole.gateway.batches.lines import BatchLines
from petiole.gateway.serving.auth import api_keys
from petiole.gateway.serving.webhooks import queue
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.files import storage
from tests.e2e.test_detached_batch import paused
from tests.support.gateway import Gateway
from tests.support.nursery import petiole
from tests.support.site import Site, eventually

pytest.importorskip("python_multipart", reason="an environment from before files could be uploaded")

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
DOCUMENT = {
    "tenants": {"acme": {"salt": "one"}, "initech": {"salt": "other", "models": ["other-*"]}},
    "keys": {
        api_keys.digest_of("of-acme"): {"tenant": "acme"},
        api_keys.digest_of("of-initech"): {"tenant": "initech"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def served(site: Site, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    known = {
        "PETIOLE_BROKER_URL": site.url,
        "PETIOLE_GATEWAY_FILES": folder,
        "PETIOLE_GATEWAY_MAX_FILE_BYTES": 50_000,
    }
    with Gateway(tmp_path_factory.mktemp("serve"), **known) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(served: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def line(name: str, **body: Any) -> dict[str, Any]:
    asked = {"model": "petiole-tiny", "temperature": 0, "max_tokens": 8, **body}
    asked.setdefault("messages", [{"role": "user", "content": "Count from 1 to 5."}])
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": asked}


def uploaded(client: openai.OpenAI, rows: list[Any], name: str = "in.jsonl") -> openai.types.FileObject:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return client.files.create(file=(name, content), purpose="batch")


def begun(client: openai.OpenAI, rows: list[Any], **more: Any) -> openai.types.Batch:
    file = uploaded(client, rows)
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", **more)


def until_ended(client: openai.OpenAI, name: str) -> openai.types.Batch:
    def seen() -> openai.types.Batch | None:
        found = client.batches.retrieve(name)
        return found if found.status in ENDED else None

    found: openai.types.Batch = eventually(seen, "the batch has ended")
    return found


def lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_its_file_to_its_files(client: openai.OpenAI) -> None:
    rows = [line("a"), line("b", max_tokens=0), line("c", messages=[{"role": "user", "content": "Hello"}])]
    batch = begun(client, rows, metadata={"night": "1"})
    assert (batch.object, batch.endpoint, batch.metadata) == ("batch", CHAT, {"night": "1"})
    assert batch.expires_at == batch.created_at + 86_400
    found = until_ended(client, batch.id)
    assert (found.status, found.errors, found.metadata) == ("completed", None, {"night": "1"})
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert found.usage is not None
    assert found.usage.output_tokens > 0
    assert found.created_at <= (found.in_progress_at or 0) <= (found.completed_at or 0)
    good, bad = lines(client, found.output_file_id), lines(client, found.error_file_id)
    assert [one["custom_id"] for one in good] == ["a", "c"]
    direct = client.chat.completions.create(**rows[0]["body"])
    assert good[0]["response"]["status_code"] == 200
    assert good[0]["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert [(one["custom_id"], one["response"]["status_code"]) for one in bad] == [("b", 400)]
    output = client.files.retrieve(found.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len(client.files.content(output.id).content)


def test_a_file_that_is_no_batch_fails_before_anything_runs(client: openai.OpenAI) -> None:
    rows = [line("a"), line("a"), {"custom_id": "b"}, [], {**line("d"), "url": "/v1/completions"}]
    rows.append({**line("e"), "url": []})
    found = until_ended(client, begun(client, rows).id)
    assert (found.status, found.output_file_id, found.error_file_id) == ("failed", None, None)
    assert found.errors is not None
    assert [(one.line, one.code, one.param) for one in found.errors.data or ()] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_request", "method"),
        (4, "invalid_request", "row"),
        (5, "invalid_request", "url"),
        (6, "invalid_request", "url"),
    ]
    assert found.request_counts is not None
    assert found.request_counts.total == 0
    empty = client.files.create(file=("in.jsonl", b"\n"), purpose="batch")
    batch = client.batches.create(input_file_id=empty.id, endpoint=CHAT, completion_window="24h")
    failed = until_ended(client, batch.id)
    assert failed.errors is not None
    assert [one.code for one in failed.errors.data or ()] == ["empty_file"]


def test_cancelled_it_keeps_what_has_ended(client: openai.OpenAI, site: Site) -> None:
    batch = begun(client, [line(f"r{k}", max_tokens=400, min_tokens=400) for k in range(150)])
    eventually(lambda: client.batches.retrieve(batch.id).status == "in_progress", "it runs")
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    found = until_ended(client, batch.id)
    assert (found.status, found.cancelled_at is not None) == ("cancelled", True)
    assert found.request_counts is not None
    not_run = lines(client, found.error_file_id)
    assert {one["error"]["code"] for one in not_run if one["response"] is None} == {"batch_cancelled"}
    assert len(not_run) == 150 - found.request_counts.completed
    with pytest.raises(openai.ConflictError, match="a batch that is cancelled cannot be cancelled"):
        client.batches.cancel(batch.id)


def test_files_are_listed_read_and_deleted(client: openai.OpenAI, folder: Path) -> None:
    made = [uploaded(client, [line("a")], f"{k}.jsonl") for k in range(3)]
    notes = client.files.create(
        file=("notes.txt", io.BytesIO(b"text")),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert notes.expires_at == notes.created_at + 3600
    listed = [file.id for file in client.files.list(limit=2)]  # the SDK turns the pages
    assert {notes.id, *(file.id for file in made)} <= {*listed}
    assert len(listed) == len({*listed})
    assert notes.id in [file.id for file in client.files.list(purpose="user_data")]
    assert client.files.content(notes.id).content == b"text"
    assert client.files.delete(notes.id).deleted
    assert not [path for path in folder.iterdir() if path.name.startswith(notes.id)]
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no file with id"):
            call(notes.id)


def test_batches_are_listed_in_pages(client: openai.OpenAI) -> None:
    made = [begun(client, [line("a")]).id for _ in range(3)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert [one for one in listed if one in made] == sorted(made, key=listed.index)
    assert {*made} <= {*listed}


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"input_file_id": "file-000000000000000000000000"}, "file_id"),
        ({"input_file_id": "../../etc/passwd"}, "file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "9999h"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(k): "x" for k in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after[seconds]"),
        ({"more": 1}, "more"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_batches_are_refused(client: openai.OpenAI, asked: dict[str, Any], field: str) -> None:
    file = uploaded(client, [line("a")])
    good = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    with pytest.raises(openai.APIStatusError) as refused:
        client.post("/batches", body={**good, **asked}, cast_to=object)
    assert refused.value.status_code in (400, 404)
    assert refused.value.param == field


def test_wrong_files_are_refused(client: openai.OpenAI, served: Gateway, gateway: Gateway) -> None:
    notes = client.files.create(file=("notes.txt", b"text"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="must be a file of purpose batch"):
        client.batches.create(input_file_id=notes.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.APIStatusError) as large:
        client.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
    assert large.value.status_code == 413
    for purpose, field, why in (("x", "file", "purpose: must be one of"), ("batch", "other", "file: is required")):
        answer = httpx2.post(f"{served.url}/files", data={"purpose": purpose}, files={field: ("a", b"b")})
        assert (answer.status_code, why in answer.text) == (400, True)
    assert httpx2.post(f"{served.url}/files", json={}).status_code == 400
    with (
        openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0) as elsewhere,
        pytest.raises(openai.BadRequestError, match="PETIOLE_GATEWAY_FILES"),
    ):
        elsewhere.files.create(file=("a", b"b"), purpose="batch")


def test_another_folder_of_the_same_name_is_refused(
    site: Site, folder: Path, client: openai.OpenAI, tmp_path: Path
) -> None:
    uploaded(client, [line("a")])
    marker = folder / "petiole-files"
    before = marker.read_bytes()
    marker.write_bytes(b"of another folder")
    try:
        with Gateway(tmp_path, PETIOLE_BROKER_URL=site.url, PETIOLE_GATEWAY_FILES=folder) as gateway:
            answer = httpx2.get(f"{gateway.url}/files")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_not_shared")
    finally:
        marker.write_bytes(before)


def test_a_batch_of_the_command_is_no_file_of_the_gateway(
    site: Site, client: openai.OpenAI, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello", "max_tokens": 1}\n')
    command = ("batch", "in.jsonl", "-o", "out.9", "--detach", "--wait", "--json")
    ran = petiole(*command, folder=tmp_path, **site.environment)
    assert json.loads(ran.stdout)["status"] == "completed", ran.stderr
    name = f"file-{json.loads(ran.stdout)['id']}-output"
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="no file with id"):
            call(name)
    assert (tmp_path / "out.9").exists()


def test_what_is_left_of_expired_batches_and_dead_processes_is_swept(tmp_path: Path) -> None:
    now = int(time.time())
    for ends in (now - 9, now + 999):
        for name in (
            f"a-output.{ends}",
            f"a-output.{ends}.pages/marker",
            f"a-output.{ends}.pages/00000001-00000000",
        ):
            storage.write(str(tmp_path / name), b"rows")
    for age_s in (0, 2 * file_storage.UNFINISHED_FOR_S):
        left = tmp_path / f"file-{age_s:.0f}.{now + 999}.0123.unfinished"
        left.write_bytes(b"rows")
        os.utime(left, (now - age_s, now - age_s))
    (tmp_path / "petiole-files").write_text("marker")
    file_storage.remove_expired(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"a-output.{now + 999}",
        f"a-output.{now + 999}.pages",
        f"file-0.{now + 999}.0123.unfinished",
        "petiole-files",
    ]


def test_a_files_name_is_short_and_text(client: openai.OpenAI, served: Gateway) -> None:
    long = client.files.create(file=("n" * 2000, b"text"), purpose="user_data")
    assert long.filename == "n" * 255
    body = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="+2AA-"\r\n\r\ntext\r\n--b--\r\n'
    )
    kind = {"content-type": "multipart/form-data; charset=utf-7; boundary=b"}
    answer = httpx2.post(f"{served.url}/files", content=body, headers=kind)
    assert (answer.status_code, answer.json().get("filename")) == (200, "?")
    kind = {"content-type": "multipart/form-data; charset=undefined; boundary=b"}
    answer = httpx2.post(f"{served.url}/files", content=body, headers=kind)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")


def test_gateways_that_begin_together_agree_on_one_marker(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
    monkeypatch.setenv("PETIOLE_GATEWAY_FILES", str(tmp_path))
    settings.cache_clear()

    async def begin() -> list[str]:
        return await asyncio.gather(*(file_storage.FileStorage().root() for _ in range(8)))

    try:
        assert asyncio.run(begin()) == [str(tmp_path)] * 8
        assert asyncio.run(begin()) == [str(tmp_path)] * 8
    finally:
        settings.cache_clear()


def test_a_worker_tells_webhooks_that_only_the_gateways_settings_name(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
    settings.cache_clear()
    try:
        for watched, notices in ((False, []), (True, [b"batch_0"])):
            form = BatchLines(caller={"name": "told-by-settings"}, watched=watched)
            form.told("batch_0", "completed", 1)
            found = asyncio.run(queue.take("told-by-settings", 9))
            assert [json.loads(one)["about"].encode() for one in found] == notices
    finally:
        settings.cache_clear()


def test_a_request_that_is_repeated_makes_one_batch(client: openai.OpenAI) -> None:
    file = uploaded(client, [line("a")])

    def made(endpoint: str = CHAT, **headers: str) -> str:
        body = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
        told = {name.replace("_", "-"): value for name, value in headers.items()}
        answer: Any = client.post("/batches", body=body, cast_to=object, options={"headers": told})
        return str(answer["id"])

    first = made()
    assert made(x_stainless_retry_count="1") == first
    second = made()
    assert second != first
    assert made(x_stainless_retry_count="1") not in (first, second)  # whose retry it is is not known
    assert made(idempotency_key="k") == made(idempotency_key="k") != made(idempotency_key="other")
    with pytest.raises(openai.BadRequestError, match="was used for another request"):
        made("/v1/completions", idempotency_key="k")


def test_of_different_batches_at_once_a_key_is_that_of_one(client: openai.OpenAI) -> None:
    files = [uploaded(client, [line(name)]).id for name in "ab"]

    def made(number: int) -> tuple[str, str]:
        body = {"input_file_id": files[number % 2], "endpoint": CHAT, "completion_window": "24h"}
        headers = {"idempotency-key": "at once"}
        try:
            answer: Any = client.post("/batches", body=body, cast_to=object, options={"headers": headers})
        except openai.BadRequestError:
            return body["input_file_id"], "refused"
        return body["input_file_id"], answer["input_file_id"]

    with ThreadPoolExecutor(8) as threads:
        found = {*threads.map(made, range(16))}
    assert found in [{(one, one), (other, "refused")} for one, other in (files, files[::-1])]


def test_blank_lines_are_no_rows(client: openai.OpenAI) -> None:
    content = b"\n\n" + json.dumps(line("a")).encode() + b"\n\n"
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    ended = eventually(lambda: (one := client.batches.retrieve(batch.id)).status in ENDED and one, "it ends")
    counts = ended.request_counts
    assert (ended.status, counts.total, counts.completed, counts.failed) == ("completed", 1, 1, 0)


@pytest.mark.slow
def test_tenants_are_apart(site: Site, tmp_path: Path) -> None:
    told = {"PETIOLE_GATEWAY_KEYS": json.dumps(DOCUMENT), "PETIOLE_GATEWAY_FILES": tmp_path / "files"}
    with (
        Gateway(tmp_path, PETIOLE_BROKER_URL=site.url, **told) as gateway,
        openai.OpenAI(base_url=gateway.url, api_key="of-acme", max_retries=0) as acme,
        openai.OpenAI(base_url=gateway.url, api_key="of-initech", max_retries=0) as initech,
    ):
        batch = begun(acme, [line("a")])
        found = until_ended(acme, batch.id)
        assert found.request_counts is not None
        assert found.request_counts.completed == 1
        assert [one.id for one in initech.batches.list()] == []
        assert [one.id for one in initech.files.list()] == []
        for file_id in (batch.input_file_id, found.output_file_id or ""):
            with pytest.raises(openai.NotFoundError):
                initech.files.content(file_id)
            with pytest.raises(openai.NotFoundError):
                initech.files.delete(file_id)
        for call in (initech.batches.retrieve, initech.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.NotFoundError):
            initech.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        refused = until_ended(initech, begun(initech, [line("a")]).id)
        [bad] = lines(initech, refused.error_file_id)
        assert bad["response"]["body"]["error"]["code"] == "model_not_found"


@pytest.mark.slow
def test_a_tenant_has_so_many_files_and_open_batches(site: Site, tmp_path: Path) -> None:
    """And its rows are in the ledger under its name."""
    limits = {"files": 3, "file_bytes": 2000, "batches": 1, "batch_rows": 3}
    document = {
        "tenants": {"umbrella": {"salt": "one", "limits": limits}},
        "keys": {api_keys.digest_of("of-umbrella"): {"tenant": "umbrella"}},
    }
    told = {"PETIOLE_GATEWAY_KEYS": json.dumps(document), "PETIOLE_GATEWAY_FILES": tmp_path / "files"}
    with (
        Gateway(tmp_path, PETIOLE_BROKER_URL=site.url, **told) as gateway,
        openai.OpenAI(base_url=gateway.url, api_key="of-umbrella") as client,
    ):
        one = uploaded(client, [line("a")])
        with pytest.raises(openai.RateLimitError, match="file_bytes: bytes of these files must be at most 2000"):
            uploaded(client, [line("x" * 500) for _ in range(4)])
        client.files.delete(one.id)
        with paused(site):
            batch = begun(client, [line("a"), line("b")])
            with pytest.raises(openai.RateLimitError, match="open batches must be at most 1, got 2") as no:
                begun(client, [line("a")])
            assert no.value.code == "quota_exceeded"
        uploaded(client, [line("a")])
        with pytest.raises(openai.RateLimitError, match="files: files that are uploaded must be at most 3, got 4"):
            uploaded(client, [line("a")])
        found = until_ended(client, batch.id)
        assert found.status == "completed"
        for file in client.files.list(purpose="batch"):
            client.files.delete(file.id)
        failed = until_ended(client, begun(client, [line(f"{k}") for k in range(4)]).id)
        assert failed.errors is not None
        assert [error.code for error in failed.errors.data or ()] == ["row_limit_exceeded"]
        key = {"Authorization": "Bearer of-umbrella"}
        days = httpx2.get(f"{gateway.url}/usage?days=2", headers=key).json()["data"]
        assert {day["tenant"] for day in days} == {"umbrella"}
        assert sum(day["requests"] for day in days) == 2

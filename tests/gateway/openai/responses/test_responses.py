"""Responses with openai-python, through a real gateway, Redis and worker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from petiole.tasks.wire.keys import gateway_key
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

COUNT = "Count from 1 to 5."
ASKED: dict[str, Any] = {"model": "petiole-tiny", "input": COUNT, "temperature": 0}
LONG: dict[str, Any] = {**ASKED, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway.url, timeout=60) as http:
        yield http


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [*filter(None, re.sub("^:.*\n", "", answer.text, flags=re.MULTILINE).split("\n\n"))]
    assert blocks.pop() == "data: [DONE]"
    found = []
    for block in blocks:
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        event = json.loads(lines["data"])
        assert (lines["event"], lines["id"]) == (event["type"], str(event["sequence_number"]))
        found.append(event)
    return found


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")


def test_a_whole_response_its_stream_and_what_is_got_later_are_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASKED, instructions=None, metadata={"a": "b"})
    assert (whole.status, whole.output_text, whole.metadata) == ("completed", "1, 2, 3, 4, 5", {"a": "b"})
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (16, 10, 26)
    assert client.responses.retrieve(whole.id) == whole
    with client.responses.stream(**ASKED, metadata={"a": "b"}) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.queued" not in kinds
    assert last.output_text == whole.output_text
    assert client.responses.retrieve(last.id).output_text == last.output_text


@pytest.mark.parametrize("more", [{}, {"background": True}, {"include": ["message.output_text.logprobs"]}])
def test_a_stream_is_resumed_after_every_number(http: httpx2.Client, more: dict[str, Any]) -> None:
    body = {**ASKED, "stream": True, **more}
    with http.stream("POST", "/responses", json=body) as answer:
        answer.read()
        first = events(answer)
    assert ("response.queued" in [event["type"] for event in first]) == ("background" in more)
    path = f"/responses/{first[0]['response']['id']}"
    last = first[-1]["sequence_number"]
    for number in range(-1, last + 1):
        given = {"starting_after": str(number)} if number % 2 else {}
        headers = {} if number % 2 else {"last-event-id": str(number)}
        rest = events(http.get(path, params={"stream": "true", **given}, headers=headers))
        assert text_of(first).endswith(text_of(rest))
        structural = [event for event in rest if not event["type"].endswith("delta")]
        assert len(structural) + len(text_of(rest)) == last - number
        assert structural == [
            event for event in first if event["sequence_number"] > number and not event["type"].endswith("delta")
        ]
    assert events(http.get(path, params={"stream": "true"}))[-1] == first[-1]


def test_a_background_response_is_asked_for_until_it_has_ended(client: openai.OpenAI) -> None:
    begun = client.responses.create(**ASKED, background=True)
    assert begun.status in ("queued", "in_progress", "completed")
    ended = eventually(lambda: _ended(client, begun.id), "the response has ended")
    assert (ended.status, ended.output_text) == ("completed", "1, 2, 3, 4, 5")


def _ended(client: openai.OpenAI, name: str) -> Any:
    found = client.responses.retrieve(name)
    return found if found.status not in ("queued", "in_progress") else None


def test_a_running_response_is_cancelled_and_keeps_what_it_had(client: openai.OpenAI) -> None:
    begun = client.responses.create(**LONG, background=True)
    eventually(lambda: client.responses.retrieve(begun.id).output_text, "some output")
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output_text
    assert cancelled.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert client.responses.cancel(begun.id) == cancelled
    assert client.responses.retrieve(begun.id) == cancelled


def test_limits_and_formats(client: openai.OpenAI) -> None:
    cut = client.responses.create(**ASKED, max_output_tokens=3)
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    made = client.responses.create(**ASKED, max_output_tokens=100, text={"format": form})
    assert isinstance(json.loads(made.output_text), dict)
    assert made.text is not None
    assert made.text.format is not None
    assert made.text.format.type == "json_schema"
    loose = client.responses.create(**ASKED, max_output_tokens=9, text={"format": {"type": "json_object"}})
    assert loose.output_text.startswith("{")


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    shown = client.responses.create(**ASKED, top_logprobs=2, include=["message.output_text.logprobs"])
    part = shown.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(token.token for token in part.logprobs) == shown.output_text  # type: ignore[union-attr]
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)  # type: ignore[union-attr]


def test_input_is_counted_and_listed(client: openai.OpenAI) -> None:
    told: Any = {"input": [{"role": "user", "content": COUNT}], "instructions": "Be brief."}
    counted = client.responses.input_tokens.count(model="petiole-tiny", **told)
    made = client.responses.create(**{**ASKED, **told})
    assert made.usage is not None
    assert counted.input_tokens == made.usage.input_tokens
    [item] = client.responses.input_items.list(made.id).data
    assert (item.type, item.role, item.content[0].text) == (  # type: ignore[union-attr]
        "message",
        "user",
        COUNT,
    )


def test_a_response_that_is_not_stored_can_be_followed_and_nothing_else(http: httpx2.Client) -> None:
    made = http.post("/responses", json={**ASKED, "store": False}).json()
    path = f"/responses/{made['id']}"
    assert made["store"] is False
    assert http.get(path).status_code == 404
    assert http.get(f"{path}/input_items").status_code == 404
    assert http.post(f"{path}/cancel").status_code == 404
    assert http.delete(path).status_code == 404
    continued = http.post("/responses", json={**ASKED, "previous_response_id": made["id"]})
    assert (continued.status_code, continued.json()["error"]["code"]) == (400, "previous_response_not_found")
    followed = events(http.get(path, params={"stream": "true"}))
    assert followed[-1]["response"] == made


def test_a_deleted_response_is_forgotten(client: openai.OpenAI, site: Site) -> None:
    made = client.responses.create(**ASKED)
    client.responses.retrieve(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(made.id)
    assert not list(site.redis.scan_iter(gateway_key(f"{made.id}*")))


def test_a_response_is_kept_as_long_as_it_asks_for(client: openai.OpenAI, site: Site) -> None:
    expires = {"expires_after": {"anchor": "created_at", "seconds": 4000}}
    made = client.responses.create(**ASKED, extra_body=expires)
    client.responses.retrieve(made.id)
    names = [gateway_key(f"{made.id}{half}") for half in ("", ":input", ":output")]
    assert all(3000 < site.redis.ttl(name) <= 4000 for name in names)


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_was_read_outlives_its_log_and_its_result(
    client: openai.OpenAI, site: Site, stream: bool
) -> None:
    if stream:
        *_, last = client.responses.create(**ASKED, stream=True)
        assert last.type == "response.completed"
        made = last.response
        eventually(lambda: site.redis.exists(gateway_key(f"{made.id}:output")), "it is kept")
    else:
        made = client.responses.create(**ASKED)
    eventually(lambda: site.redis.exists(f"celery-task-meta-{made.id}"), "the result is stored")
    site.redis.delete(f"celery-task-meta-{made.id}", *site.redis.scan_iter(f"petiole:{{{made.id}}}:*"))
    assert client.responses.retrieve(made.id) == made


def test_what_nobody_has_read_is_in_the_result_when_its_log_has_expired(client: openai.OpenAI, site: Site) -> None:
    made = client.responses.create(**ASKED, background=True)
    eventually(lambda: site.redis.exists(f"celery-task-meta-{made.id}"), "the result is stored")
    eventually(lambda: site.held() == 0, "the worker has written all of it")
    site.redis.delete(gateway_key(f"{made.id}:output"))  # it may have ended before it was answered
    site.redis.delete(*site.redis.scan_iter(f"petiole:{{{made.id}}}:*"))
    assert not site.state(made.id)
    assert client.responses.retrieve(made.id).output_text == "1, 2, 3, 4, 5"


@pytest.mark.parametrize(
    ("more", "status", "param", "code"),
    [
        ({"model": "gpt-9"}, 404, "model", "model_not_found"),
        ({"model": None}, 400, "model", "missing_required_parameter"),
        ({"input": []}, 400, "input", "invalid_value"),
        ({"input": "x " * 9000}, 400, "input", "context_length_exceeded"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, 400, "input[0].id", "not_found"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "invalid_value"),
        ({"temperature": -1}, 400, "temperature", "invalid_value"),
        ({"top_logprobs": 99}, 400, "top_logprobs", "invalid_type"),
        ({"previous_response_id": "resp_x"}, 400, "previous_response_id", "previous_response_not_found"),
        ({"conversation": "conv_x"}, 404, "id", "not_found"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 7}}}},
            400,
            "text.format.schema.type",
            "invalid_value",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_refused_before_its_stream_begins(
    http: httpx2.Client, more: dict[str, Any], status: int, param: str, code: str, stream: bool
) -> None:
    answer = http.post("/responses", json={**ASKED, "stream": stream, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error.keys() == {"message", "type", "param", "code"}


def test_a_background_request_that_is_refused_fails_by_its_status(client: openai.OpenAI) -> None:
    begun = client.responses.create(**{**ASKED, "input": "x " * 9000}, background=True)
    failed = eventually(lambda: _ended(client, begun.id), "the response has ended")
    assert (failed.status, failed.error and failed.error.code) == ("failed", "context_length_exceeded")


def test_another_gateway_answers_for_all_of_it(
    client: openai.OpenAI, site: Site, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("other")
    first = client.responses.create(**ASKED)
    with Gateway(folder, PETIOLE_BROKER_URL=site.url) as other:
        second = openai.OpenAI(base_url=other.url, api_key="none", max_retries=0)
        assert second.responses.retrieve(first.id) == first
        more = second.responses.create(**{**ASKED, "input": "Again."}, previous_response_id=first.id)
    told = client.responses.input_items.list(more.id, order="asc").data
    assert [item.content[0].text for item in told] == [COUNT, "1, 2, 3, 4, 5", "Again."]  # type: ignore[union-attr]

"""Responses that continue others: by id, in a conversation, over a WebSocket, after a compaction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.sync.client import ClientConnection, connect

from petiole.gateway.http.application import make
from petiole.gateway.openai.responses import websocket as socket_room
from tests.support.gateway import Gateway

ASKED: dict[str, Any] = {"model": "petiole-tiny", "temperature": 0, "max_output_tokens": 12}
LONG: dict[str, Any] = {**ASKED, "max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}


def said(items: Any) -> list[str]:
    return [part.text for item in items for part in item.content]


def prompt_tokens(client: openai.OpenAI, turns: list[str]) -> int:
    """Of a chat with these turns, the user's first."""
    told: Any = [
        {"role": "assistant" if place % 2 else "user", "content": turn} for place, turn in enumerate(turns)
    ]
    made = client.chat.completions.create(model="petiole-tiny", messages=told, max_tokens=1)
    assert made.usage is not None
    return made.usage.prompt_tokens


# ---------------------------------------------------------------- by id


def test_all_turns_before_are_kept_and_instructions_are_not(client: openai.OpenAI) -> None:
    turns: list[str] = []
    previous: str | None = None
    for text in ("My name is Alice.", "What is my name?", "And again?"):
        turns.append(text)
        told = {"instructions": "You are a pirate."} if previous is None else {"previous_response_id": previous}
        made = client.responses.create(**ASKED, **told, input=text)  # type: ignore[call-overload]
        if previous is not None:
            assert made.usage.input_tokens == prompt_tokens(client, turns)
            assert made.instructions is None
            assert made.previous_response_id == previous
        turns.append(made.output_text)
        previous = made.id
    assert previous is not None
    assert said(client.responses.input_items.list(previous, order="asc").data) == turns[:-1]
    pages = client.responses.input_items.list(previous, order="asc", limit=2)
    assert said(pages) == turns[:-1]
    assert client.responses.input_tokens.count(previous_response_id=previous, input="x").input_tokens


def test_a_branch_goes_its_own_way(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="Count from 1 to 3.")
    one, other = (
        client.responses.create(**ASKED, input=text, previous_response_id=first.id) for text in ("More.", "Less.")
    )
    shown = said(client.responses.input_items.list(other.id, order="asc").data)
    assert shown == ["Count from 1 to 3.", first.output_text, "Less."]
    assert one.id != other.id


def test_a_turn_that_is_gone_is_named(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="One.")
    second = client.responses.create(**ASKED, input="Two.", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED, input="Three.", previous_response_id=second.id)
    assert refused.value.code == "previous_response_not_found"
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_a_response_that_runs_cannot_be_continued_yet(client: openai.OpenAI) -> None:
    running = client.responses.create(**LONG, input="Count.", background=True)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**ASKED, input="More.", previous_response_id=running.id)
    assert refused.value.code == "previous_response_not_ended"
    client.responses.cancel(running.id)
    more = client.responses.create(**ASKED, input="More.", previous_response_id=running.id)
    assert said(client.responses.input_items.list(more.id, order="asc").data)[-1] == "More."


def test_an_item_is_referred_to_by_its_id(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="Count from 1 to 3.")
    told: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "More."}]
    second = client.responses.create(**ASKED, input=told)
    assert said(client.responses.input_items.list(second.id, order="asc").data) == [first.output_text, "More."]


def test_a_compacted_dialogue_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASKED, input="Count from 1 to 3.")
    short = client.responses.compact(model="petiole-tiny", previous_response_id=first.id, input="More.")
    assert [item.type for item in short.output] == ["message", "message", "compaction"]
    assert short.usage.input_tokens > 0
    told: Any = [item.model_dump(exclude_none=True, warnings=False) for item in short.output]
    made = client.responses.create(**ASKED, input=[*told, {"role": "user", "content": "Go on."}])
    assert made.status in ("completed", "incomplete")


# ---------------------------------------------------------------- conversations


def test_a_conversation_has_the_turns_of_its_responses(client: openai.OpenAI) -> None:
    kept: Any = [{"role": "user", "content": "My name is Alice."}, {"role": "assistant", "content": "Hello."}]
    talk = client.conversations.create(items=kept, metadata={"a": "b"})
    assert client.conversations.retrieve(talk.id) == talk
    assert client.conversations.update(talk.id, metadata={"c": "d"}).metadata == {"c": "d"}
    made = client.responses.create(**ASKED, input="What is my name?", conversation=talk.id)
    turns = ["My name is Alice.", "Hello.", "What is my name?"]
    assert made.usage is not None
    assert made.usage.input_tokens == prompt_tokens(client, turns)
    assert made.conversation is not None
    assert made.conversation.id == talk.id
    turns.append(made.output_text)
    assert said(client.conversations.items.list(talk.id, order="asc")) == turns
    assert said(client.conversations.items.list(talk.id, limit=3)) == turns[::-1]
    [item] = client.conversations.items.create(talk.id, items=[{"role": "user", "content": "x"}]).data
    assert client.conversations.items.retrieve(item.id, conversation_id=talk.id) == item  # type: ignore[arg-type]
    client.conversations.items.delete(item.id, conversation_id=talk.id)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(item.id, conversation_id=talk.id)  # type: ignore[arg-type]
    client.responses.delete(made.id)
    assert said(client.conversations.items.list(talk.id, order="asc")) == turns
    more = client.responses.create(**ASKED, input="And?", conversation={"id": talk.id})
    branch = client.responses.create(**ASKED, input="Or?", previous_response_id=more.id)
    shown = said(client.responses.input_items.list(branch.id, order="asc"))
    assert shown == [*turns, "And?", more.output_text, "Or?"]
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.list(talk.id)


def test_a_conversation_waits_for_its_response_and_forgets_a_failed_one(client: openai.OpenAI) -> None:
    talk = client.conversations.create()
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASKED, input="x " * 9000, conversation=talk.id)
    assert not client.conversations.items.list(talk.id).data
    running = client.responses.create(**LONG, input="Count.", conversation=talk.id, background=True)
    with pytest.raises(openai.ConflictError) as refused:
        client.responses.create(**ASKED, input="More.", conversation=talk.id)
    assert refused.value.code == "conversation_locked"
    client.responses.cancel(running.id)
    client.responses.create(**ASKED, input="More.", conversation=talk.id)
    shown = said(client.conversations.items.list(talk.id, order="asc"))
    assert [text for text in shown if text in ("Count.", "More.")] == ["Count.", "More."]


# ---------------------------------------------------------------- WebSocket


@pytest.fixture
def socket(gateway: Gateway) -> Iterator[ClientConnection]:
    with connect(f"{gateway.url.replace('http', 'ws', 1)}/responses") as socket:
        yield socket


LAST = ("response.completed", "response.incomplete", "response.failed", "error")


def ask(socket: ClientConnection, **given: Any) -> list[dict[str, Any]]:
    socket.send(json.dumps({"type": "response.create", **ASKED, **given}))
    return events(socket)


def events(socket: ClientConnection) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in LAST:
        found.append(json.loads(socket.recv(60)))
    return found


def test_events_over_a_websocket_are_those_of_the_stream(socket: ClientConnection, client: openai.OpenAI) -> None:
    found = ask(socket, input="Count from 1 to 3.")
    name = found[-1]["response"]["id"]
    streamed = [event.type for event in client.responses.retrieve(name, stream=True)]
    shown = [event["type"] for event in found]
    assert list(dict.fromkeys(shown)) == list(dict.fromkeys(streamed))
    assert client.responses.retrieve(name).output_text == found[-1]["response"]["output"][0]["content"][0]["text"]


def test_what_is_not_stored_is_continued_on_its_connection_only(
    gateway: Gateway, socket: ClientConnection, client: openai.OpenAI
) -> None:
    first = ask(socket, input="Count from 1 to 3.", store=False)[-1]["response"]
    second = ask(socket, input="More.", store=False, previous_response_id=first["id"])[-1]["response"]
    turns = ["Count from 1 to 3.", first["output"][0]["content"][0]["text"], "More."]
    assert second["usage"]["input_tokens"] == prompt_tokens(client, turns)
    with connect(f"{gateway.url.replace('http', 'ws', 1)}/responses") as other:
        [refused] = ask(other, input="More.", store=False, previous_response_id=second["id"])
        assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
        assert ask(other, input="Anew.", store=False)[-1]["type"] != "error"
    third = ask(socket, input="Keep it.", previous_response_id=second["id"])[-1]["response"]
    shown = said(client.responses.input_items.list(third["id"], order="asc"))
    assert shown == [*turns, second["output"][0]["content"][0]["text"], "Keep it."]


def test_a_failed_continuation_forgets_what_it_was_to_continue(socket: ClientConnection) -> None:
    first = ask(socket, input="Count from 1 to 3.", store=False)[-1]["response"]
    output = {"type": "function_call_output", "call_id": "none", "output": "x"}
    [refused] = ask(socket, input=[output], store=False, previous_response_id=first["id"])
    assert (refused["type"], refused["error"]["param"]) == ("error", "input[0].call_id")
    [refused] = ask(socket, input="More.", store=False, previous_response_id=first["id"])
    assert refused["error"]["code"] == "previous_response_not_found"


def test_frames_are_answered_one_after_the_other(socket: ClientConnection) -> None:
    for text in ("One.", "Two."):
        socket.send(json.dumps({"type": "response.create", **ASKED, "input": text, "store": False}))
    one, two = events(socket), events(socket)
    assert one[-1]["response"]["id"] != two[-1]["response"]["id"]
    assert [event["sequence_number"] for event in two] == sorted(event["sequence_number"] for event in two)


@pytest.mark.parametrize(
    ("frame", "param", "code"),
    [
        ("{", None, "invalid_json"),
        (b"\xff", None, "invalid_json"),
        ("{}", "type", "invalid_value"),
        ('{"type":"response.create","model":"petiole-tiny","input":"x","stream":true}', "stream", None),
        ('{"type":"response.create","model":"none","input":"x"}', "model", "model_not_found"),
        ('{"type":"response.create","input":"x"}', "model", "missing_required_parameter"),
    ],
)
def test_frames_that_are_no_requests(
    socket: ClientConnection, frame: str | bytes, param: str | None, code: str | None
) -> None:
    socket.send(frame)
    [refused] = events(socket)
    assert refused["error"]["param"] == param
    assert code is None or refused["error"]["code"] == code
    assert ask(socket, input="x")[-1]["type"] != "error"


def test_a_connection_lives_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_room, "LIVES_S", 0.0)
    with TestClient(make()).websocket_connect("/v1/responses") as connection:
        assert connection.receive_json()["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(WebSocketDisconnect):
            connection.receive_json()


def test_a_client_that_leaves_ends_nothing_but_its_reading(gateway: Gateway, client: openai.OpenAI) -> None:
    with connect(f"{gateway.url.replace('http', 'ws', 1)}/responses") as socket:
        socket.send(json.dumps({"type": "response.create", **ASKED, "input": "Count from 1 to 9."}))
        begun = json.loads(socket.recv(60))
    *_, last = client.responses.retrieve(begun["response"]["id"], stream=True)
    assert last.type in ("response.completed", "response.incomplete")

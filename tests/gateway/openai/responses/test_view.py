"""The events of a response: a function of a record and a log, which any gateway replays from any number."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from petiole.contract.results.outputs import Prepared, Timing
from petiole.contract.results.task_result import StreamDelta, ToolCall
from petiole.gateway.core.failures import Failure, unavailable
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.streams import ClientStream, Frame
from petiole.gateway.openai.responses import resource
from petiole.gateway.openai.responses.view import DELTA, ResponsesView, error_event
from tests.gateway.core.test_streams import CUTS, TEXTS, deltas
from tests.support.trials import examples

NAME = "resp_" + "0" * 32
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)

STRUCTURE = [
    "response.output_item.added",
    "response.content_part.added",
    DELTA,
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


def record(**asked: Any) -> RequestRecord:
    return RequestRecord(id=NAME, kind="response", created=1, model="m", tasks=[NAME], asked=asked)


def log(text: str, cuts: list[int], reason: str = "stop") -> list[StreamDelta]:
    *pieces, last = deltas(text, cuts)
    error = {"type": "WorkersLost", "message": "gone", "args": []} if reason == "error" else None
    return [*pieces, last.model_copy(update={"finish_reason": reason, "error": error})]


def frames(of: RequestRecord, deltas: Iterable[StreamDelta], after: int = -1) -> list[Frame]:
    stream = ClientStream(ResponsesView(of), of, [after])
    found = stream.begin()
    for delta in deltas:
        found += stream.read(0, delta)
    assert stream.finished
    return found


def read(found: Iterable[Frame]) -> list[dict[str, Any]]:
    events = []
    for frame in found:
        event = json.loads(frame.data)
        assert (frame.name, frame.cursor) == (event["type"], str(event["sequence_number"]))
        events.append(event)
    return events


def text_of(events: Iterable[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == DELTA)


REASONS = st.sampled_from(["stop", "length", "cancelled", "deadline", "error"])
ASKED = st.sampled_from([{}, {"background": True}, {"logprobs": 1}, {"background": True, "logprobs": 0}])


CALL = '<tool_call>\n{"name": "mcp__map__find", "arguments": {"city": "Rome é"}}\n</tool_call>'
SAID = f"<think>\nhm é\n</think>\n\nI look.\n{CALL}\n{CALL}"
TOOLS = [
    {"type": "namespace", "name": "mcp__map", "description": "", "tools": [{"type": "function", "name": "find"}]}
]


def divided(cuts: list[int], reason: str = "stop", text: str = SAID) -> list[StreamDelta]:
    """The log of an output with reasoning, content and calls, and what announces it."""
    prepared = Prepared(
        "m", "f", 3, "<|im_start|>assistant\n", {"mcp__map__find": {"city": "string"}}, None, "hermes"
    )
    announced = StreamDelta(task_id=NAME, attempt=1, index=-1, token_ids=[], text="", prepared=prepared)
    return [announced, *log(text, cuts, reason)]


def atoms(events: Iterable[dict[str, Any]]) -> list[Any]:
    """What each number stands for: a character, or an event without text."""
    found: list[Any] = []
    for event in events:
        if event["type"].endswith(".delta"):
            where = (event["type"], event["item_id"], event["output_index"], event.get("content_index"))
            found += [(*where, letter) for letter in event["delta"]]
        else:
            found.append(event)
    return found


@settings(max_examples=examples(100))
@given(CUTS, CUTS, REASONS)
def test_calls_and_reasoning_from_each_number_however_the_output_fell_into_deltas(
    one: list[int], other: list[int], reason: str
) -> None:
    of = record(parts=True, tools=TOOLS)
    whole = atoms(read(frames(of, divided(one, reason))))
    for after in range(-1, len(whole)):
        assert atoms(read(frames(of, divided(other, reason), after))) == whole[after + 1 :]


@given(CUTS, REASONS, st.integers(0, len(SAID)))
def test_openais_client_knows_every_event_of_calls_and_reasoning(cuts: list[int], reason: str, end: int) -> None:
    of = record(parts=True, tools=TOOLS)
    events = read(frames(of, divided(cuts, reason, SAID[:end])))
    for event in events:
        assert EVENTS.validate_python(event).type == event["type"]
    Response.model_validate(events[-1]["response"])


def test_the_order_of_the_events_of_calls_and_reasoning() -> None:
    events = read(frames(record(parts=True, tools=TOOLS), divided([])))

    def text(name: str) -> list[str]:
        return [f"response.{name}.delta", f"response.{name}.done"]

    added, done, part = "response.output_item.added", "response.output_item.done", "response.content_part"
    call = [added, *text("function_call_arguments"), done]
    assert list(dict.fromkeys(event["type"] for event in events)) == [
        "response.created", "response.in_progress",
        added, f"{part}.added", *text("reasoning_text"), f"{part}.done", done,
        *text("output_text"), *text("function_call_arguments"),
        "response.completed",
    ]  # fmt: skip
    assert [event["type"] for event in events][-9:-1] == [*call, *call]
    thought, message, first, second = output = events[-1]["response"]["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm é"}]
    assert message["content"][0]["text"] == "I look."
    assert {name: first[name] for name in ("type", "name", "namespace", "arguments", "status")} == {
        "type": "function_call", "name": "find", "namespace": "mcp__map", "arguments": '{"city": "Rome é"}',
        "status": "completed",
    }  # fmt: skip
    assert first["call_id"] != second["call_id"]
    assert [item["id"][:3] for item in output] == ["rs_", "msg", "fc_", "fc_"]
    assert [event["item"] for event in events if event["type"] == done] == output


def test_a_result_whose_log_is_gone_has_the_same_parts() -> None:
    of = record(parts=True, tools=TOOLS)
    ended = log("<think>hm", [], "stop")[-1]
    call = ToolCall(index=0, arguments="{}", id="abcdefghi", name="mcp__map__find")
    parts = {"content": "I look.", "reasoning": "hm", "tool_calls": [call]}
    events = read(frames(of, [ended.model_copy(update=parts)]))
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message", "function_call"]


@given(TEXTS, CUTS, REASONS, ASKED)
def test_a_log_replayed_from_each_number_gives_the_suffix(
    text: str, cuts: list[int], reason: str, asked: dict[str, Any]
) -> None:
    of, entries = record(**asked), log(text, cuts, reason)
    whole = read(frames(of, entries))
    last = whole[-1]["sequence_number"]
    for after in range(-1, last + 1):
        rest = read(frames(of, entries, after))
        same = [event for event in whole if event["sequence_number"] > after]
        assert [event["sequence_number"] for event in rest] == [event["sequence_number"] for event in same]
        assert [event for event in rest if event["type"] != DELTA] == [
            event for event in same if event["type"] != DELTA
        ]
        structural = sum(event["type"] != DELTA for event in rest)
        assert structural + len(text_of(rest)) == last - after
        assert text_of(whole).endswith(text_of(rest))


@given(TEXTS, CUTS, CUTS, REASONS, ASKED, st.data())
def test_numbers_do_not_depend_on_how_the_output_fell_into_deltas(
    text: str, cuts: list[int], others: list[int], reason: str, asked: dict[str, Any], data: st.DataObject
) -> None:
    of = record(**asked)
    one = read(frames(of, log(text, cuts, reason)))
    seen = one[: data.draw(st.integers(0, len(one)))]
    after = seen[-1]["sequence_number"] if seen else -1
    joined = [*seen, *read(frames(of, log(text, others, reason), after))]
    assert text_of(joined) == text_of(one)
    assert [event for event in joined if event["type"] != DELTA] == [
        event for event in one if event["type"] != DELTA
    ]


@given(TEXTS, CUTS, REASONS, ASKED)
def test_the_last_event_has_the_response_as_it_is_asked_for_later(
    text: str, cuts: list[int], reason: str, asked: dict[str, Any]
) -> None:
    of, entries = record(**asked), log(text, cuts, reason)
    view = ResponsesView(of)
    stream = ClientStream(view, of)
    last = [*stream.begin(), *(frame for delta in entries for frame in stream.read(0, delta))][-1]
    assert json.loads(last.data)["response"] == json.loads(json.dumps(resource.finished(of, view.whole)))


@given(TEXTS, CUTS, REASONS, ASKED)
def test_openais_client_knows_every_event(text: str, cuts: list[int], reason: str, asked: dict[str, Any]) -> None:
    for event in read(frames(record(**asked), log(text, cuts, reason))):
        parsed = EVENTS.validate_python(event)
        assert parsed.type == event["type"]
        if "response" in event:
            Response.model_validate(event["response"])


@pytest.mark.parametrize(
    ("reason", "name", "status", "item"),
    [
        ("stop", "response.completed", "completed", "completed"),
        ("length", "response.incomplete", "incomplete", "incomplete"),
        ("deadline", "response.incomplete", "incomplete", "incomplete"),
        ("cancelled", "response.incomplete", "cancelled", "incomplete"),
    ],
)
def test_how_a_response_ends(reason: str, name: str, status: str, item: str) -> None:
    events = read(frames(record(), log("one two", [3], reason)))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert list(dict.fromkeys(kinds[2:-1])) == STRUCTURE
    assert kinds[-1] == name
    response = events[-1]["response"]
    assert (response["status"], response["output"][0]["status"]) == (status, item)
    assert events[-2]["item"] == response["output"][0]
    assert (response["incomplete_details"] is not None) == (status == "incomplete")
    assert response["usage"]["total_tokens"] == sum(
        response["usage"][name] for name in ("input_tokens", "output_tokens")
    )


def test_a_response_is_completed_when_its_output_has_ended() -> None:
    def completed_at(reason: str) -> Any:
        *pieces, last = log("one two", [3], reason)
        timed = last.model_copy(update={"timing": Timing(1.0, 2.0, 3.0, 4.0, ended_at=1_700_000_000.9)})
        return read(frames(record(), [*pieces, timed]))[-1]["response"]["completed_at"]

    assert [completed_at(reason) for reason in ("stop", "length", "error")] == [1_700_000_000, None, None]
    assert read(frames(record(), log("one two", [])))[-1]["response"]["completed_at"] is None


def test_a_failed_response_keeps_what_it_had_and_closes_nothing() -> None:
    events = read(frames(record(), log("one two", [3], "error")))
    assert [event["type"] for event in events][-2:] == [DELTA, "response.failed"]
    response = events[-1]["response"]
    assert response["error"]["code"] == "server_error"
    assert response["output"][0]["status"] == "incomplete"


def test_only_a_background_response_is_queued_and_begins_with_its_output() -> None:
    events = read(frames(record(background=True), log("one", [])))
    assert [event["type"] for event in events][:4] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert [event["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert not any(event["type"] == "response.queued" for event in read(frames(record(), log("one", []))))


def test_log_probabilities_come_with_their_characters() -> None:
    events = read(frames(record(logprobs=0), log("a😀b", [1, 2, 3])))
    deltas = [event for event in events if event["type"] == DELTA]
    shown = [token for event in deltas for token in event["logprobs"]]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert shown == done["logprobs"]
    assert b"".join(bytes(token["bytes"]) for token in shown) == "a😀b".encode()
    assert shown == events[-1]["response"]["output"][0]["content"][0]["logprobs"]


@given(CUTS, CUTS)
def test_log_probabilities_of_a_message_between_reasoning_and_calls(one: list[int], other: list[int]) -> None:
    of = record(parts=True, logprobs=0, tools=TOOLS)
    [streamed, again] = [read(frames(of, divided(cuts))) for cuts in (one, other)]
    shown = [token for event in streamed if event["type"] == DELTA for token in event["logprobs"]]
    assert "I look." in b"".join(bytes(token["bytes"]) for token in shown).decode(errors="replace")
    for events in (streamed, again):
        [done] = [event for event in events if event["type"] == "response.output_text.done"]
        assert done["logprobs"] == shown == events[-1]["response"]["output"][1]["content"][0]["logprobs"]


def test_log_probabilities_of_a_result_whose_log_is_gone() -> None:
    of, text = record(parts=True, logprobs=0), "<think>hm</think>Yes"
    parts = {"content": "Yes", "reasoning": "hm"}
    ended = log(text, [])[-1].model_copy(update=parts)
    message = read(frames(of, [ended]))[-1]["response"]["output"][1]
    shown = message["content"][0]["logprobs"]
    assert "Yes" in b"".join(bytes(token["bytes"]) for token in shown).decode()
    assert len(shown) < len(ended.logprobs or ())


def test_an_error_outside_the_log_has_the_number_before_it_and_both_forms() -> None:
    failure: Failure = unavailable("Redis is away")
    name, data, *_ = error_event(failure, "17").decode().split("\n")
    shown = json.loads(data.removeprefix("data: "))
    assert (name, shown["sequence_number"], shown["code"]) == ("event: error", 17, "unavailable")
    assert {name: shown["error"][name] for name in ("code", "message", "param")} == {
        name: shown[name] for name in ("code", "message", "param")
    }
    assert EVENTS.validate_python(shown).type == "error"

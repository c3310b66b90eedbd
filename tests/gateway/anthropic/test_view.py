"""A message as events: their order, from every number on, however the log was split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from petiole.contract.results.outputs import Prepared, Usage
from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.anthropic import view
from petiole.gateway.anthropic.view import MessagesView
from petiole.gateway.core.assembly import OutputAssembler
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.streams import ClientStream, Frame
from petiole.tasks.output_parsing.message import call_id

TEXT = (
    "<think>\nhm é\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
RECORD = RequestRecord(id="msg_1", kind="message", created=1, model="m", tasks=["t"], asked={"parts": True})


def log(cuts: Sequence[int], text: str = TEXT, **end: Any) -> list[StreamDelta]:
    def delta(**fields: Any) -> StreamDelta:
        return StreamDelta(task_id="t", attempt=1, **fields)

    prepared = Prepared("m", "f", 3, "<|im_start|>assistant\n", {"weather": {"city": "string"}}, None, "hermes")
    found, places = [delta(index=-1, token_ids=[], text="", prepared=prepared)], [0, *sorted({*cuts}), len(text)]
    for index, (begin, stop) in enumerate(pairwise(places)):
        found.append(delta(index=index, token_ids=[1], text=text[begin:stop]))
    last = {"finish_reason": "stop", "usage": Usage(3, 1, 9, 2), **end}
    return [*found, delta(index=len(found), token_ids=[], text="", **last)]


def frames(
    deltas: Sequence[StreamDelta], after: Sequence[int] = (), record: RequestRecord = RECORD
) -> list[Frame]:
    stream = ClientStream(MessagesView(record), record, after)
    return [*stream.begin(), *(frame for delta in deltas for frame in stream.read(0, delta))]


def whole(deltas: Sequence[StreamDelta], record: RequestRecord = RECORD) -> dict[str, Any]:
    output, reading = CollectedOutput(), OutputAssembler.of(record, 0)
    for delta in deltas:
        for part in reading.read(delta):
            output.add(part)
    return view.whole(record, [output])


def events(found: Sequence[Frame]) -> list[dict[str, Any]]:
    shown = [json.loads(frame.data) for frame in found]
    assert [frame.name for frame in found] == [event["type"] for event in shown]
    return shown


def atoms(found: Sequence[Frame]) -> list[Any]:
    """What each number stands for: a character, or an event without text."""
    seen: list[Any] = []
    for event in events(found):
        match event:
            case {"type": "content_block_delta", "index": index, "delta": {"type": kind, **rest}} if (
                kind != "signature_delta"
            ):
                seen += [(index, kind, letter) for text in rest.values() for letter in text]
            case _:
                seen.append(event)
    return seen


def test_the_events_come_in_anthropics_order() -> None:
    shown = [
        (event["type"], (event.get("delta") or event.get("content_block") or {}).get("type"))
        for event in events(frames(log([])))
    ]
    assert shown == [
        ("message_start", None),
        ("content_block_start", "thinking"),
        ("content_block_delta", "thinking_delta"),
        ("content_block_delta", "signature_delta"),
        ("content_block_stop", None),
        ("content_block_start", "text"),
        ("content_block_delta", "text_delta"),
        ("content_block_stop", None),
        ("content_block_start", "tool_use"),
        ("content_block_delta", "input_json_delta"),
        ("content_block_stop", None),
        ("message_delta", None),
        ("message_stop", None),
    ]


def test_the_first_event_says_how_long_the_prompt_is_and_the_last_what_the_cache_had() -> None:
    found = events(frames(log([])))
    assert found[0]["message"]["usage"]["input_tokens"] == 3
    assert found[-2]["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 2},
    }


@given(st.lists(st.integers(1, len(TEXT) - 1), max_size=8), st.lists(st.integers(1, len(TEXT) - 1), max_size=8))
def test_from_each_number_a_client_gets_the_rest_however_the_text_was_split(
    one: list[int], other: list[int]
) -> None:
    all_of_it = atoms(frames(log(one)))
    assert all_of_it == atoms(frames(log(other)))
    for after in range(-1, len(all_of_it)):
        assert atoms(frames(log(other), [after])) == all_of_it[after + 1 :]


def test_a_whole_message_says_what_its_stream_says() -> None:
    assert whole(log([9])) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm é", "signature": "msg_1"},
            {"type": "text", "text": "I look."},
            {
                "type": "tool_use",
                "id": call_id("t", 0),
                "name": "weather",
                "input": {"city": "Rome"},
            },
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": events(frames(log([])))[-2]["usage"],
    }


def test_a_thought_that_nobody_wants_has_no_text() -> None:
    record = structs.replace(RECORD, asked={"parts": True, "hidden": True})
    assert whole(log([5]), record)["content"][0] == {"type": "thinking", "thinking": "", "signature": "msg_1"}
    deltas = [event["delta"] for event in events(frames(log([5]), (), record)) if "delta" in event]
    kinds = [delta["type"] for delta in deltas if "type" in delta]
    assert "thinking_delta" not in kinds
    assert "signature_delta" in kinds


@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        ({"finish_reason": "stop", "stop_reason": "eos"}, "end_turn", None),
        ({"finish_reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"finish_reason": "stop", "stop_reason": 7}, "end_turn", None),
        ({"finish_reason": "length", "stop_reason": "max_tokens"}, "max_tokens", None),
        ({"finish_reason": "length", "stop_reason": "max_model_len"}, "model_context_window_exceeded", None),
        ({"finish_reason": "deadline"}, "max_tokens", None),
    ],
)
def test_why_a_message_ends(end: dict[str, Any], reason: str, sequence: str | None) -> None:
    record = structs.replace(RECORD, asked={"parts": True, "stop": ["END"]})
    deltas = log([], "a text", **end)
    said = whole(deltas, record)
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)
    assert events(frames(deltas, (), record))[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize(
    ("written", "input"),
    [
        ('{"city": "Rome"', {"INVALID_JSON": '{"city": "Rome"'}),
        ("", {}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ('{"a": "\\ud83d"}', {"INVALID_JSON": '{"a": "\\ud83d"}'}),
        ('{"a": ' + "[" * 5000, {"INVALID_JSON": '{"a": ' + "[" * 5000}),
    ],
)
def test_arguments_that_are_no_object_are_wrapped(written: str, input: dict[str, Any]) -> None:
    assert view._input(written) == input


def test_a_failed_output_ends_with_an_error_and_without_a_stop() -> None:
    found = events(frames(log([7], "a text", finish_reason="cancelled")))
    assert found[-1] == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "the generation was cancelled"},
    }
    assert "message_stop" not in [event["type"] for event in found]

"""Tools and reasoning in chat/completions: whole, streamed, and from every number on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from petiole.gateway.core.parts import Whole
from petiole.gateway.core.reading import Reading
from petiole.gateway.core.record import Record
from petiole.gateway.core.streams import Frame, Stream
from petiole.gateway.openai import chat_view
from petiole.gateway.openai.chat_view import ChatView
from petiole.outputs import Prepared, Usage
from petiole.tasks.requests.results import StreamDelta

CITY = {"enum": ["Paris", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TEXT = (
    "<think>\nhm é\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
RECORD = Record(id="c", kind="chat.completion", created=1, model="m", tasks=["t"], asked={"parts": True})


def log(cuts: Sequence[int]) -> list[StreamDelta]:
    def delta(**fields: Any) -> StreamDelta:
        return StreamDelta(task_id="t", attempt=1, **fields)

    prepared = Prepared("m", "f", 3, "<|im_start|>assistant\n", {"weather": {"city": "string"}}, None, "hermes")
    found, places = [delta(index=-1, token_ids=[], text="", prepared=prepared)], [0, *sorted({*cuts}), len(TEXT)]
    for index, (begin, end) in enumerate(pairwise(places)):
        found.append(delta(index=index, token_ids=[1], text=TEXT[begin:end]))
    last = {"finish_reason": "stop", "usage": Usage(3, 0, 9, 2)}
    return [*found, delta(index=len(found), token_ids=[], text="", **last)]


def frames(deltas: Sequence[StreamDelta], after: Sequence[int] = ()) -> list[Frame]:
    stream = Stream(ChatView(RECORD), RECORD, after)
    return [*stream.begin(), *(frame for delta in deltas for frame in stream.read(0, delta))]


def atoms(found: Sequence[Frame]) -> list[Any]:
    """What each number stands for: a character, or an event without text."""
    seen: list[Any] = []
    for frame in found:
        [choice] = json.loads(frame.data)["choices"]
        match choice["delta"]:
            case {"reasoning": text, "reasoning_content": same}:
                assert text == same
                seen += [("reasoning", letter) for letter in text]
            case {"tool_calls": [{"index": index, "function": {"arguments": text}, **rest}]}:
                seen += [rest] if rest else [(index, letter) for letter in text]
            case {"content": text} if text:
                seen += [("content", letter) for letter in text]
            case _:
                seen.append(choice["finish_reason"])
    return seen


@given(st.lists(st.integers(1, len(TEXT) - 1), max_size=8), st.lists(st.integers(1, len(TEXT) - 1), max_size=8))
def test_from_each_number_a_client_gets_the_rest_however_the_text_was_split(
    one: list[int], other: list[int]
) -> None:
    whole = atoms(frames(log(one)))
    assert whole == atoms(frames(log(other)))
    assert whole[-1] == "tool_calls"
    for after in range(-1, len(whole)):
        assert atoms(frames(log(other), [after])) == whole[after + 1 :]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_setting_leaves_one_name_of_reasoning_when_a_request_comes(name: str) -> None:
    record = structs.replace(RECORD, asked={"parts": True, "reasoning_as": name})
    stream, whole, reading = Stream(ChatView(record), record), Whole(), Reading.of(record, 0)
    sent = [frame for delta in log([9]) for frame in stream.read(0, delta)]
    for delta in log([9]):
        for part in reading.read(delta):
            whole.add(part)
    deltas = [json.loads(frame.data)["choices"][0]["delta"] for frame in sent]
    [message] = [choice["message"] for choice in chat_view.whole(record, [whole])["choices"]]
    for shown in ([key for delta in deltas for key in delta], message):
        assert {"reasoning", "reasoning_content"} & {*shown} == {name}
    assert message[name] == "hm é"


# ---------------------------------------------------------------- with a worker


@pytest.fixture
def client(tooled_client: openai.OpenAI) -> openai.OpenAI:
    return tooled_client


ASKED: dict[str, Any] = {
    "model": "tooled",
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "max_completion_tokens": 200,
    "temperature": 0,
    "tools": [TOOL],
}


@pytest.mark.e2e
def test_a_required_call_whole_and_streamed_and_a_second_round(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False, "reasoning_effort": "none"}
    [choice] = client.chat.completions.create(**asked).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or []
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    arguments, names, reason = "", [], None
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            assert piece.function is not None
            arguments += piece.function.arguments or ""
            names += [piece.function.name] if piece.function.name else []
        reason = chunk.choices[0].finish_reason or reason
    assert (arguments, names, reason) == (call.function.arguments, ["weather"], "tool_calls")
    answered = {"role": "tool", "tool_call_id": call.id, "content": "20"}
    messages = [*ASKED["messages"], choice.message.model_dump(exclude_none=True), answered]
    [again] = client.chat.completions.create(**{**ASKED, "messages": messages, "tool_choice": "none"}).choices
    assert again.message.content


@pytest.mark.e2e
def test_a_tool_choice_that_is_none_is_refused_by_name(client: openai.OpenAI) -> None:
    for more in ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, {"tool_choice": "perhaps"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**ASKED, **more)
        assert refused.value.param == "tool_choice"

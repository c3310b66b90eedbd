"""Tools and reasoning in chat/completions: whole, streamed, and from every number on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given, strategies as st
from msgspec import structs

from petiole.contract.results.outputs import Prepared, Usage
from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core.assembly import OutputAssembler
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.streams import ClientStream, Frame
from petiole.gateway.openai import chat_view
from petiole.gateway.openai.chat_view import ChatView
from tests.gateway.core.test_streams import CUTS, deltas, spelled

CITY = {"enum": ["Paris", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
TEXT = (
    "<think>\nhm é\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
RECORD = RequestRecord(id="c", kind="chat.completion", created=1, model="m", tasks=["t"], asked={"parts": True})


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
    stream = ClientStream(ChatView(RECORD), RECORD, after)
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
    stream, whole, reading = (
        ClientStream(ChatView(record), record),
        CollectedOutput(),
        OutputAssembler.of(record, 0),
    )
    sent = [frame for delta in log([9]) for frame in stream.read(0, delta)]
    for delta in log([9]):
        for part in reading.read(delta):
            whole.add(part)
    deltas = [json.loads(frame.data)["choices"][0]["delta"] for frame in sent]
    [message] = [choice["message"] for choice in chat_view.whole(record, [whole])["choices"]]
    for shown in ([key for delta in deltas for key in delta], message):
        assert {"reasoning", "reasoning_content"} & {*shown} == {name}
    assert message[name] == "hm é"


def test_every_piece_has_the_name_of_reasoning_although_there_is_none() -> None:
    deltas = [json.loads(frame.data)["choices"][0]["delta"] for frame in frames(log([9]))]
    assert all("reasoning_content" in delta for delta in deltas)
    assert {delta["reasoning_content"] for delta in deltas if "content" in delta} == {None}


def test_reasoning_is_left_out_where_a_request_says_so() -> None:
    record = structs.replace(RECORD, asked={"parts": True, "unthought": True})
    stream, whole, reading = (
        ClientStream(ChatView(record), record),
        CollectedOutput(),
        OutputAssembler.of(record, 0),
    )
    for delta in log([9]):
        for part in reading.read(delta):
            whole.add(part)
    sent = [*stream.begin(), *(frame for delta in log([9]) for frame in stream.read(0, delta))]
    said = [atom for atom in atoms(frames(log([9]))) if not (isinstance(atom, tuple) and atom[0] == "reasoning")]
    assert atoms(sent) == said
    [message] = [choice["message"] for choice in chat_view.whole(record, [whole])["choices"]]
    assert message.keys() == {"role", "content", "refusal", "tool_calls", "reasoning", "reasoning_content"}
    assert (message["reasoning"], message["reasoning_content"]) == (None, None)


PIECES = [
    "<think>", "</think>", "<tool_call>", '{"name": "weather", "arguments": {"city": "é"}}', "</tool_call>",
    "<tool", "hm é", "😀", " ", "\n", '{"name"', "I look.",
]  # fmt: skip
MARKED = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@given(MARKED | st.just(TEXT), CUTS, CUTS, st.data())
def test_log_probabilities_are_those_of_the_content_and_ids_those_of_all_tokens(
    text: str, cuts: list[int], others: list[int], data: st.DataObject
) -> None:
    asked = {"parts": True, "top_logprobs": 0, "token_ids": True}
    record = structs.replace(RECORD, asked=asked)
    announced, reading, whole = log([])[0], OutputAssembler.of(record, 0), CollectedOutput()
    for delta in [announced, *deltas(text, cuts)]:
        for part in reading.read(delta):
            whole.add(part)
    [choice] = chat_view.whole(record, [whole])["choices"]

    def streamed(cuts: list[int], after: int = -1) -> list[Frame]:
        stream = ClientStream(ChatView(record), record, [after])
        log = [announced, *deltas(text, cuts)]
        return [*stream.begin(), *(frame for delta in log for frame in stream.read(0, delta))]

    one = streamed(cuts)
    seen = one[: data.draw(st.integers(0, len(one)))]
    chunks = [
        json.loads(frame.data)["choices"][0]
        for frame in [*seen, *streamed(others, int(seen[-1].cursor) if seen else -1)]
    ]
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    assert ids == choice["token_ids"] == [token.token_id for token in spelled(text)]
    shown = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert shown == (choice["logprobs"] or {"content": []})["content"]
    assert all(chunk["delta"].get("content") or chunk["finish_reason"] for chunk in chunks if chunk["logprobs"])
    spelling = b"".join(bytes(entry["bytes"]) for entry in shown).decode(errors="replace")
    said = [piece.text for piece in whole.pieces if piece.kind == "content"]
    assert all(piece in spelling for piece in said)
    assert said or not shown


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


@pytest.mark.e2e
def test_log_probabilities_behind_a_thought_are_those_of_the_answer(client: openai.OpenAI) -> None:
    city = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
    asked: dict[str, Any] = {**ASKED, "tool_choice": "none", "reasoning_effort": "high", "response_format": city}
    asked |= {"logprobs": True, "extra_body": {"thinking_token_budget": 4, "return_token_ids": True}}
    [choice] = client.chat.completions.create(**asked).choices
    assert json.loads(choice.message.content or "")["city"] in ("Paris", "Rome")
    assert choice.message.reasoning  # type: ignore[attr-defined]
    entries = choice.logprobs.content if choice.logprobs else []
    spelling = b"".join(bytes(entry.bytes or ()) for entry in entries or ()).decode()
    assert spelling.removesuffix("<|im_end|>").strip() == choice.message.content
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content or ()]
    assert streamed == entries
    ids = [token for chunk in chunks for token in chunk.token_ids]  # type: ignore[attr-defined]
    assert ids == choice.token_ids  # type: ignore[attr-defined]
    assert len(ids) > len(streamed) + 4

    more = {
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}},
    }
    told: dict[str, Any] = {
        "model": "tooled",
        "input": "How is the weather?",
        "temperature": 0,
        "max_output_tokens": 200,
    }
    answer = client.responses.create(
        **told, **more, reasoning={"effort": "high"}, extra_body={"thinking_token_budget": 4}
    )
    [message] = [item for item in answer.output if item.type == "message"]
    [part] = message.content
    assert part.type == "output_text"
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs or ()).decode().strip() == part.text

"""Views are pure: what is streamed, joined, is the whole answer; from every number; and a failure is an event."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from petiole.contract.results.outputs import TokenLogprobs
from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core.assembly import OutputAssembler
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.parts import CollectedOutput
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.streams import ClientStream, Frame, View
from petiole.gateway.openai import chat_view, completions_view
from petiole.gateway.openai.chat_view import ChatView
from petiole.gateway.openai.completions_view import CompletionsView
from tests.gateway.core.test_streams import CUTS, TEXTS, deltas, spelled

Show = Callable[[RequestRecord, Sequence[CollectedOutput]], dict[str, Any]]
CASES: dict[str, tuple[Callable[[RequestRecord], View], Show, dict[str, Any]]] = {
    "chat": (ChatView, chat_view.whole, {"usage": True}),
    "chat with tokens": (ChatView, chat_view.whole, {"top_logprobs": 0, "token_ids": True, "prompt_ids": [7]}),
    "chat that continues": (ChatView, chat_view.whole, {"usage": True, "echo": "é "}),
    "completion": (CompletionsView, completions_view.whole, {"each": 1, "usage": True}),
    "completion with tokens": (
        CompletionsView,
        completions_view.whole,
        {"each": 1, "logprobs": 0, "echoes": ["é "]},
    ),
    "completion with tokens of the prompt": (
        CompletionsView,
        completions_view.whole,
        {"each": 1, "logprobs": 0, "echoes": ["a é😀 b"], "scored": True},
    ),
    "completion of the prompt alone": (
        CompletionsView,
        completions_view.whole,
        {"each": 1, "logprobs": 0, "echoes": ["a é😀 b"], "scored": True, "nothing_more": True},
    ),
}


def record(asked: dict[str, Any]) -> RequestRecord:
    return RequestRecord(id="x-1", kind="k", created=1, model="m", tasks=["t"], asked=asked)


def of_prompt(text: str, cuts: list[int]) -> list[StreamDelta]:
    """A prompt's part of a log. Its first token adds a mark to the text."""
    tokens = [TokenLogprobs(0, 0.0, [], ["<s>"], [list(b"<s>")]), *spelled(text)[:-1]]
    ends = sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)})
    return [
        StreamDelta(
            task_id="t",
            attempt=1,
            index=begin - len(tokens),
            token_ids=[token.token_id for token in tokens[begin:end]],
            text="",
            logprobs=tokens[begin:end],
        )
        for begin, end in itertools.pairwise([0, *ends])
    ]


def test_a_prompt_is_echoed_with_its_tokens_at_their_characters() -> None:
    """The first token is not part of the text and follows nothing; the others spell the text."""
    asked = {"each": 1, "logprobs": 0, "echoes": ["a é😀 b"], "scored": True}
    answer = whole_of(completions_view.whole, record(asked), [*of_prompt("a é😀 b", [2]), *deltas("xy", [])])
    [choice] = answer["choices"]
    found = choice["logprobs"]
    assert choice["text"] == "a é😀 bxy"
    assert found["token_logprobs"][:2] == [None, -0.5]
    assert found["top_logprobs"][0] is None
    offsets = found["text_offset"]
    assert offsets == sorted(offsets)
    assert (offsets[0], offsets[1], max(offsets)) == (0, 0, len(choice["text"]))


def whole_of(show: Show, of: RequestRecord, log: Sequence[StreamDelta]) -> dict[str, Any]:
    reading, whole = OutputAssembler(), CollectedOutput()
    for delta in log:
        for part in reading.read(delta):
            whole.add(part)
    shown: dict[str, Any] = json.loads(json.dumps(show(of, [whole])))
    return shown


def streamed(
    view: Callable[[RequestRecord], View], of: RequestRecord, log: Sequence[StreamDelta], after: int = -1
) -> list[Frame]:
    stream = ClientStream(view(of), of, [after])
    frames = stream.begin()
    for delta in log:
        frames += stream.read(0, delta)
    return frames


def joined(frames: Sequence[Frame]) -> dict[str, Any]:
    """What a client has when it has read all of these."""
    found: dict[str, Any] = {"text": "", "logprobs": [], "token_ids": [], "usage": None, "finish_reason": None}
    for frame in frames:
        chunk = json.loads(frame.data)
        found["usage"] = chunk.get("usage") or found["usage"]
        for choice in chunk["choices"]:
            found["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
            found["token_ids"] += choice.get("token_ids") or []
            found["logprobs"] += _entries(choice["logprobs"])
    return found


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"])
    return [list(one) for one in zip(*(logprobs[name] for name in sorted(logprobs)), strict=True)]


@pytest.mark.parametrize("case", CASES)
@given(text=TEXTS, cuts=CUTS, others=CUTS, data=st.data())
def test_what_is_streamed_is_the_whole_answer(
    case: str, text: str, cuts: list[int], others: list[int], data: st.DataObject
) -> None:
    view, show, asked = CASES[case]

    def log_of(cuts: list[int]) -> list[StreamDelta]:
        return (
            [*of_prompt(asked["echoes"][0], cuts), *deltas(text, cuts)]
            if "scored" in asked
            else deltas(text, cuts)
        )

    log, of = log_of(cuts), record(asked)
    answer = whole_of(show, of, log_of(others))
    [choice] = answer["choices"]
    frames = streamed(view, of, log)
    seen = frames[: data.draw(st.integers(0, len(frames)))]
    rest = streamed(view, of, log_of(others), int(seen[-1].cursor) if seen else -1)
    for read in (frames, [*seen, *rest]):
        found = joined(read)
        assert found["text"] == (choice["text"] if "text" in choice else choice["message"]["content"])
        assert (
            found["finish_reason"] == choice["finish_reason"] == ("length" if "nothing_more" in asked else "stop")
        )
        assert found["token_ids"] == (choice.get("token_ids") or [])
        assert found["logprobs"] == _entries(choice["logprobs"])
        assert found["usage"] == (answer["usage"] if asked.get("usage") else None)


@pytest.mark.parametrize("case", CASES)
def test_a_failure_is_the_last_event_and_a_whole_answers_status(case: str) -> None:
    view, show, asked = CASES[case]
    begun, last = deltas("abcdef", [1])[0], deltas("", [])[0]
    lost = {"type": "WorkersLost", "message": "3 workers died", "args": [3, "a prompt"]}
    for end, status in (
        ({"finish_reason": "error", "error": lost}, 500),
        ({"finish_reason": "cancelled", "error": None}, 499),
    ):
        log, of = [begun, last.model_copy(update=end)], record(asked)
        if end["error"] is None:
            with pytest.raises(Failure) as failure:
                whole_of(show, of, log)
            assert failure.value.status == status
        error = json.loads(streamed(view, of, log)[-1].data)["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "a prompt" not in error["message"]

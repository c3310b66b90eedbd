"""What a worker relies on, whichever engine it runs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from petiole.gpu_worker import Constraint, HandedBack, InvalidRequest, Request, SamplingParams, Scoring
from petiole.gpu_worker.engine.serving import Serving
from petiole.gpu_worker.request import FinishReason
from petiole.gpu_worker.request.handle import Handle
from petiole.tasks.output_parsing.writing import WRITINGS, composed

Any_ = Serving[Any]
PROMPT = "Count from 1 to 5."
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Reykjavik"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def asked(**sampling: Any) -> Request:
    defaults = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return Request(prompt=PROMPT, sampling=SamplingParams(**defaults | sampling))


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.005)


def begun(engine: Any_, request: Request, n: int = 2, **callbacks: Any) -> Handle:
    """A request that has some tokens."""
    handle = engine.submit(request, **callbacks)
    until(lambda: sum(len(delta.token_ids) for delta in handle._deltas) >= n or handle.done())
    return handle


def test_a_stream_is_its_result(engine: Any_) -> None:
    calls: list[str] = []
    handle = engine.submit(
        asked(),
        on_prepared=lambda *_: calls.append("prepared"),
        on_admitted=lambda *_: calls.append("admitted"),
        on_done=lambda *_: calls.append("done"),
    )
    deltas, result = list(handle), handle.result()
    assert all(a.index + len(a.token_ids) == b.index for a, b in pairwise(deltas))
    assert result.token_ids == tuple(token for delta in deltas for token in delta.token_ids)
    assert result.text == "".join(delta.text for delta in deltas)
    assert (result.finish_reason, result.stop_reason, len(result.token_ids)) == ("length", "max_tokens", 12)
    assert result.usage.completion_tokens == 12
    until(lambda: "done" in calls)
    assert calls == ["prepared", "admitted", "done"]


def test_equal_requests_get_equal_tokens(engine: Any_) -> None:
    results = engine.generate([asked(), asked(), asked()])
    assert len({result.token_ids for result in results}) == 1


def test_a_resumed_request_continues_and_counts_on(engine: Any_) -> None:
    whole = engine.submit(asked()).result()
    handle = engine.submit(replace(asked(), resume_token_ids=whole.token_ids[:5]))
    deltas = list(handle)
    assert next(delta.index for delta in deltas if delta.token_ids) == 5
    assert handle.result().token_ids == whole.token_ids
    assert "".join(delta.text for delta in deltas) in whole.text


def test_what_is_resumed_complete_ends_at_once(engine: Any_) -> None:
    whole = engine.submit(asked()).result()
    again = engine.submit(replace(asked(), resume_token_ids=whole.token_ids)).result()
    assert (again.token_ids, again.stop_reason) == (whole.token_ids, "max_tokens")


def test_stop_tokens_sequences_and_strings_end_the_output(engine: Any_) -> None:
    whole = engine.submit(asked()).result().token_ids
    assert engine.submit(asked(stop_token_ids=[whole[3]])).result().stop_reason == whole[3]
    ended = engine.submit(asked(stop_token_sequences=[whole[4:6]])).result()
    assert ended.token_ids == whole[: len(ended.token_ids)]
    assert ended.finish_reason is FinishReason.STOP
    text = engine.submit(asked()).result().text
    stopped = engine.submit(asked(stop=[text[2:5]])).result()
    assert (stopped.text, stopped.stop_reason) == (text[: text.index(text[2:5])], text[2:5])


def test_a_cancel_keeps_what_there_is(engine: Any_) -> None:
    handle = engine.submit(asked(max_tokens=200), on_delta=lambda handle, _: handle.cancel())
    result = handle.result()
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.token_ids == tuple(token for delta in handle for token in delta.token_ids)


def test_a_handback_ends_the_handle(engine: Any_) -> None:
    handle = begun(engine, asked(max_tokens=200))
    handle.hand_back()
    with pytest.raises(HandedBack):
        handle.result()
    assert engine.submit(asked()).result().finish_reason is FinishReason.LENGTH


def test_a_handback_before_the_first_token_delivers_none(engine: Any_) -> None:
    engine.pause()
    try:
        handle = engine.submit(asked())
        until(lambda: handle.prepared)
        handle.hand_back()
        with pytest.raises(HandedBack):
            handle.result()
    finally:
        engine.resume()
    assert not list(handle._deltas)


def test_a_deadline_ends_with_what_there_is(engine: Any_) -> None:
    result = engine.submit(replace(asked(max_tokens=200), deadline_s=0.02)).result()
    assert result.finish_reason in (FinishReason.DEADLINE, FinishReason.LENGTH)


def test_paused_requests_wait(engine: Any_) -> None:
    engine.pause()
    handle = engine.submit(asked())
    until(lambda: handle.prepared)
    assert not handle.admitted
    engine.resume()
    assert handle.result().finish_reason is FinishReason.LENGTH


def test_log_probabilities_come_with_their_tokens(engine: Any_) -> None:
    result = engine.submit(asked(logprobs=2, prompt_logprobs=0)).result()
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    assert {len(entry.top) for entry in result.logprobs} == {2}
    assert all(entry.logprob <= 0 for entry in result.logprobs)
    assert len(result.prompt_logprobs) == result.usage.prompt_tokens


@pytest.mark.parametrize("value", [["yes", "no"], ["12", "7"]])
def test_a_choice_is_one_of_them(engine: Any_, value: list[str]) -> None:
    request = replace(asked(ignore_eos=False), constraint=Constraint("choice", value))
    handle = engine.submit(request)
    result = handle.result()
    assert result.text in value
    assert result.finish_reason is FinishReason.STOP


def test_a_schema_is_kept_to(engine: Any_) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    made = replace(asked(max_tokens=60, ignore_eos=False), constraint=Constraint("json_schema", schema))
    assert json.loads(engine.submit(made).result().text)["a"] in ("x", "yy")


def test_an_output_that_ends_by_eos_says_so_and_so_does_its_resumption(engine: Any_) -> None:
    eos = min(engine.limits.eos_token_ids)
    made = replace(asked(ignore_eos=False, logit_bias={eos: 50.0}), constraint=Constraint("regex", "a+"))
    result = engine.submit(made).result()
    assert (result.text, result.stop_reason) == ("a", "eos")
    again = engine.submit(replace(made, resume_token_ids=result.token_ids)).result()
    assert (again.token_ids, again.stop_reason) == (result.token_ids, "eos")


def test_a_constrained_output_that_is_resumed_complete_has_its_end(engine: Any_) -> None:
    made = replace(asked(ignore_eos=False, max_tokens=2), constraint=Constraint("choice", ["12345", "12346"]))
    result = engine.submit(made).result()
    assert result.stop_reason == "max_tokens"
    again = engine.submit(replace(made, resume_token_ids=result.token_ids)).result()
    assert (again.token_ids, again.stop_reason) == (result.token_ids, "max_tokens")


def test_a_call_that_must_come_comes(engine: Any_) -> None:
    value = composed(WRITINGS["hermes"], [{"name": "weather", "parameters": CITY}], least=1, most=1, answer=None)
    made = replace(asked(max_tokens=150, ignore_eos=False), prompt=f"{PROMPT}<think>\n")
    thinking = engine.submit(replace(made, constraint=Constraint("calls", value))).result()
    assert thinking.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    called = engine.submit(replace(made, constraint=Constraint("calls", {**value, "thought": None}))).result()
    call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", called.text, re.DOTALL)
    assert call is not None
    assert json.loads(call[1])["arguments"]["city"] in ("Rome", "Reykjavik")


def test_named_tokens_have_their_log_probabilities(engine: Any_) -> None:
    result = engine.submit(asked(max_tokens=2, logprobs=0, logprob_token_ids=[5, 6, 7])).result()
    assert result.logprobs is not None
    assert [[token for token, _ in entry.top] for entry in result.logprobs] == [[5, 6, 7]] * 2


def test_what_was_resumed_is_not_searched_for_banned_words_of_another_attempt(engine: Any_) -> None:
    if engine.config.vllm_python == "":
        pytest.skip("Petiole's own engine bans them across a resumption")
    assert engine.tokenizer is not None
    word = engine.tokenizer.encode("xyzzy", add_special_tokens=False)
    handle = engine.submit(replace(asked(bad_words=["xyzzy"]), resume_token_ids=word))
    assert handle.result().token_ids[: len(word)] == tuple(word)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("max_tokens", {"sampling": SamplingParams(max_tokens=10_000)}),
        ("images", {"images": [b"no image"]}),
        ("adapter", {"adapter": "nobody"}),
        ("prompt", {"prompt": ""}),
        ("constraint", {"constraint": Constraint("regex", "(")}),
        ("texts", {"prompt": None, "texts": ["a"]}),
        ("documents", {"prompt": None, "texts": [("a", "b")], "scoring": Scoring(field="documents")}),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(engine: Any_, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        engine.submit(replace(asked(), **changes)).result()
    assert refused.value.field.startswith(field)
    assert engine.submit(asked()).result()


def test_an_engine_describes_itself(engine: Any_) -> None:
    facts, stats = engine.facts(), engine.stats()
    assert facts["max_model_len"] == engine.limits.max_model_len == 256
    assert stats["slots"] == engine.config.max_num_seqs
    assert stats["kernels"] in facts.get("engine", stats["kernels"])
    assert engine.limits.fingerprint
    assert engine.healthy
    assert engine.heartbeat_age_s() < 60


def test_many_requests_end_once_each(engine: Any_) -> None:
    ends: list[str] = []
    handles = [
        engine.submit(
            replace(asked(), priority=k % 3), on_done=lambda handle: ends.append(handle.request.request_id)
        )
        for k in range(40)
    ]
    for handle in handles[::3]:
        handle.cancel()
    for handle in handles[1::3]:
        handle.hand_back()
    until(lambda: len(ends) >= 40)
    assert len(ends) == len(set(ends)) == 40

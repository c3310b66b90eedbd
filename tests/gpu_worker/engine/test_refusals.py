"""Bad input: refused on a preparation thread with field, limit and value; the engine and the others go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from petiole.contract.requests.sampling import check
from petiole.gpu_worker import Constraint, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.preparation.preparation import check_tokens, resolve_seed
from tests.support.toy_engine import Expected, expected, request, toy_engine

BAD: dict[str, tuple[Request, str]] = {
    "no prompt": (Request(), "prompt"),
    "two prompts": (Request(prompt=[1], messages=[{"role": "user", "content": "x"}]), "prompt"),
    "tools without messages": (Request(prompt=[1], tools=[{}]), "tools"),
    "template variables without messages": (
        Request(prompt=[1], chat_template_kwargs={"x": 1}),
        "chat_template_kwargs",
    ),
    "a message to continue without messages": (
        Request(prompt=[1], continue_final_message=True),
        "continue_final_message",
    ),
    "a message to continue by name": (
        Request(messages=[{"role": "user", "content": "x"}], continue_final_message="content"),  # type: ignore[arg-type]
        "continue_final_message",
    ),
    "empty token list": (request([]), "prompt"),
    "empty text": (Request(prompt=""), "prompt"),
    "over the context": (request([1] * 96), "prompt"),
    "a token beyond the vocabulary": (request([1, 48]), "prompt[1]"),
    "a text with a token that only the tokenizer has": (Request(prompt="ab9"), "prompt"),
    "a negative token": (request([-1]), "prompt[0]"),
    "a token that is no number": (request([1, "x"]), "prompt[1]"),  # type: ignore[list-item]
    "a prompt that is no list": (Request(prompt=7), "prompt"),  # type: ignore[arg-type]
    "lone surrogates": (Request(prompt="a\ud800"), "prompt"),
    "max_tokens 0": (request(max_tokens=0), "max_tokens"),
    "max_tokens too big": (request(max_tokens=97), "max_tokens"),
    "max_tokens no number": (request(max_tokens="9"), "max_tokens"),  # type: ignore[arg-type]
    "max_tokens true": (request(max_tokens=True), "max_tokens"),
    "min_tokens below 0": (request(min_tokens=-1), "min_tokens"),
    "min_tokens no number": (request(min_tokens="9"), "min_tokens"),
    "min_tokens above max_tokens": (request(max_tokens=8, min_tokens=9), "min_tokens"),
    "nothing but end tokens": (request(min_tokens=1, allowed_token_ids=[0, 5], stop_token_ids=[5]), "min_tokens"),
    "all but end tokens banned": (request(min_tokens=1, banned_token_ids=range(1, 48)), "min_tokens"),
    "temperature below 0": (request(temperature=-0.1), "temperature"),
    "temperature too high": (request(temperature=1e39), "temperature"),
    "temperature beyond floats": (request(temperature=10**400), "temperature"),
    "temperature not finite": (request(temperature=float("nan")), "temperature"),
    "top_k below 0": (request(top_k=-1), "top_k"),
    "top_p 0": (request(top_p=0.0), "top_p"),
    "top_p above 1": (request(top_p=1.1), "top_p"),
    "min_p above 1": (request(min_p=1.5), "min_p"),
    "repetition_penalty 0": (request(repetition_penalty=0.0), "repetition_penalty"),
    "repetition_penalty too high": (request(repetition_penalty=1e300), "repetition_penalty"),
    "presence_penalty": (request(presence_penalty=3.0), "presence_penalty"),
    "frequency_penalty": (request(frequency_penalty=-3.0), "frequency_penalty"),
    "logit_bias": (request(logit_bias={99: 1.0}), "logit_bias"),
    "logit_bias too high": (request(logit_bias={1: 1e300}), "logit_bias[1]"),
    "logit_bias value": (request(logit_bias={1: float("inf")}), "logit_bias[1]"),
    "banned": (request(banned_token_ids=[48]), "banned_token_ids[0]"),
    "all banned": (request(banned_token_ids=range(48)), "banned_token_ids"),
    "allowed and banned": (request(allowed_token_ids=[1], banned_token_ids=[1]), "allowed_token_ids"),
    "logprobs": (request(logprobs=21), "logprobs"),
    "seed": (request(seed=1.5), "seed"),
    "stop as a string": (request(stop="abc"), "stop"),
    "an empty stop string": (request(stop=["a", ""]), "stop[1]"),
    "stop token": (request(stop_token_ids=[-1]), "stop_token_ids[0]"),
    "an empty stop sequence": (request(stop_token_sequences=[[]]), "stop_token_sequences[0]"),
    "ignore_eos": (request(ignore_eos="no"), "ignore_eos"),  # type: ignore[arg-type]
    "skip_special_tokens": (request(skip_special_tokens=0), "skip_special_tokens"),  # type: ignore[arg-type]
    "include_stop": (request(include_stop="yes"), "include_stop"),  # type: ignore[arg-type]
    "priority": (request(priority="high"), "priority"),
    "deadline": (request(deadline_s=0), "deadline_s"),
    "deadline beyond what a lock can wait": (request(deadline_s=1e12), "deadline_s"),
    "images": (request(images=[b"x"]), "images"),
    "adapter without slots": (request(adapter="a"), "adapter"),
    "salt": (request(salt=3), "salt"),
    "resumed beyond the budget": (request(max_tokens=1, resume_token_ids=[1, 2]), "resume_token_ids"),
    "resumed against the constraint": (
        request(resume_token_ids=[3], constraint=Constraint("regex", 5)),
        "resume_token_ids[0]",
    ),
}


@pytest.mark.parametrize(("bad", "field"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_by_field_and_hurts_nobody(bad: Request, field: str) -> None:
    with toy_engine() as engine:
        before, refused, after = (engine.submit(r) for r in (request(), bad, request()))
        with pytest.raises(InvalidRequest) as caught:
            refused.result(timeout=30)
        assert caught.value.field == field
        assert caught.value.limit
        assert not refused.admitted
        for handle in (before, after):
            assert Expected.of(handle.result(timeout=30)) == expected(request())


def test_a_refusal_names_the_token_id_or_the_setting() -> None:
    for bad, named in (
        (request(logit_bias={1: 1.0, 99: 1.0}), "logit_bias: must have token ids from 0 to 47 as keys, got 99"),
        (request(adapter="a"), "PETIOLE_LORA_SLOTS"),
    ):
        with toy_engine() as engine, pytest.raises(InvalidRequest, match=named):
            engine.generate([bad])


def test_a_huge_prompt_is_refused_in_a_short_message() -> None:
    with toy_engine() as engine, pytest.raises(InvalidRequest) as caught:
        engine.generate([Request(prompt="a" * 1_000_000)])
    assert "1000000 tokens" in str(caught.value)
    assert len(str(caught.value)) < 200


def test_more_log_probabilities_than_tokens_are_refused() -> None:
    """A device that is asked for them fails, and the engine with it."""
    check_tokens(SamplingParams(logprobs=12), 12)
    with pytest.raises(InvalidRequest, match="logprobs: must be at most the size of the vocabulary, 12"):
        check_tokens(SamplingParams(logprobs=13), 12)


@settings(max_examples=300, deadline=None)
@given(
    field=st.sampled_from(sorted(SamplingParams.__dataclass_fields__)),
    value=st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=3),
        st.lists(st.integers(), max_size=3),
    ),
)
def test_any_value_of_any_sampling_field_is_taken_or_refused_by_name(field: str, value: Any) -> None:
    sampling = replace(SamplingParams(), **{field: value})
    refusal = ""
    try:
        check(sampling)
        check_tokens(sampling, 48)
    except InvalidRequest as error:
        refusal = error.field
    assert refusal.startswith(field) or not refusal


def test_the_seed_follows_from_the_request_id() -> None:
    one, same, other = (Request(prompt=[1], request_id=name) for name in ("a", "a", "b"))
    assert resolve_seed(one) == resolve_seed(same) != resolve_seed(other)
    assert resolve_seed(request(seed=7)) == 7
    assert 0 <= resolve_seed(request(seed=-1)) < 1 << 64

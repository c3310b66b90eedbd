"""Options of the text on its way into the model and out of it, with the model and tokenizer that ship."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import (
    Engine,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
    models,
)
from petiole.gpu_worker.preparation.output import RequestOutput
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.scheduling.stopping import StopRules
from petiole.gpu_worker.text import Tokenizer, load_tokenizer
from tests.support import tokenizers as samples

TINY = Path(models.__file__).parent / "petiole_tiny"
TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{{ opening or '' }}{% endif %}"""
QUESTION = {"role": "user", "content": "Count from 1 to 9."}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    shipped = load_tokenizer(TINY)
    return Tokenizer(shipped.backend, eos_token_ids=shipped.eos_token_ids, chat_templates={"default": TEMPLATE})


@pytest.fixture(scope="module")
def engine(tokenizer: Tokenizer) -> Iterator[Engine]:
    with Engine(EngineConfig(device="cpu", dtype="float32", num_pages=4000), tokenizer=tokenizer) as engine:
        yield engine


@pytest.fixture(scope="module")
def mixed(tokenizer: Tokenizer) -> SamplingParams:
    """Special tokens and text in turns; the text has incomplete characters."""
    text = [tokenizer.backend.token_to_id(token) for token in ("a", "1", "Ġ", "ð")]
    allowed = (*tokenizer.special_token_ids, *text)
    return SamplingParams(
        max_tokens=64, temperature=100, allowed_token_ids=allowed, seed=5, skip_special_tokens=False
    )


def test_special_tokens_are_in_the_text_but_not_the_one_that_ends_it(
    engine: Engine, tokenizer: Tokenizer, mixed: SamplingParams
) -> None:
    for seed in range(8):
        deltas: list[str] = []
        asked = Request(prompt="a", sampling=replace(mixed, seed=seed))
        result = engine.submit(asked, on_delta=lambda _, delta, to=deltas: to.append(delta.text)).result()
        shown = result.token_ids[:-1] if result.stop_reason == "eos" else result.token_ids
        assert result.text == "".join(deltas) == tokenizer.decode(shown, skip_special_tokens=False)


def test_a_resumed_output_has_the_same_special_tokens_in_its_text(engine: Engine, mixed: SamplingParams) -> None:
    sampling = replace(mixed, ignore_eos=True, stop=["<|im_end|><|im_start|>"])
    whole = engine.generate([Request(prompt="a", sampling=sampling)])[0]
    assert whole.text.count("<|im_start|>") > 1
    resumed = [
        Request(prompt="a", sampling=sampling, resume_token_ids=whole.token_ids[:n])
        for n in range(len(whole.token_ids) + 1)
    ]
    for result in engine.generate(resumed):
        assert (result.text, result.token_ids, result.stop_reason) == (
            whole.text,
            whole.token_ids,
            whole.stop_reason,
        )


def test_a_stop_string_may_be_a_special_token(engine: Engine, mixed: SamplingParams) -> None:
    shown = replace(mixed, ignore_eos=True, stop=["<|im_start|>"])
    stopped, skipped = engine.generate(
        [Request(prompt="a", sampling=sampling) for sampling in (shown, replace(shown, skip_special_tokens=True))]
    )
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, "<|im_start|>")
    assert "<|im_start|>" not in stopped.text
    assert skipped.finish_reason is FinishReason.LENGTH
    assert "<|" not in skipped.text


@pytest.mark.parametrize("given", ["stop", "stop_token_ids"])
def test_include_stop_adds_what_ended_the_output_and_changes_nothing_else(
    engine: Engine, tokenizer: Tokenizer, given: str
) -> None:
    free = engine.generate([Request(prompt="Count from 1 to 9.", sampling=GREEDY)])[0]
    stop = free.text[4:7] if given == "stop" else tokenizer.decode(free.token_ids[-1:])
    assert stop
    cut_off = replace(GREEDY, **{given: [stop if given == "stop" else free.token_ids[-1]]})
    request = Request(prompt="Count from 1 to 9.", sampling=replace(cut_off, include_stop=True))
    without, whole = engine.generate([replace(request, sampling=cut_off), request])
    assert (without.token_ids, without.stop_reason) == (whole.token_ids, whole.stop_reason)
    assert whole.text == without.text + stop
    resumed = [replace(request, resume_token_ids=whole.token_ids[:n]) for n in range(len(whole.token_ids) + 1)]
    assert {result.text for result in engine.generate(resumed)} == {whole.text}


def test_an_end_token_is_text_if_stops_are_included_and_special_tokens_shown(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    end = min(tokenizer.eos_token_ids)
    for shown, text in ((False, tokenizer.decode([end], skip_special_tokens=False)), (True, "")):
        sampling = SamplingParams(
            max_tokens=4, temperature=0, allowed_token_ids=[end], include_stop=True, skip_special_tokens=shown
        )
        result = engine.generate([Request(prompt="a", sampling=sampling)])[0]
        assert (result.text, result.stop_reason) == (text, "eos")


@pytest.mark.parametrize(
    ("messages", "options", "prompt"),
    [
        (
            [QUESTION],
            {"chat_template_kwargs": {"opening": "Well: "}},
            "<|im_start|>user\nCount from 1 to 9.<|im_end|>\n<|im_start|>assistant\nWell: ",
        ),
        (
            [QUESTION, {"role": "assistant", "content": "1, 2,"}],
            {"continue_final_message": True, "chat_template_kwargs": {"opening": "not read"}},
            "<|im_start|>user\nCount from 1 to 9.<|im_end|>\n<|im_start|>assistant\n1, 2,",
        ),
    ],
    ids=["chat_template_kwargs", "continue_final_message"],
)
def test_a_conversation_is_the_prompt_that_its_template_makes(
    engine: Engine, messages: Any, options: Any, prompt: str
) -> None:
    asked = Request(messages=messages, sampling=GREEDY, **options)
    answer, same = engine.generate([asked, Request(prompt=prompt, sampling=GREEDY)])
    assert (answer.text, answer.usage.prompt_tokens) == (same.text, same.usage.prompt_tokens)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"prompt": "hello"}, " hello"),
        ({"messages": [QUESTION]}, "hello"),
        ({"messages": [QUESTION], "continue_final_message": True}, " hello"),
    ],
    ids=["prompt", "answer", "continued message"],
)
def test_what_continues_a_text_keeps_its_first_space(options: Any, text: str) -> None:
    """With Llama 2's tokenizer, which drops it at the beginning of a text."""
    tokenizer = Tokenizer(samples.sentencepiece())
    hello = tokenizer.backend.token_to_id("▁hello")
    output = RequestOutput(Handle(Request(**options), None))  # type: ignore[arg-type]
    output.open(tokenizer, [hello], StopRules.of(SamplingParams(), frozenset(), 1, 96))
    assert output.push([hello], terminal=False) == ([hello], text)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": b"y"}}, "chat_template_kwargs.x"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_a_template_cannot_do_fails_that_request(engine: Engine, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        engine.generate([Request(messages=[QUESTION], sampling=GREEDY, **options)])
    assert caught.value.field == field


def test_log_probabilities_have_texts_and_bytes_where_asked(
    engine: Engine, tokenizer: Tokenizer, mixed: SamplingParams
) -> None:
    asked = replace(mixed, logprobs=3, logprob_texts=True)
    result = engine.submit(Request(prompt="hello", sampling=asked)).result(60)
    assert result.logprobs is not None
    whole = b""
    for entry in result.logprobs:
        assert entry.texts is not None
        assert entry.bytes is not None
        spelled = [bytes(one) for one in entry.bytes]
        assert spelled == [tokenizer.token_bytes(token) for token in (entry.token_id, *dict(entry.top))]
        assert entry.texts == [one.decode(errors="replace") for one in spelled]
        whole += spelled[0]
    assert whole.decode(errors="replace") == tokenizer.decode(result.token_ids, skip_special_tokens=False)
    plain = engine.submit(Request(prompt="hello", sampling=replace(asked, logprob_texts=False))).result(60)
    assert plain.logprobs == tuple(
        replace(entry, texts=None, bytes=None, length=None) for entry in result.logprobs
    )


def test_texts_of_log_probabilities_need_log_probabilities(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^logprob_texts: needs logprobs"):
        engine.submit(Request(prompt="hello", sampling=replace(GREEDY, logprob_texts=True))).result(60)


def test_the_lengths_of_an_outputs_tokens_are_those_without_the_prompt(engine: Engine) -> None:
    plain = replace(GREEDY, logprobs=0, logprob_texts=True)
    scored = replace(plain, prompt_logprobs=0)
    without, beside = engine.generate([Request(prompt="Count", sampling=sampling) for sampling in (plain, scored)])
    assert without.logprobs
    assert beside.logprobs
    assert [entry.length for entry in beside.logprobs] == [entry.length for entry in without.logprobs]
    assert beside.prompt_logprobs
    assert b"".join(bytes(entry.bytes[0]) for entry in beside.prompt_logprobs if entry.bytes) == b"Count"
    assert {entry.length for entry in beside.prompt_logprobs} == {None}

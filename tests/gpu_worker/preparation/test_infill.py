"""`suffix`: what stands between a prompt and a suffix, in the marks of each family."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from petiole.gpu_worker import EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.preparation.prompts import PromptInputs, PromptReader
from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.text import Tokenizer
from tests.support import tokenizers as samples

LIMITS = ModelLimits("m", "f", 500, 120, n_pages=1000, page_size=1, max_batch_size=2)
PREFIX, SUFFIX = "hello the", "fox"


def marked(backend: tokenizers.Tokenizer, *marks: str) -> Tokenizer:
    backend.add_special_tokens([tokenizers.AddedToken(mark, special=True, normalized=False) for mark in marks])
    return Tokenizer(backend)


def read(tokenizer: Tokenizer, prompt: Any = PREFIX, suffix: str = SUFFIX, **given: Any) -> PromptInputs:
    reader = PromptReader(EngineConfig(), LIMITS, tokenizer, frozenset())
    return reader.of(Request(prompt=prompt, suffix=suffix, **given))


@pytest.mark.parametrize(
    ("marks", "form", "ends"),
    [
        (["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], "{0}P{2}S{1}", ["<|file_sep|>", "<|fim_pad|>"]),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], "{0}P{2}S{1}", ["<|endoftext|>", "<file_sep>"]),
        (["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], "{0}P{1}S{2}", ["<|EOT|>"]),
        (["<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"], "{1}S{0}P{2}", []),
    ],
    ids=["qwen2.5-coder", "starcoder2", "deepseek-coder", "seed-coder"],
)
def test_a_tokenizer_of_bytes(marks: list[str], form: str, ends: list[str]) -> None:
    tokenizer = marked(samples.byte_level(), *marks, *ends)
    written = form.replace("P", PREFIX).replace("S", SUFFIX).format(*marks)
    made = read(tokenizer)
    assert made.prompt.ids == tokenizer.encode(written)
    ids = [tokenizer.backend.token_to_id(text) for text in (*marks, *ends)]
    assert sorted(made.request.sampling.stop_token_ids) == sorted(ids)


@pytest.mark.parametrize(
    ("marks", "before", "behind"),
    [
        (["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"], "▁<PRE>", ["▁<SUF>", "▁<MID>"]),
        (["[PREFIX]", "[SUFFIX]", "[MIDDLE]"], "[PREFIX]", ["[SUFFIX]"]),
    ],
    ids=["codellama", "codestral"],
)
def test_a_tokenizer_that_adds_spaces_adds_none_before_a_suffix(
    marks: list[str], before: str, behind: list[str]
) -> None:
    tokenizer = marked(samples.sentencepiece(), *marks)
    tokens = [tokenizer.backend.id_to_token(token) for token in read(tokenizer).prompt.ids]
    prompt, suffix = [before, "▁hello", "▁the"], [behind[0], "f", "o", "x", *behind[1:]]
    assert tokens == ["<s>", *(prompt + suffix if behind[1:] else suffix + prompt)]
    bare = read(tokenizer, add_special_tokens=False).prompt.ids
    assert bare == read(tokenizer).prompt.ids[1:]
    for odd in (" fox", "\nfox", "é fox", "😀"):
        ids = read(tokenizer, suffix=odd).prompt.ids
        at = ids.index(tokenizer.backend.token_to_id(behind[0])) + 1
        end = ids.index(tokenizer.backend.token_to_id(behind[1] if behind[1:] else before))
        assert tokenizer.backend.decode(ids[at - 1 : end], skip_special_tokens=False).endswith(odd)
        assert tokenizer.backend.id_to_token(ids[at]) != "▁" or odd.startswith(" ")


def test_a_mark_in_a_text_and_an_empty_prompt() -> None:
    tokenizer = marked(samples.byte_level(), "<fim_prefix>", "<fim_middle>", "<fim_suffix>")
    assert read(tokenizer, "").prompt.ids == tokenizer.encode(f"<fim_prefix><fim_suffix>{SUFFIX}<fim_middle>")
    assert not read(tokenizer, sampling=SamplingParams(ignore_eos=True)).request.sampling.stop_token_ids
    own = read(tokenizer, sampling=SamplingParams(stop_token_ids=[7])).request.sampling.stop_token_ids
    assert own[0] == 7
    assert len(own) == 4


@pytest.mark.parametrize(
    ("given", "field", "limit"),
    [
        ({"prompt": [1, 2]}, "suffix", "needs a prompt that is text"),
        ({"truncate": "start"}, "truncate", "cannot be combined with suffix"),
        ({"prompt": "x" * 200}, "prompt", "must have at most 119 tokens"),
        ({"suffix": "x" * 200}, "suffix", "must have at most 119 tokens"),
        ({"prompt": "x" * 60, "suffix": "x" * 60}, "prompt", "with its suffix"),
        ({"images": [PreparedImage]}, "suffix", "cannot be combined with images"),
    ],
)
def test_what_is_refused(given: dict[str, Any], field: str, limit: str) -> None:
    tokenizer = marked(samples.byte_level(), "<fim_prefix>", "<fim_middle>", "<fim_suffix>")
    with pytest.raises(InvalidRequest, match=limit) as refused:
        read(tokenizer, **given)
    assert refused.value.field == field


@pytest.mark.parametrize(("n", "told"), [(30, "30 tokens"), (1_000_000, "of 1000000 characters")])
def test_a_tokenizer_that_adds_spaces_names_a_suffix_that_is_too_long(n: int, told: str) -> None:
    """A text of megabytes without encoding all of it."""
    tokenizer = marked(samples.sentencepiece(), "[PREFIX]", "[SUFFIX]", "[MIDDLE]")
    limits = replace(LIMITS, max_model_len=20)
    with pytest.raises(InvalidRequest, match=f"must have at most 19 tokens, got .*{told}") as refused:
        PromptReader(EngineConfig(), limits, tokenizer, frozenset()).of(Request(prompt=PREFIX, suffix="z" * n))
    assert refused.value.field == "suffix"


def test_a_model_without_such_tokens_refuses_by_name() -> None:
    with pytest.raises(InvalidRequest, match="needs a model with tokens for filling in the middle") as refused:
        read(Tokenizer(samples.byte_level()))
    assert refused.value.field == "suffix"

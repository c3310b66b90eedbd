"""A prompt and a suffix as one prompt whose answer is what stands between both: fill-in-the-middle.

Each family of models for code has learnt marks of its own, which are tokens of its vocabulary. So the vocabulary
says how a model is asked. A suffix has no space before it that its tokenizer would add to a text."""

# ruff: noqa: RUF001 - DeepSeek's marks have letters that look like others

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request.requests import check_text
from petiole.gpu_worker.text import Tokenizer

_NEUTRAL = "\N{WHITE SMILING FACE}"
"""A character that forms a token with no other, as in the code of CodeLlama and of Codestral."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The texts of a family's tokens. `middle`: behind both texts, if anything. `ends`: what a model may write
    behind the middle beside its EOS, of which its vocabulary need not have all."""

    prefix: str
    suffix: str
    middle: str | None
    ends: tuple[str, ...]
    suffix_first: bool = False

    def required(self) -> Iterator[str]:
        yield self.prefix
        yield self.suffix
        if self.middle is not None:
            yield self.middle


FORMS = (
    # Qwen2.5-Coder, CodeGemma, Granite
    Marks(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder 2
    Marks(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<|endoftext|>", "<fim_pad>", "<repo_name>", "<file_sep>"),
    ),
    # DeepSeek-Coder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>", "<｜end▁of▁sentence｜>")),
    # CodeLlama
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),
    # Seed-Coder
    Marks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", (), suffix_first=True),
    # Codestral
    Marks("[PREFIX]", "[SUFFIX]", None, (), suffix_first=True),
)


@dataclass(frozen=True, slots=True)
class Infill:
    """The token ids of a prompt with its marks, and those that end what stands between both texts."""

    ids: list[int]
    ends: list[int]


def infill(prompt: str, suffix: str, tokenizer: Tokenizer, *, add_special_tokens: bool, max_tokens: int) -> Infill:
    """Raises InvalidRequest, which names `suffix` if the model has no such marks, or `prompt` if both together
    have more than `max_tokens` tokens."""
    found = next((form for form in FORMS if _has(tokenizer, form)), None)
    if found is None:
        limit = (
            "needs a model with tokens for filling in the middle, such as <|fim_prefix|>, and this one has none"
        )
        raise InvalidRequest("suffix", limit, f"{len(suffix)} characters")
    before = [
        _id(tokenizer, found.prefix),
        *tokenizer.encode(prompt, add_special_tokens=False, max_tokens=max_tokens),
    ]
    behind = [_id(tokenizer, found.suffix), *_without_space(suffix, tokenizer, max_tokens)]
    ids = _head(tokenizer) if add_special_tokens else []
    ids += [*behind, *before] if found.suffix_first else [*before, *behind]
    if found.middle is not None:
        ids.append(_id(tokenizer, found.middle))
    if len(ids) > max_tokens:
        raise InvalidRequest(
            "prompt", f"must have at most {max_tokens} tokens with its suffix", f"{len(ids)} tokens"
        )
    others = (*found.required(), *found.ends)
    return Infill(ids, [_id(tokenizer, text) for text in others if _knows(tokenizer, text)])


def _head(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer adds before a text, such as BOS."""
    encoded = tokenizer.encoding(".", field="suffix", add_special_tokens=True)
    n = next((k for k, special in enumerate(encoded.special_tokens_mask) if not special), 0)
    return list(encoded.ids[:n])


def _without_space(text: str, tokenizer: Tokenizer, max_tokens: int) -> list[int]:
    """The tokens of a text that follows others. SentencePiece's tokenizers add a space to a text, but not behind
    another character."""
    first = tokenizer.encoding(".", field="suffix").tokens[:1]
    if not first or not first[0].startswith("▁"):
        return tokenizer.encode(text, field="suffix", add_special_tokens=False, max_tokens=max_tokens)
    check_text("suffix", text)
    tokenizer.check_length("suffix", text, max_tokens)
    encoded = tokenizer.encoding(_NEUTRAL + text, field="suffix")
    n = next((k for k, (_, end) in enumerate(encoded.offsets) if end > len(_NEUTRAL)), len(encoded.ids))
    return tokenizer.of_length("suffix", list(encoded.ids[n:]), max_tokens)


def _has(tokenizer: Tokenizer, form: Marks) -> bool:
    return all(_knows(tokenizer, text) for text in form.required())


def _knows(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.backend.token_to_id(text) is not None


def _id(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.backend.token_to_id(text)
    assert found is not None, text
    return found

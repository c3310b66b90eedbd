"""The parts of an output that the engine makes and `tasks` writes and reads: each is declared once, here.

In JSON a field that has its default is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token, a stop sequence or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one position, after penalties and masks, before temperature; `top` are pairs of
    token id and log probability.

    `texts`, `bytes`: those of this token and then of those in `top`, if `logprob_texts` was given. A token may be
    a part of a character, so its text may not say what its bytes are. `length`, with these: how many characters
    the output has up to and including this token. A hidden token adds none."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    texts: list[str] | None = None
    bytes: list[list[int]] | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of the output. `index` is the position of `token_ids[0]` in the output.

    `text` may lag behind `token_ids` while a character is incomplete or the text could become a stop string. The
    last delta contains the rest; it alone has a `finish_reason`. `bins`: for a model with values, the numbers
    that each token carries (see `request.values`; a text token carries none). `values`: what these stand for.
    `items`: the point or box of a skill's answer that each token completes; None if no token completes any.
    `vectors`: of a model of texts, the vector of each text, `sparse` and `colbert` those of its tokens (see
    `contract.results.vectors`); `scores`: the numbers that each text or pair was given. With either, in
    `token_ids` stands each text's number of tokens.

    With `prompt_logprobs`, the deltas of the prompt come before those of the output, at negative indices: the last
    token of the prompt is at -1. They have `token_ids` and `logprobs`, and no text. Nothing precedes the prompt's
    first token, so its `logprob` is 0 and its `top` is empty."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    values: tuple[tuple[float, ...], ...] | None = None
    bins: tuple[tuple[int, ...], ...] | None = None
    items: tuple[Mapping[str, float] | None, ...] | None = None
    vectors: tuple[str, ...] | None = None
    scores: tuple[tuple[float, ...], ...] | None = None
    sparse: tuple[str, ...] | None = None
    colbert: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens. `cached_prompt_tokens`: how many of the prompt's tokens were in the prefix cache.
    `reasoning_tokens`: how many of the output's tokens are reasoning, where that is known."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds since arrival in the engine; `prefill_ms` is a duration, from admission to the first token.
    `ended_at`: when the output ended, in seconds since 1970."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float | None
    total_ms: float
    ended_at: float | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is validated, tokenized and counted, and not admitted yet.

    `prompt_end`: the last tokens of the prompt as text, as the template has rendered them. `tool_types`: by tool,
    the types of its parameters, such as "integer|null". `format`: how the output is divided into reasoning,
    content and calls: a name in `tasks.output_parsing.formats`, or a template. `reasoning`: the short ones of the
    variables that the template was given, such as `enable_thinking`."""

    model: str
    fingerprint: str
    prompt_tokens: int
    prompt_end: str
    tool_types: dict[str, dict[str, str]] | None = None
    reasoning: dict[str, Any] | None = None
    format: str | dict[str, Any] | None = None

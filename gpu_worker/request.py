"""What goes into the engine and what comes out of it.

A `Request` is immutable once submitted. The engine answers with `Delta`s, each carrying the index of its
first token, and exactly one end: a `Result`, an error, or a handback. Every position is counted in tokens
*generated for this request*, prompt excluded, from 0; a resumed request goes on counting where the earlier
attempt stopped, so that deltas of several attempts join without a seam.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from gpu_worker.constraints import ConstraintState


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token, a stop sequence or a stop string
    LENGTH = "length"  # max_tokens or the model's context
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    `temperature` 0, and what is below 1e-6, is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `seed` None
    means "derived from the request id". `logprobs` None is off; k returns the chosen token's and the k likeliest.
    Stop conditions are checked in this order: `stop_token_sequences`, EOS (unless `ignore_eos`), `stop_token_ids`
    (and the model's own), `max_tokens`; `stop` strings are matched on the text.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    seed: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    stop_token_sequences: Sequence[Sequence[int]] = ()


ConstraintKind = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must match. `value`: a JSON schema (mapping), a regular expression, a list of
    strings, or a grammar in Lark syntax."""

    kind: ConstraintKind
    value: Any


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue: exactly one of `prompt` (text or token ids) and `messages` (chat) is given.

    `priority`: smaller runs first. `deadline_s`: seconds from admission after which the request ends with what
    it has and finish reason `deadline`. `resume_token_ids`: tokens that earlier attempts already delivered; the
    engine continues after them and they count as output. `resume_adapter_key`: the `Handle.adapter_key` that made
    them; with another one, the request ends with AdapterChanged. `salt` separates prefix caches of tenants.
    `constraint` may also be a state of the caller's own, such as a skill's
    (`gpu_worker.constraints.SkillConstraint`).
    """

    prompt: str | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    sampling: SamplingParams = SamplingParams()
    constraint: Constraint | ConstraintState | None = None
    adapter: str | None = None
    images: Sequence[bytes] = ()
    priority: int = 0
    deadline_s: float | None = None
    salt: str = ""
    resume_token_ids: Sequence[int] = ()
    resume_adapter_key: str | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one position, after penalties and masks, before temperature."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream. `index` is the position of `token_ids[0]` in the output.

    `text` may lag behind `token_ids` (an incomplete character, or text that may become a stop string); the
    last delta, the one with a `finish_reason`, brings the rest. `values`: what the model decoded beside each token
    (coordinates and sizes), for models that do.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    values: tuple[tuple[float, ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds since arrival in the engine, but for `prefill_ms`, a duration."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float | None
    total_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """How a request ended. `stop_reason` says which condition: "eos", a stop token id, a stop string or
    sequence, "max_tokens", "max_model_len", or None."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    model: str
    logprobs: tuple[TokenLogprobs, ...] | None = None

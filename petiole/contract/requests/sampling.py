"""The options of sampling, each declared once: the engine's `SamplingParams`, from which the requests have them.

`generate` and `chat` take these options by `Sampling`, the same as a model of pydantic. The engine checks the
parameters of callers without `tasks` by the same declaration: `check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import Field, PlainValidator, create_model, model_validator

from petiole.contract import limits
from petiole.contract.errors import InvalidRequest, shorten
from petiole.contract.limits import MAX_BAD_WORDS, MAX_BIASES, MAX_PROMPT_TOKENS, MAX_STOPS
from petiole.contract.requests.bounds import Entries
from petiole.contract.requests.validation import Declared, Given, validate


def _tokens_or_rest(value: object) -> int | Literal["rest"]:
    """A validator of its own: the errors of a union would name its parts."""
    if value == "rest":
        return "rest"
    if type(value) is not int:
        raise InvalidRequest("max_tokens", 'must be an integer, or "rest"', shorten(value))
    if value < 1:
        raise InvalidRequest("max_tokens", "must be at least 1", value)
    return value


MaxTokens = Annotated[int | Literal["rest"], PlainValidator(_tokens_or_rest)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[Sequence[TokenId], Entries(MAX_PROMPT_TOKENS)]
SomeTokenIds = Annotated[Sequence[TokenId], Entries(MAX_PROMPT_TOKENS, least=1)]
LogitBias = Annotated[Mapping[TokenId, limits.Bias], Entries(MAX_BIASES)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, and what ends the output.

    `temperature` below 1e-6 is greedy. `seed` None: derived from the request id. Stop conditions are checked in
    this order: `stop_token_sequences`, EOS (unless `ignore_eos`), `stop_token_ids` (and the model's own),
    `max_tokens`. `stop` strings are matched on the text.
    """

    max_tokens: MaxTokens = 256
    """The most tokens of the output; `"rest"`: all that the context has room for."""
    min_tokens: limits.MinTokens = 0
    """No end token or stop condition ends the output before this many tokens. See
    docs/requests.md#not-before-min_tokens."""
    temperature: limits.Temperature = 1.0
    """0: always the likeliest token; higher values vary more."""
    top_k: limits.TopK = 0
    """Draw from the k likeliest tokens; 0: from all."""
    top_p: limits.TopP = 1.0
    """Draw from the likeliest tokens that together have this probability, after `temperature` and `top_k`."""
    min_p: limits.MinP = 0.0
    """Leave out tokens less likely than this share of the likeliest token's probability."""
    repetition_penalty: limits.RepetitionPenalty = 1.0
    """Above 1: fewer repetitions of tokens of prompt and output."""
    presence_penalty: limits.Penalty = 0.0
    """Subtracted from the logits of the output's tokens."""
    frequency_penalty: limits.Penalty = 0.0
    """Subtracted from a token's logit for each time that the output has it."""
    logit_bias: LogitBias = field(default_factory=dict)
    """Added to logits, by token id, up to 65,536 of them; -1000 to 1000."""
    allowed_token_ids: SomeTokenIds | None = None
    """The output consists of these tokens only."""
    banned_token_ids: TokenIds = ()
    """The output contains none of these tokens."""
    bad_words: Annotated[Sequence[StopString], Entries(MAX_BAD_WORDS)] = ()
    """Where the tokens of one of these words would be complete, with a space before it or without, its last token
    is not drawn. Other tokens can still spell a word."""
    seed: limits.Seed | None = None
    """Decides what is drawn. `None`: derived from the task's id. See docs/requests.md#seeds."""
    logprobs: limits.Logprobs | None = None
    """The log-probability of each output token, and of this many likeliest tokens in its place."""
    logprob_token_ids: Annotated[Sequence[TokenId], Entries(limits.MOST_LOGPROB_TOKENS)] = ()
    """With `logprobs`: these tokens, up to 128, instead of the likeliest ones."""
    logprob_texts: bool = False
    """The texts and bytes of these tokens, too."""
    prompt_logprobs: limits.Logprobs | None = None
    """The same for each token of the prompt, given those before it. See
    docs/requests.md#log-probabilities-of-the-prompt-logprobs."""
    ignore_eos: bool = False
    """End tokens do not end the output. For benchmarks."""
    stop: Annotated[Sequence[StopString], Entries(MAX_STOPS), Given(str)] = ()
    """One string, or up to 64. The text ends before the first that it would contain."""
    include_stop: bool = False
    """The text ends with the stop string, or the text of the stop token. See docs/requests.md#special-tokens."""
    stop_token_ids: TokenIds = ()
    """Any of these tokens ends the output; its id is in the output, its text is not."""
    stop_token_sequences: Annotated[Sequence[SomeTokenIds], Entries(MAX_STOPS)] = ()
    """Any of these sequences of ids ends the output, which has its text."""
    skip_special_tokens: bool = True
    """`False` keeps special tokens in the text. See docs/requests.md#special-tokens."""

    @property
    def beside(self) -> int | None:
        """How many tokens' log-probabilities are reported beside that of each token; None: none at all."""
        return None if self.logprobs is None else len(self.logprob_token_ids) or self.logprobs


def _related(given: Sampling) -> Sampling:
    """Checks the options that depend on each other."""
    if given.max_tokens != "rest" and given.min_tokens > given.max_tokens:
        raise InvalidRequest("min_tokens", f"must be at most max_tokens, {given.max_tokens}", given.min_tokens)
    if given.logprob_texts and given.logprobs is None and given.prompt_logprobs is None:
        raise InvalidRequest("logprob_texts", "needs logprobs", "no logprobs")
    if given.logprob_token_ids and given.logprobs is None:
        raise InvalidRequest("logprob_token_ids", "needs logprobs", "no logprobs")
    return given


if TYPE_CHECKING:

    class Sampling(Declared, SamplingParams): ...  # type: ignore[misc]  # models are frozen: `Declared`

else:
    _hints = get_type_hints(SamplingParams, include_extras=True)
    Sampling = create_model(
        "Sampling",
        __base__=Declared,
        __module__=__name__,
        __doc__="How tokens are drawn, and what ends the output: the fields of the engine's `SamplingParams`.",
        __validators__={"_related": model_validator(mode="after")(_related)},
        **{one.name: (_hints[one.name], one) for one in dataclasses.fields(SamplingParams)},
    )


_DEFAULTS = {one.name: one.default for one in dataclasses.fields(SamplingParams)}


def check(params: SamplingParams) -> None:
    """Checks parameters of the engine's callers, in which any iterable is a list. Raises `InvalidRequest`."""
    values = ((name, getattr(params, name), default) for name, default in _DEFAULTS.items())
    validate(Sampling, {name: _listed(value) for name, value, default in values if value is not default})


def _listed(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str | bytes | list | dict):
        return value
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if hasattr(value, "__iter__") else value

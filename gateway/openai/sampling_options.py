"""The parameters that all kinds of generation share: OpenAI's, and those that vLLM added, in its spelling.

A parameter that has no meaning here is accepted and ignored if an answer without it is still right, as OpenAI's
`user` is. If it is not, a value other than the default is refused by name. Of unknown parameters see
`foreign.unknown`, of other spellings `foreign.spellings`. Limits are checked where the task checks them:
`InvalidRequest` names the option, and `NAMES` the client's field."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from petiole.contract.errors import shorten
from petiole.contract.limits import MAX_BAD_WORDS, MAX_BIASES, MAX_STOPS
from petiole.contract.requests.bounds import Entries, Object
from petiole.contract.requests.validation import listed
from petiole.gateway.core.foreign import spellings
from petiole.gateway.core.requests import (
    Ids,
    Metadata,
    MostPromptTokens,
    RequestBody,
    Seed,
    cut_to,
    given,
    submission,
)
from petiole.gateway.openai import response_format as formats
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute
from petiole.tasks.settings import settings

MOST_CHOICES = 128
MOST_LOGPROBS = 20

NAMES = {
    "salt": "cache_salt",
    "affinity": "prompt_cache_key",
    "truncate": "truncate_prompt_tokens",
    "truncate_to": "truncate_prompt_tokens",
    "include_stop": "include_stop_str_in_output",
    "max_reasoning_tokens": "thinking_token_budget",
}
"""By an option of a task: the client's field, where the two differ."""

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "ignore_eos", "logit_bias", "stop", "stop_token_ids", "skip_special_tokens", "allowed_token_ids",
    "bad_words", "logprob_token_ids",
)  # fmt: skip
"""What a task has under the same name."""


class SamplingBody(RequestBody):
    """OpenAI's parameters, and then vLLM's."""

    DEFAULTED: ClassVar = frozenset(
        {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
         "return_tokens_as_token_ids"}
    )  # fmt: skip
    REFUSED: ClassVar = {
        "best_of": "is not served: use n",
        "use_beam_search": "is not served",
        "length_penalty": "is not served",
        "vllm_xargs": "is not served",
        "kv_transfer_params": "is not served",
    }
    IGNORED: ClassVar = frozenset(
        {"user", "safety_identifier", "service_tier", "session_id", "request_id", "stream_interval", "moderation",
         "prompt_cache_options", "prompt_cache_retention", "spaces_between_special_tokens", "detokenize",
         "guided_decoding_backend"}
    )  # fmt: skip

    model: str = Field(min_length=1, max_length=1024)
    stream: bool = False
    stream_options: Object = Field(default_factory=dict)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    seed: Seed | None = None
    stop: Annotated[list[str], BeforeValidator(listed), Entries(MAX_STOPS)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Entries(MAX_BIASES)] | None = None
    prompt_cache_key: str | None = None
    response_format: Object | None = None
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    structured_outputs: Object | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Annotated[list[str], Entries(MAX_BAD_WORDS)] | None = None
    logprob_token_ids: Ids | None = None
    cache_salt: str | None = None
    priority: int | None = Field(default=None, ge=0, le=9)
    truncate_prompt_tokens: MostPromptTokens = None
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    metadata: Metadata = Field(default_factory=dict)
    store: bool = False

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        return spellings.constraints(given)

    @field_validator("stream_options", mode="after")
    @classmethod
    def _known_stream_options(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
                raise InvalidRequest(f"stream_options.{name}", "is not an option of a stream", shorten(value))
            if value not in (None, True, False):
                raise InvalidRequest(f"stream_options.{name}", "must be true or false", shorten(value))
        return given

    @property
    def usages(self) -> dict[str, bool]:
        """What the view reads of the usage: whether it comes last, and whether with each chunk, too."""
        last = bool(self.stream_options.get("include_usage"))
        return {"usage": last, "counts": last and bool(self.stream_options.get("continuous_usage_stats"))}

    @model_validator(mode="after")
    def _options_of_streams(self) -> Any:
        if self.stream_options and not self.stream:
            raise InvalidRequest("stream_options", "needs stream", "stream false")
        if self.stream and self.prompt_logprobs is not None:
            limit = "cannot be combined with stream: only echo with logprobs streams those of a prompt"
            raise InvalidRequest("prompt_logprobs", limit, self.prompt_logprobs)
        return self

    @property
    def stays(self) -> bool:
        """Whether the generation goes on when its client has gone."""
        return self.store and settings().gateway_stored_stay

    def sampling(self, choice: int) -> dict[str, Any]:
        """The options of the task of one choice. Choices with one seed would be the same, so each has its own."""
        options = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if options.get("top_k") == -1:  # vLLM's "all"
            options["top_k"] = 0
        if self.include_stop_str_in_output:
            options["include_stop"] = True
        if self.seed is not None:
            options["seed"] = self.seed + choice
        if self.cache_salt is not None:
            options["salt"] = self.cache_salt
        if self.prompt_cache_key is not None:
            options["affinity"] = self.prompt_cache_key
        return options

    def beside(self, likeliest: int | None) -> int | None:
        """How many log-probabilities are shown beside that of each token, where `likeliest` were asked for."""
        return likeliest if likeliest is None else len(self.logprob_token_ids or ()) or likeliest

    def constraint(self) -> formats.FormatOption | None:
        """Raises `InvalidRequest`."""
        return formats.constraint(self.response_format, self.structured_outputs)

    def options(
        self, found: ModelRoute, stays: bool, likeliest: int | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """The options that are the same for all choices, and the client's names of options. `stays`: the task goes
        on when its client has gone. `likeliest`: as of `_with_logprobs`. Raises `InvalidRequest`."""
        if likeliest is None and self.logprob_token_ids:
            raise InvalidRequest("logprob_token_ids", "needs logprobs", "no logprobs")
        options, names = self._with_logprobs(likeliest), dict(NAMES)
        if self.prompt_logprobs is not None:
            options |= {"prompt_logprobs": self.prompt_logprobs, "logprob_texts": True}
        if (constraint := self.constraint()) is not None:
            options[constraint.option], names[constraint.option] = constraint.value, constraint.field
        if self.truncate_prompt_tokens is not None:
            side = "end" if self.truncation_side == "right" else "start"
            options |= {"truncate": side, **cut_to(self.truncate_prompt_tokens)}
        if found.adapter is not None:
            options["adapter"] = found.adapter
        if not stays:
            options["cancel_on_disconnect"] = True
        return options, names

    def _with_logprobs(self, likeliest: int | None) -> dict[str, Any]:
        """Tokens are shown with texts and bytes. `likeliest`: how many at each position; None: no
        log-probabilities are shown."""
        if likeliest is None and not self.return_token_ids:
            return {}
        return {"logprobs": likeliest or 0, "logprob_texts": True}

    def submission(self) -> dict[str, Any]:
        """Options of the submission."""
        return submission(self.priority)


class ThinkingBody(SamplingBody):
    """A conversation's parameters, too: how much the model reasons, and what its template reads."""

    thinking_token_budget: int | None = None
    chat_template_kwargs: Object = Field(default_factory=dict)

    def thinking(self, effort: str | None, **variables: Any) -> dict[str, Any]:
        """The options of these parameters. `variables`: further ones of the template."""
        options = {
            "chat_template_kwargs": self.chat_template_kwargs | given(variables) or None,
            "reasoning_effort": effort,
            "max_reasoning_tokens": self.thinking_token_budget,
        }
        return {name: value for name, value in options.items() if value is not None}

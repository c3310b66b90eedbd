"""Requests: the options of `generate` and `chat`, and how they are checked.

Requests are strict: an unknown field or a wrong type is rejected by name, so that no misspelt option is silently
ignored.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from petiole import limits
from petiole.tasks.errors import InvalidRequest, shorten
from petiole.tasks.requests import choices, images
from petiole.tasks.requests.hints import instead_of

MAX_PROMPT_CHARACTERS = 4_000_000
MAX_PROMPT_TOKENS = 1_000_000
MAX_STOPS = 64
MAX_BAD_WORDS = 1024
MAX_SALT_CHARACTERS = 256
MAX_SCHEMA_CHARACTERS = 1_000_000  # of a JSON schema, of all tools, or of all variables of a chat template
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)  # not allowed as variables of a chat template: only the worker sets them


def _integer_keys(value: object) -> object:
    """JSON has no integer keys: convert {"42": -1.5} to {42: -1.5}."""
    if not isinstance(value, Mapping):
        return value
    return {int(k) if isinstance(k, str) and k.lstrip("-").isdecimal() else k: v for k, v in value.items()}


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
ToolChoice = Annotated[
    Literal["auto", "none", "required"] | dict[str, Any], PlainValidator(choices.checked_choice)
]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS)]
LogitBias = Annotated[
    dict[TokenId, limits.Bias],
    BeforeValidator(_integer_keys),
    Field(max_length=MAX_PROMPT_TOKENS),
]
RetentionS = Annotated[int, Field(ge=60, le=10**9)]
"""At least a minute: whoever finds the task unfinished, after a worker's death, must still see how it ended."""
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
Choice = Annotated[str, Field(min_length=1, max_length=4096)]


@dataclass(frozen=True)
class Given:
    """In a field's type: callers may also give a value of this type. It is converted to the field's own type."""

    hint: Any


class Declared(BaseModel):
    """Base of the classes that declare options. An option is declared in one place, a field: its type, limits and
    default, and below them its meaning. `python -m docs.render` writes `types` and the tables of docs/requests.md
    from these fields.
    """

    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Common(Declared):
    """Options of every task."""

    salt: str = Field(default="", max_length=MAX_SALT_CHARACTERS)
    """Only requests with the same salt share cached prefixes: one for each tenant."""
    affinity: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARACTERS)
    """Give the same to tasks that begin alike: on a Redis broker they run on one worker while it has room. Chats
    and tasks about an image get one without asking. See docs/scaling.md#conversations-stay-where-they-began."""
    deadline_s: limits.DeadlineS | None = None
    """The generation ends this many seconds after admission, with its output so far."""
    stream_ttl_s: RetentionS | None = None
    """Seconds that the stream stays readable after its last delta; at most, and by default,
    `PETIOLE_STREAM_TTL_S`."""
    result_expires_s: RetentionS | None = None
    """Seconds that the result is kept, on Redis; at most, and by default, `PETIOLE_RESULT_EXPIRES_S`."""
    cancel_on_disconnect: bool = False
    """Cancel the task when the reader of its stream goes away. See docs/streams.md#going-away."""

    @abstractmethod
    def subject(self) -> dict[str, Any]:
        """What to generate from, as keyword arguments of the engine's `Request`; `skill` is a name and options."""

    @abstractmethod
    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of the engine's `SamplingParams`."""

    def constraint(self) -> tuple[str, Any] | None:
        """The constraint on the output as (kind, value), or None."""
        return None

    def images(self) -> list[str]:
        """The images, in order, as they are in the message."""
        return []


class Sampling(Declared):
    """How tokens are drawn, and what ends the output: the fields of the engine's `SamplingParams`."""

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
    logit_bias: LogitBias = Field(default_factory=dict)
    """Added to logits, by token id; -1000 to 1000."""
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1)] | None = None
    """The output consists of these tokens only."""
    banned_token_ids: TokenIds = Field(default_factory=list)
    """The output contains none of these tokens."""
    bad_words: list[StopString] = Field(default_factory=list, max_length=MAX_BAD_WORDS)
    """Where the tokens of one of these words would be complete, with a space before it or without, its last token
    is not drawn. Other tokens can still spell a word."""
    seed: limits.Seed | None = None
    """Decides what is drawn. `None`: derived from the task's id. See docs/requests.md#seeds."""
    logprobs: limits.Logprobs | None = None
    """The log-probability of each output token, and of this many likeliest tokens in its place."""
    logprob_token_ids: Annotated[TokenIds, Field(max_length=limits.MOST_LOGPROB_TOKENS)] = Field(
        default_factory=list
    )
    """With `logprobs`: these tokens, up to 128, instead of the likeliest ones."""
    logprob_texts: bool = False
    """The texts and bytes of these tokens, too."""
    prompt_logprobs: limits.Logprobs | None = None
    """The same for each token of the prompt, given those before it. See
    docs/requests.md#log-probabilities-of-the-prompt."""
    ignore_eos: bool = False
    """End tokens do not end the output. For benchmarks."""
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS), Given(str)] = Field(default_factory=list)
    """One string, or up to 64. The text ends before the first that it would contain."""
    include_stop: bool = False
    """The text ends with the stop string, or the text of the stop token. See docs/requests.md#special-tokens."""
    stop_token_ids: TokenIds = Field(default_factory=list)
    """Any of these tokens ends the output; its id is in the output, its text is not."""
    stop_token_sequences: list[Annotated[TokenIds, Field(min_length=1)]] = Field(
        default_factory=list, max_length=MAX_STOPS
    )
    """Any of these sequences of ids ends the output, which has its text."""
    skip_special_tokens: bool = True
    """`False` keeps special tokens in the text. See docs/requests.md#special-tokens."""


class Options(Common, Sampling):
    """Options of both `generate` and `chat`."""

    json_schema: Annotated[dict[str, Any] | None, Given(type[BaseModel] | str)] = None
    """The output is JSON of this schema (an object or its JSON), or of this pydantic class. At most one of
    `json_schema`, `regex`, `choice`, `grammar`. See docs/constraints.md."""
    regex: str | None = Field(default=None, min_length=1, max_length=65_536)
    """The output matches this regular expression."""
    choice: list[Choice] | None = Field(default=None, min_length=1, max_length=10_000)
    """The output is one of these."""
    grammar: str | None = Field(default=None, min_length=1, max_length=262_144)
    """The output matches this grammar, in Lark's notation."""

    truncate: limits.Truncate | None = None
    """A prompt that leaves no room for `max_tokens` (of `"rest"`: for 256) is cut, not refused: at its `start`, in
    its `middle`, or at its `end`. Of a conversation the longest texts are cut, all to one length, so a short
    instruction stays whole. See docs/batch.md#rows-that-are-too-long."""
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    """A LoRA adapter: a folder on the workers, or a hub id. See docs/models.md#lora."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_is_a_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_from_text(cls, schema: object) -> object:
        if isinstance(schema, type) or get_origin(schema) is not None:
            limit = "must be an object or a pydantic class; for other types give TypeAdapter(...).json_schema()"
            raise InvalidRequest("json_schema", limit, shorten(schema))
        if not isinstance(schema, str) or len(schema) > MAX_SCHEMA_CHARACTERS:
            return schema
        try:
            return json.loads(schema)
        except (ValueError, RecursionError):
            raise InvalidRequest("json_schema", "must be an object or JSON text of one", shorten(schema)) from None

    @field_validator("json_schema", mode="after")
    @classmethod
    def _schema_of_sensible_size(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        _json_length("json_schema", schema, MAX_SCHEMA_CHARACTERS)
        return schema

    @model_validator(mode="after")
    def _min_tokens_fit_max_tokens(self) -> Self:
        if self.max_tokens != "rest" and self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", f"must be at most max_tokens, {self.max_tokens}", self.min_tokens)
        return self

    @model_validator(mode="after")
    def _texts_of_logprobs(self) -> Self:
        if self.logprob_texts and self.logprobs is None and self.prompt_logprobs is None:
            raise InvalidRequest("logprob_texts", "needs logprobs", "no logprobs")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids", "needs logprobs", "no logprobs")
        return self

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        kinds = [kind for kind in CONSTRAINT_KINDS if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise InvalidRequest(kinds[1], f"cannot be combined with {kinds[0]}", " and ".join(kinds))
        return self

    def subject(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields if name not in Options.model_fields}

    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Sampling.model_fields}

    def constraint(self) -> tuple[str, Any] | None:
        for kind in CONSTRAINT_KINDS:
            if (value := getattr(self, kind)) is not None:
                return kind, value
        return None


CONSTRAINT_KINDS = ("json_schema", "regex", "choice", "grammar")


class GenerateRequest(Options):
    """A prompt to continue."""

    prompt: str | list[int]
    """What to continue: text, to which the tokenizer adds its special tokens (BOS for Llama, none for Qwen), or
    token ids, taken as they are."""

    @field_validator("prompt", mode="plain")
    @classmethod
    def _text_or_token_ids(cls, prompt: object) -> str | list[int]:
        if isinstance(prompt, str):
            return checked_text("prompt", prompt)
        if not isinstance(prompt, list | tuple):
            raise InvalidRequest("prompt", "must be text or a list of token ids", prompt)
        if not prompt:
            raise InvalidRequest("prompt", "must not be empty", "[]")
        if len(prompt) > MAX_PROMPT_TOKENS:
            raise InvalidRequest("prompt", f"must have at most {MAX_PROMPT_TOKENS} tokens", len(prompt))
        for position, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < 2**31:
                raise InvalidRequest(f"prompt[{position}]", "must be a token id", token)
        return list(prompt)


_NOT_FOR_THE_ENGINE = ("tool_choice", "parallel_tool_calls", "reasoning_effort", "max_reasoning_tokens")


class ChatRequest(Options):
    """A conversation to answer."""

    messages: list[dict[str, Any]] = Field(min_length=1, max_length=10_000)
    """What to answer: `[{"role": "user", "content": "..."}]`. The checkpoint's chat template, which it must have,
    renders them, with their other keys. A vision model takes an image part. See
    docs/vision.md#in-a-conversation."""
    tools: list[dict[str, Any]] | None = Field(default=None, min_length=1, max_length=1024)
    """JSON objects for the chat template. See docs/requests.md#conversations-and-tools."""
    tool_choice: ToolChoice = "auto"
    """`auto`, `none`, `required`, or the tools that it must or may call, in the forms of OpenAI's API. See
    docs/tools.md#what-is-enforced."""
    parallel_tool_calls: bool = True
    """`False`: at most one call."""
    reasoning_effort: str | None = Field(default=None, min_length=1, max_length=32)
    """How long the model thinks, in the words of its chat template, such as `low`; `none`: it does not think."""
    max_reasoning_tokens: int | None = Field(default=None, ge=0)
    """The most tokens of a thought, for models that reason. See docs/tools.md#what-is-enforced."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as Qwen3's `enable_thinking`."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's, instead of answering it."""

    @field_validator("messages", mode="after")
    @classmethod
    def _roles_and_contents(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        total = 0
        for position, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not role:
                raise InvalidRequest(f"messages[{position}].role", "must be text", role)
            if isinstance(content, str):
                total += len(checked_text(f"messages[{position}].content", content, may_be_empty=True))
            elif isinstance(content, list | NoneType):
                for part, image in images.parts_of(message):
                    images.check(f"messages[{position}].content[{part}]", image)
                rest = images.without_images(message).get("content")
                total += _json_length(f"messages[{position}].content", rest, MAX_PROMPT_CHARACTERS)
            else:
                raise InvalidRequest(f"messages[{position}].content", "must be text", content)
        if total > MAX_PROMPT_CHARACTERS:
            raise InvalidRequest("messages", f"must have at most {MAX_PROMPT_CHARACTERS} characters in all", total)
        return messages

    @field_validator("tools", mode="after")
    @classmethod
    def _tools_of_sensible_size(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        _json_length("tools", tools, MAX_SCHEMA_CHARACTERS)
        return tools

    @field_validator("chat_template_kwargs", mode="after")
    @classmethod
    def _variables_of_their_own(cls, variables: dict[str, Any]) -> dict[str, Any]:
        if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
            limit = f"must not have {', '.join(sorted(RESERVED_VARIABLES))}"
            raise InvalidRequest("chat_template_kwargs", limit, ", ".join(reserved))
        _json_length("chat_template_kwargs", variables, MAX_SCHEMA_CHARACTERS)
        return variables

    @model_validator(mode="after")
    def _final_message_to_continue(self) -> Self:
        role = self.messages[-1]["role"]
        if self.continue_final_message and role != "assistant":
            raise InvalidRequest("continue_final_message", "needs a final message of the assistant", role)
        return self

    @model_validator(mode="after")
    def _tools_to_choose_from(self) -> Self:
        choices.check_names(self.tool_choice, self.tools)
        return self

    @property
    def calling(self) -> choices.Choice:
        """What the model may call."""
        return choices.choice_of(self.tool_choice, self.tools or (), self.parallel_tool_calls)

    def subject(self) -> dict[str, Any]:
        given = {name: value for name, value in super().subject().items() if name not in _NOT_FOR_THE_ENGINE}
        shown = {"messages": [images.without_images(message) for message in self.messages]}
        if self.tool_choice == "none":
            given["tools"] = None
        if self.reasoning_effort is not None:
            thinks = self.reasoning_effort != "none"
            variables = {"reasoning_effort": self.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
            given["chat_template_kwargs"] = variables | self.chat_template_kwargs
        return given | shown

    def images(self) -> list[str]:
        return [str(image) for message in self.messages for _, image in images.parts_of(message)]


def _json_length(field: str, value: object, limit: int) -> int:
    try:
        length = len(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(field, "must be JSON", f"{type(error).__name__}: {error}") from None
    if length > limit:
        raise InvalidRequest(field, f"must have at most {limit} characters as JSON", length)
    return length


def checked_text(field: str, text: str, *, may_be_empty: bool = False) -> str:
    if not text and not may_be_empty:
        raise InvalidRequest(field, "must not be empty", repr(text))
    if len(text) > MAX_PROMPT_CHARACTERS:
        raise InvalidRequest(field, f"must have at most {MAX_PROMPT_CHARACTERS} characters", len(text))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, "must be valid Unicode", f"{text[error.start]!a} at {error.start}") from None
    return text


R = TypeVar("R", bound=Declared)

_LIMITS = {
    "missing": "is required",
    "extra_forbidden": "is not an option of this task",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have at least {min_length} characters",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "string_too_long": "must have at most {max_length} characters",
}


def validate(kind: type[R], options: Mapping[str, Any]) -> R:
    """`options` as a request. Raises `InvalidRequest` for its first error.

    Unknown options are reported first: a misspelt one also makes the intended one missing.
    """
    for name in options:
        if name.encode(errors="ignore").decode() != name:  # pydantic reports no name with a lone surrogate
            raise InvalidRequest(ascii(name)[1:-1], _LIMITS["extra_forbidden"], shorten(options[name]))
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        refused = _first(error, kind.model_fields)
    try:
        raise refused  # no error that knows the options is behind it
    finally:
        del refused  # and none knows this frame twice: only a rare search for cycles would free the options


def in_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` as they go into a message: a pydantic class becomes its JSON schema, an image's bytes base64."""
    if "image" in options:
        options = {**options, "image": images.in_text(options["image"])}
    if isinstance(options.get("messages"), list):
        options = {**options, "messages": [images.with_images_in_text(one) for one in options["messages"]]}
    schema = options.get("json_schema")
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        schema = schema.model_json_schema()
    if schema is None:
        return dict(options)
    return {**options, "json_schema": _as_text(schema) if _looks_encoded(schema) else schema}


def _looks_encoded(value: object) -> bool:
    """Whether a part of the value has just the keys of a value that kombu has encoded, and so will decode."""
    waiting = [value]
    for part in waiting:
        if isinstance(part, dict):
            if part.keys() == {"__type__", "__value__"}:
                return True
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return False


def _as_text(schema: object) -> str:
    _json_length("json_schema", schema, MAX_SCHEMA_CHARACTERS)
    return json.dumps(schema)


def _first(error: ValidationError, known: Collection[str]) -> InvalidRequest:
    details = error.errors(include_url=False)
    return _invalid(min(details, key=lambda detail: detail["type"] != "extra_forbidden"), known)


def _invalid(error: ErrorDetails, known: Collection[str]) -> InvalidRequest:
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        cause.__context__ = None
        return cause.with_traceback(None)
    name, *rest = (part for part in error["loc"] if part != "[key]")
    field = str(name) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    value = "nothing" if error["type"] == "missing" else shorten(error["input"])
    limit = _limit(error["type"], error["msg"], error.get("ctx", {}))
    hint = instead_of(field, known) if error["type"] == "extra_forbidden" else ""
    return InvalidRequest(field, f"{limit} ({hint})" if hint else limit, value)


def _limit(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if context.get("min_length") == 1:
        return "must not be empty"
    if kind in _LIMITS:
        return _LIMITS[kind].format(**context)
    return message.replace("Input should", "must")

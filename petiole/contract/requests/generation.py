"""Requests: the options of `generate` and `chat`. Those of sampling are in `sampling`.

Requests are strict: an unknown field or a wrong type is rejected by name, so that no misspelt option is silently
ignored.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import BaseModel, Field, PlainValidator, field_validator, model_validator

from petiole.contract import limits
from petiole.contract.errors import InvalidRequest, shorten
from petiole.contract.limits import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPT_TOKENS,
    MAX_SALT_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    MAX_TOOLS,
)
from petiole.contract.requests import images, tool_choice as choices
from petiole.contract.requests.bounds import Entries, Object
from petiole.contract.requests.images import MediaPart, View
from petiole.contract.requests.sampling import Sampling, SamplingParams
from petiole.contract.requests.validation import Declared, Given, listed

RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)  # not allowed as variables of a chat template: only the worker sets them


def _integer_keys(value: object) -> object:
    """JSON has no integer keys: convert {"42": -1.5} to {42: -1.5}."""
    if not isinstance(value, Mapping):
        return value
    return {int(k) if isinstance(k, str) and k.lstrip("-").isdecimal() else k: v for k, v in value.items()}


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | dict[str, Any], PlainValidator(choices.checked_choice)
]
RetentionS = Annotated[int, Field(ge=60, le=10**9)]
"""At least a minute: whoever finds the task unfinished, after a worker's death, must still see how it ended."""
Choice = Annotated[str, Field(min_length=1, max_length=4096)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]


def _of_sensible_size(field: str) -> Any:
    """A validator of a field, whose JSON has a limit."""

    def checked(value: Any) -> Any:
        _json_length(field, value, MAX_SCHEMA_CHARACTERS)
        return value

    return field_validator(field, mode="after")(checked)


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
    def sampling(self) -> SamplingParams:
        """How the engine draws the tokens."""

    def constraint(self) -> tuple[str, Any] | None:
        """The constraint on the output as (kind, value), or None."""
        return None

    def images(self) -> list[str]:
        """The images, in order, as they are in the message; of a video its frames, or its file."""
        return []

    def image_views(self) -> list[View]:
        """How the model is to look at each image. Empty: at all as it does."""
        return []


class Options(Common, Sampling):  # type: ignore[misc]  # frozen: `Declared`
    """Options of both `generate` and `chat`."""

    json_schema: Annotated[Object | None, Given(type[BaseModel] | str)] = None
    """The output is JSON of this schema (an object or its JSON), or of this pydantic class. At most one of
    `json_schema`, `regex`, `choice`, `grammar`. See docs/constraints.md."""
    regex: str | None = Field(default=None, min_length=1, max_length=65_536)
    """The output matches this regular expression."""
    choice: Annotated[list[Choice], Entries(MAX_CHOICES, least=1)] | None = None
    """The output is one of these."""
    grammar: str | None = Field(default=None, min_length=1, max_length=262_144)
    """The output matches this grammar, in Lark's notation."""

    truncate: limits.Truncate | None = None
    """A prompt that leaves no room for `max_tokens` (of `"rest"`: for 256) is cut, not refused: at its `start`, in
    its `middle`, or at its `end`. Of a conversation the longest texts are cut, all to one length, so a short
    instruction stays whole. See docs/batch.md#rows-that-are-too-long."""
    truncate_to: Annotated[int, Field(ge=1)] | None = None
    """With `truncate`: the prompt is cut if it has more tokens than this, too."""
    adapter: str | None = Field(default=None, min_length=1, max_length=1024)
    """A LoRA adapter: a folder on the workers, or a hub id. See docs/models.md#lora."""

    _stop = field_validator("stop", mode="before")(listed)
    _logit_bias = field_validator("logit_bias", mode="before")(_integer_keys)

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

    _schema_of_sensible_size = _of_sensible_size("json_schema")

    @model_validator(mode="after")
    def _truncate_to_needs_truncate(self) -> Self:
        if self.truncate_to is not None and self.truncate is None:
            raise InvalidRequest("truncate_to", "needs truncate", self.truncate_to)
        return self

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        kinds = [kind for kind in CONSTRAINT_KINDS if getattr(self, kind) is not None]
        if len(kinds) > 1:
            raise InvalidRequest(kinds[1], f"cannot be combined with {kinds[0]}", " and ".join(kinds))
        return self

    def subject(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields if name not in Options.model_fields}

    def sampling(self) -> SamplingParams:
        return SamplingParams(**{name: getattr(self, name) for name in Sampling.model_fields})

    def constraint(self) -> tuple[str, Any] | None:
        for kind in CONSTRAINT_KINDS:
            if (value := getattr(self, kind)) is not None:
                return kind, value
        return None


CONSTRAINT_KINDS = ("json_schema", "regex", "choice", "grammar")


class GenerateRequest(Options):  # type: ignore[misc]  # frozen: `Declared`
    """A prompt to continue."""

    prompt: str | list[int]
    """What to continue: text, to which the tokenizer adds its special tokens (BOS for Llama, none for Qwen), or
    token ids, taken as they are."""
    suffix: Text | None = None
    """What follows the output: for models with tokens for filling in the middle, such as Qwen2.5-Coder."""

    @field_validator("prompt", mode="plain")
    @classmethod
    def _text_or_token_ids(cls, prompt: object) -> str | list[int]:
        if isinstance(prompt, str):
            return checked_text("prompt", prompt, may_be_empty=True)
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

    @model_validator(mode="after")
    def _text_around_the_output(self) -> Self:
        if self.suffix is None:
            if isinstance(self.prompt, str):
                checked_text("prompt", self.prompt)
            return self
        checked_text("suffix", self.suffix)
        if not isinstance(self.prompt, str):
            raise InvalidRequest("suffix", "needs a prompt that is text", f"{len(self.prompt)} token ids")
        if self.truncate is not None:
            raise InvalidRequest("truncate", "cannot be combined with suffix", self.truncate)
        return self


_NOT_FOR_THE_ENGINE = ("tool_choice", "parallel_tool_calls", "reasoning_effort", "max_reasoning_tokens")


class ChatRequest(Options):  # type: ignore[misc]  # frozen: `Declared`
    """A conversation to answer."""

    messages: Annotated[list[Object], Entries(MAX_MESSAGES, least=1)]
    """What to answer: `[{"role": "user", "content": "..."}]`. The checkpoint's chat template, which it must have,
    renders them, with their other keys. A vision model takes an image part. See
    docs/vision.md#in-a-conversation."""
    tools: Annotated[list[Object], Entries(MAX_TOOLS, least=1)] | None = None
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
    chat_template_kwargs: Object = Field(default_factory=dict)
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
                for part in images.parts_of(message):
                    part.check(f"messages[{position}]")
                rest = images.without_images(message).get("content")
                total += _json_length(f"messages[{position}].content", rest, MAX_PROMPT_CHARACTERS)
            else:
                raise InvalidRequest(f"messages[{position}].content", "must be text", content)
        if total > MAX_PROMPT_CHARACTERS:
            raise InvalidRequest("messages", f"must have at most {MAX_PROMPT_CHARACTERS} characters in all", total)
        return messages

    _tools_of_sensible_size = _of_sensible_size("tools")

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
    def calling(self) -> choices.ToolChoice:
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
        return [str(file) for part in self._media for file in part.files.values()]

    def image_views(self) -> list[View]:
        return [part.view for part in self._media for _ in part.files]

    @property
    def _media(self) -> list[MediaPart]:
        return [part for message in self.messages for part in images.parts_of(message)]


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

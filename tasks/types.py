"""Options and results as type checkers and editors see them: the fields of `tasks.schemas`, as dictionaries.

A checker cannot derive a call's keyword arguments from a pydantic model, so they are written down twice, and
`tests/project/test_types.py` holds the two together. The text under a key is what an editor shows for it.
"""

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, overload

from celery.result import AsyncResult

from tasks.schemas import FinishReason


class Options(TypedDict, total=False):
    """Options of both `generate` and `chat`. None is required."""

    max_tokens: int
    """Most tokens of output, by default 256."""
    min_tokens: int
    """End tokens and stop conditions do not end the output before it has so many; by default 0."""
    temperature: float
    """By default 1; 0 is greedy."""
    top_k: int
    """Draw from the likeliest k; 0, the default, is off."""
    top_p: float
    """Draw from the likeliest that together have this probability; 1, the default, is off."""
    min_p: float
    """Leave out what is less likely than this share of the likeliest; 0, the default, is off."""
    repetition_penalty: float
    """Above 1, the default: prompt and output are repeated less."""
    presence_penalty: float
    """Taken from the logit of each token that the output has; -2 to 2, by default 0."""
    frequency_penalty: float
    """Taken from a token's logit for each time that the output has it; -2 to 2, by default 0."""
    logit_bias: dict[int, float]
    """Added to logits, by token id."""
    allowed_token_ids: list[int] | None
    """Only these."""
    banned_token_ids: list[int]
    """Never these."""
    seed: int | None
    """Which draw. None, the default: derived from the task's id."""
    logprobs: int | None
    """k from 0 to 20: the log probability of each token, and of the k likeliest in its place."""
    ignore_eos: bool
    """Go on behind the model's end tokens."""
    stop: str | list[str]
    """The text ends before the first of these that is complete."""
    stop_token_ids: list[int]
    """End with any of these; the token counts as output, its text is left out."""
    stop_token_sequences: list[list[int]]
    """End with any of these runs of token ids; their text stays."""
    skip_special_tokens: bool
    """False: special tokens stay in the text."""
    json_schema: dict[str, Any] | None
    """The output is JSON of this schema. At most one of `json_schema`, `regex`, `choice` and `grammar`."""
    regex: str | None
    """The output matches this."""
    choice: list[str] | None
    """The output is one of these."""
    grammar: str | None
    """The output matches this grammar, in Lark's notation."""
    adapter: str | None
    """A LoRA adapter: folder or hub id."""
    salt: str
    """Requests share cached prefixes only with those of the same salt, such as a tenant's."""
    affinity: str | None
    """Tasks of one affinity run on the same worker while it has room, because they begin alike."""
    deadline_s: float | None
    """Seconds from admission after which it ends with what it has."""
    cancel_on_disconnect: bool
    """Cancel when the reader of its stream goes away."""


class GenerateOptions(Options):
    """Options of `generate`."""

    prompt: str | list[int]
    """What to continue: text or token ids."""


class PartialGenerateOptions(Options, total=False):
    """Options of a link of a chain: the task before may supply the prompt."""

    prompt: str | list[int]
    """What to continue, before the text of the task before."""


class _ChatOptions(Options, total=False):
    tools: list[dict[str, Any]] | None
    """JSON objects for the chat template."""
    chat_template_kwargs: dict[str, Any]
    """Variables for the chat template, such as Qwen3's `enable_thinking`."""
    continue_final_message: bool
    """Continue the last message, the assistant's, in place of answering."""


class ChatOptions(_ChatOptions):
    """Options of `chat`."""

    messages: list[dict[str, Any]]
    """What to answer: `[{"role": "user", "content": "..."}]`. Other keys go to the chat template."""


class PartialChatOptions(_ChatOptions, total=False):
    """Options of a link of a chain: the task before may supply the message."""

    messages: list[dict[str, Any]]
    """The conversation before the text of the task before, which becomes a message of the user's."""


class TokenLogprobsDict(TypedDict):
    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # JSON makes lists of these pairs


class UsageDict(TypedDict):
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


class TimingDict(TypedDict):
    queue_ms: float
    prefill_ms: float
    ttft_ms: float | None
    total_ms: float


class GenerationDict(TypedDict):
    """What a task returns, and the next link of a chain receives: `tasks.schemas.GenerationResult`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: UsageDict
    timing: TimingDict
    model: str
    attempt: int
    logprobs: NotRequired[list[TokenLogprobsDict]]


if TYPE_CHECKING:

    class AsyncGeneration(AsyncResult):  # type: ignore[misc]
        """Celery's `AsyncResult` of a generation."""

        id: str

        @overload
        def get(
            self, timeout: float | None = None, propagate: Literal[True] = True, **options: Any
        ) -> GenerationDict: ...
        @overload
        def get(
            self, timeout: float | None = None, propagate: bool = True, **options: Any
        ) -> GenerationDict | Exception: ...
        def get(self, *args: Any, **options: Any) -> Any: ...

else:
    AsyncGeneration = AsyncResult

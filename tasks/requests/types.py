"""Options and results as type checkers and editors see them: the fields of `schemas`, as dictionaries.

A checker cannot derive a call's keyword arguments from a pydantic model, so they are written down twice, and
`tests/project/test_types.py` holds the two together. The text under a key is what an editor shows for it.
"""

from datetime import datetime
from typing import Any, NotRequired, TypedDict

from pydantic import BaseModel

from petiole.tasks.requests.schemas import FinishReason


class Options(TypedDict, total=False):
    """Options of both `generate` and `chat`. None is required."""

    max_tokens: int
    """The output has at most this many tokens. Default: 256."""
    min_tokens: int
    """No end token or stop condition ends the output before this many tokens. Default: 0."""
    temperature: float
    """0 always takes the likeliest token; higher values vary more. Default: 1."""
    top_k: int
    """Draw from the k likeliest tokens only. Default: 0, which means all."""
    top_p: float
    """Draw from the likeliest tokens that together have this probability. Default: 1, which means all."""
    min_p: float
    """Leave out tokens less likely than this share of the likeliest token's probability. Default: 0, none."""
    repetition_penalty: float
    """Above 1: tokens of prompt and output are repeated less. Default: 1."""
    presence_penalty: float
    """Subtracted from the logit of each token that the output contains; -2 to 2. Default: 0."""
    frequency_penalty: float
    """Subtracted from a token's logit once for each time that the output contains it; -2 to 2. Default: 0."""
    logit_bias: dict[int, float]
    """Numbers to add to logits, by token id."""
    allowed_token_ids: list[int] | None
    """The output consists of these tokens only."""
    banned_token_ids: list[int]
    """The output contains none of these tokens."""
    seed: int | None
    """The same request with the same seed draws the same tokens. Default: derived from the task's id."""
    logprobs: int | None
    """Report the log-probability of each output token, and those of the k likeliest tokens there; k is 0 to 20."""
    ignore_eos: bool
    """The model's end tokens do not end the output."""
    stop: str | list[str]
    """The text ends before the first of these strings that it completes."""
    stop_token_ids: list[int]
    """Any of these tokens ends the output. The token is part of the output, its text is not."""
    stop_token_sequences: list[list[int]]
    """Any of these sequences of token ids ends the output. Its text is part of the output."""
    skip_special_tokens: bool
    """False keeps special tokens in the text. Default: True."""
    json_schema: dict[str, Any] | type[BaseModel] | None
    """The output is JSON of this schema, or of this pydantic class. At most one of `json_schema`, `regex`,
    `choice` and `grammar`."""
    regex: str | None
    """The output matches this regular expression."""
    choice: list[str] | None
    """The output is one of these."""
    grammar: str | None
    """The output matches this grammar, in Lark's notation."""
    adapter: str | None
    """A LoRA adapter: a folder on the workers, or a hub id."""
    salt: str
    """Only requests with the same salt share cached prefixes. Give each tenant its own."""
    affinity: str | None
    """Tasks with the same affinity begin alike, so they run on the same worker while it has room."""
    deadline_s: float | None
    """Seconds after admission at which the generation ends with the output that it has."""
    cancel_on_disconnect: bool
    """Cancel the task when the reader of its stream goes away."""


class GenerateOptions(Options):
    """Options of `generate`."""

    prompt: str | list[int]
    """What to continue: text or token ids."""


class PartialGenerateOptions(Options, total=False):
    """Options of a link of a chain: the previous task may supply the prompt."""

    prompt: str | list[int]
    """What to continue. The text of the previous task follows it."""


class Submission(TypedDict, total=False):
    """Options of `delay`, `stream` and their asynchronous forms. All but the last are Celery's."""

    priority: int
    """On Redis 0, the default, is served first. On RabbitMQ the highest number is."""
    queue: str
    """The queue of other workers, such as those of another model."""
    countdown: float
    """Seconds until the task may begin."""
    eta: datetime | str
    """The time at which the task may begin."""
    expires: float | datetime
    """Revoke the task if it has not begun by then."""
    headers: dict[str, Any]
    """Headers of the message, such as `{"tenant": "acme"}`."""
    task_id: str
    """The id of the task. Default: a new one."""
    link: Any
    """Signatures to submit when the task has succeeded."""
    link_error: Any
    """Signatures to submit when the task has failed."""
    soft_time_limit: float
    """The generation ends with the output that it has this many seconds after its admission."""
    time_limit: float
    """The generation fails this many seconds after its admission."""
    ignore_result: bool
    """Store no result. The output is in the stream only."""
    retry: bool
    """False: if the broker cannot be reached, do not try again."""
    require_worker: bool
    """Raise `NoWorker` if no worker of the queue has been seen within six seconds."""


class GenerateCall(GenerateOptions, Submission):
    """What `generate.delay` takes."""


class _ChatOptions(Options, total=False):
    tools: list[dict[str, Any]] | None
    """JSON objects for the chat template."""
    chat_template_kwargs: dict[str, Any]
    """Variables for the chat template, such as Qwen3's `enable_thinking`."""
    continue_final_message: bool
    """Continue the last message, which is the assistant's, instead of answering it."""


class ChatOptions(_ChatOptions):
    """Options of `chat`."""

    messages: list[dict[str, Any]]
    """What to answer: `[{"role": "user", "content": "..."}]`. Other keys go to the chat template."""


class ChatCall(ChatOptions, Submission):
    """What `chat.delay` takes."""


class PartialChatOptions(_ChatOptions, total=False):
    """Options of a link of a chain: the previous task may supply the last message."""

    messages: list[dict[str, Any]]
    """The conversation so far. The text of the previous task follows it as a message of the user."""


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
    """What a task returns, and the next link of a chain receives: `tasks.requests.schemas.GenerationResult`."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: UsageDict
    timing: TimingDict
    model: str
    attempt: int
    logprobs: NotRequired[list[TokenLogprobsDict]]

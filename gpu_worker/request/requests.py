"""The types of the engine's inputs and outputs; checks of text, numbers and data from a request.

A `Request` is immutable. The engine answers it with `Delta`s and exactly one end: a `Result`, an error or a
handback. Output positions count generated tokens from 0, without the prompt. A resumed request continues the count
of the earlier attempt, so the deltas of all attempts have no gaps and no overlaps."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from petiole.contract.limits import Truncate
from petiole.contract.requests.images import View
from petiole.contract.requests.sampling import SamplingParams
from petiole.contract.results.outputs import FinishReason, Timing, TokenLogprobs, Usage
from petiole.gpu_worker.exceptions import InvalidRequest

if TYPE_CHECKING:
    from petiole.cache import ValueToken
    from petiole.gpu_worker.request.pooling import Embedding, Scoring, Text
    from petiole.gpu_worker.request.prepared_images import ImagePlace, PreparedImage
    from petiole.gpu_worker.request.protocols import ConstraintState
    from petiole.gpu_worker.request.skills import SkillCall

    PromptToken = int | ValueToken | ImagePlace
    # A token of a prompt, or where one of the images stands. Of a value only the numbers (bins) count.


ConstraintKind = Literal["json_schema", "regex", "choice", "grammar", "calls"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A format the output must match. `value` is a JSON schema (mapping), a regular expression, a list of
    strings, or a grammar in Lark syntax, according to `kind`. For "calls", it is what
    `gpu_worker.constraints.calls` describes."""

    kind: ConstraintKind
    value: Any


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. Exactly one of `prompt` (text or token ids), `messages` (chat), `skill` and `texts`
    is given.

    `texts`, with `embedding`: a model of texts makes a vector of each. With `scoring`: a classifier, or a model
    that generates, gives numbers to each text or pair of texts. The output has an entry for each, in their order:
    in place of a token its number of tokens. Each is a request of its own in the engine, whose `prompt` has its
    token ids; `second_at`: where the second text of a pair begins, for models that mark its tokens;
    `unpooled`: how many of the first tokens are not pooled.

    For a model that has them, values may stand among the token ids. Each of `images` has its
    `ImagePlace` among the token ids, or a part of type "image" in the messages, in the same order.

    `images`: JPEG, PNG or WebP files, or crops. A file is not decoded if the cache has the image. `image_views`:
    how the model is to look at each file. Empty: at all as it does.
    `tools`, `chat_template_kwargs`: tools and variables for the chat template.
    `shown_tokens`: texts of special tokens that stay in the output's text, whatever `skip_special_tokens` says.
    `truncate`: where a prompt that leaves no room for the output is cut; None: nowhere. Of `messages` the longest
    texts are cut. `truncate_to`: a prompt with more tokens is cut, too.
    `continue_final_message`: the output continues the final message, which must be the assistant's.
    `suffix`: what follows the output, for a `prompt` of text and models that fill in the middle.
    `add_generation_prompt`: false: the messages are all of the prompt, and no answer begins.
    `add_special_tokens`: false: the tokenizer adds none of its own to a prompt that is text.
    `priority`: smaller runs first.
    `deadline_s`: seconds after admission at which the request ends with its partial output and finish reason
    `deadline`.
    `resume_token_ids`: tokens that earlier attempts have delivered. They count as output, and generation continues
    after them.
    `resume_bins`: the numbers that these tokens carry, as in `Delta`, if some of them carry any.
    `resume_prompt_tokens`: of how many of the prompt's tokens these attempts have delivered log-probabilities.
    `resume_adapter_key`: the `Handle.adapter_key` of these attempts. If the current adapter's key differs, the
    request fails with AdapterChanged.
    `resume_fingerprint`: the model of these attempts, if it is known. Texts of another one fail with ModelChanged.
    `salt`: isolates the prefix caches of tenants.
    `constraint`: may also be a `ConstraintState` of the caller's, such as
    `gpu_worker.constraints.SkillConstraint`."""

    prompt: str | Sequence[PromptToken] | None = None
    suffix: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    skill: SkillCall | None = None
    texts: Sequence[Text] | None = None
    embedding: Embedding | None = None
    scoring: Scoring | None = None
    second_at: int | None = None
    unpooled: int = 0
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    truncate: Truncate | None = None
    truncate_to: int | None = None
    shown_tokens: Sequence[str] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    constraint: Constraint | ConstraintState | None = None
    adapter: str | None = None
    images: Sequence[PreparedImage | bytes] = ()
    image_views: Sequence[View] = ()
    priority: int = 0
    deadline_s: float | None = None
    salt: str = ""
    resume_token_ids: Sequence[int] = ()
    resume_bins: Sequence[Sequence[int] | None] = ()
    resume_prompt_tokens: int = 0
    resume_adapter_key: str | None = None
    resume_fingerprint: str | None = None
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def pooled(self) -> bool:
        """Whether the output is what a model of texts makes, and not tokens."""
        return self.embedding is not None or self.scoring is not None


@dataclass(frozen=True, slots=True)
class Result:
    """The complete output of a request.

    `stop_reason`: the condition that ended the output: "eos", a stop token id, a stop string or sequence,
    "constraint", "max_tokens", "max_model_len", or None. `prompt_logprobs`: see `Delta`. `vectors`: of a model
    of texts, as in `petiole.contract.results.vectors`, like `sparse` and `colbert`; `scores`: the numbers of each
    text; all these without those of earlier attempts. `best`: how many texts are ranked by their scores; None: no
    order was asked for. `answer`: the answer of a skill, as JSON data. `draft_tokens`, `accepted_draft_tokens`:
    how many drafts of tokens were verified here, and how many of these were right."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    usage: Usage
    timing: Timing
    model: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    vectors: tuple[str, ...] | None = None
    sparse: tuple[str, ...] | None = None
    colbert: tuple[str, ...] | None = None
    scores: tuple[tuple[float, ...], ...] | None = None
    best: int | None = None
    answer: Mapping[str, Any] | None = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


MAX_DEPTH = 64


def check_text(field: str, text: object) -> str:
    """A string that can be written as UTF-8."""
    if not isinstance(text, str):
        raise InvalidRequest(field, "must be a string", type(text).__name__)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        value = f"{text[error.start]!a} at position {error.start}"
        raise InvalidRequest(field, "must be valid Unicode text", value) from error
    return str(text)


def check_token_ids(field: str, token_ids: object, vocab_size: int) -> list[int]:
    """A list of token ids below `vocab_size`."""
    if isinstance(token_ids, str | bytes | Mapping) or not hasattr(token_ids, "__iter__"):
        raise InvalidRequest(field, "must be a list of token ids", type(token_ids).__name__)
    ids = list(token_ids)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return ids
    for k, token_id in enumerate(ids):
        if not is_token_id(token_id, vocab_size):
            raise InvalidRequest(f"{field}[{k}]", f"must be a token id from 0 to {vocab_size - 1}", repr(token_id))
    return [int(token_id) for token_id in ids]


def is_token_id(value: Any, vocab_size: int) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__") and 0 <= value < vocab_size


def plain_data(field: str, value: object, depth: int = 0) -> Any:
    """A copy made of JSON's own types, with checked strings. Raises InvalidRequest with the path of anything
    else."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return check_text(field, value)
    if depth >= MAX_DEPTH:
        raise InvalidRequest(field, f"must be nested at most {MAX_DEPTH} deep", "deeper")
    if isinstance(value, Mapping):
        return {
            check_text(f"{field} (a key)", key): plain_data(f"{field}.{key}", item, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_data(f"{field}[{k}]", item, depth + 1) for k, item in enumerate(value)]
    raise InvalidRequest(field, "must be JSON data", type(value).__name__)

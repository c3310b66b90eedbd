"""The answers of a task: the deltas of its stream, its end, and its result.

Each field is declared only here (its parts in `contract.results.outputs`, if the engine makes them): its type, and
its meaning below it. `record.codec` derives from these declarations what is written and read. `python -m
docs.render` writes `GenerationDict` and the tables of docs/streams.md and docs/requests.md from them.

    in a delta of the log   `Piece`; in the last delta also `EndOfOutput` and `error`
    in the task's state     `prepared`, in a delta that is not in the log; `End`
    in the result backend   `GenerationResult`: the log and the end together
    in no delta of the log  `Shown`: what is made of the text, by the worker for the end and by readers"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from petiole.contract.results.outputs import Prepared, Timing, TokenLogprobs, Usage
from petiole.contract.results.vectors import Encoding

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


class ResultModel(BaseModel):
    """Base of the models that a reader receives. Later versions may add fields, which an older reader ignores."""

    model_config = ConfigDict(defer_build=True, extra="ignore", frozen=True)


class Piece(ResultModel):
    """A part of an output. Each optional field has one entry for each token."""

    task_id: str
    """The id of the task."""
    attempt: int
    """The delivery that made the delta: 1, or more after a worker was lost or handed the task back."""
    index: int
    """The position of `token_ids[0]` in the output. Below 0: in the prompt, whose last token is at -1."""
    token_ids: list[int]
    """One or more tokens; the last delta may have none."""
    text: str
    """The text of these tokens. It may lag behind them: an incomplete character or a possible stop string is held
    back. The last delta has the rest."""
    values: list[float | list[float] | None] | None = None
    """For tokens that carry a value, such as a part of a point: the value; null for text."""
    bins: list[list[int] | None] | None = None
    """The whole numbers from which the values follow, and from which a resumed request continues."""
    items: list[dict[str, float] | None] | None = None
    """For skills: the point or box that each token completes, or null. See docs/vision.md."""
    logprobs: list[TokenLogprobs] | None = None
    """If `logprobs` was given: one `{"token_id", "logprob", "top": [[id, logprob], …]}` for each token."""
    vectors: list[str] | None = None
    """`embed`: the vector of each text, as base64; `token_ids` has its number of tokens. See
    docs/embeddings.md#vectors."""
    scores: list[list[float]] | None = None
    """`score` and `rerank`: one for each pair; `classify`: one for each label. `token_ids` has the number of
    tokens."""
    sparse: list[str] | None = None
    """`embed` with this output: weights of words, as base64."""
    colbert: list[str] | None = None
    """Likewise: vectors of tokens."""


class EndOfOutput(ResultModel):
    """What the last delta and the result say of the end. Of a task that no engine has run, usage, timing and model
    are missing."""

    finish_reason: FinishReason | None = None
    """Null; in the last delta only, `stop`, `length`, `cancelled`, `deadline` or `error`."""
    stop_reason: str | int | None = None
    """Which condition ended the output."""
    usage: Usage | None = None
    """`prompt_tokens`, `cached_prompt_tokens` (those of them that the prefix cache had), `completion_tokens`,
    `reasoning_tokens`."""
    timing: Timing | None = None
    """Milliseconds since arrival in the engine: `queue_ms` until admission, `ttft_ms` until the first token,
    `total_ms`. `prefill_ms` is a duration, `ended_at` in seconds since 1970."""
    model: str | None = None
    """The name in the worker's `PETIOLE_MODEL`."""


class ToolCall(ResultModel):
    """A call of a tool, or the next part of its arguments, which are JSON as text. The first part of a call has
    the id and the name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


class Shown(ResultModel):
    """What is made of the text, which the log has as the model wrote it. See docs/tools.md."""

    content: str | None = None
    """The text without reasoning and calls of tools, where it has any."""
    tool_calls: list[ToolCall] | None = None
    """The calls of tools in the text. The arguments are JSON as text, and may be cut off where the output was."""


class ShownPiece(Shown):
    """`Shown` of a delta."""

    reasoning: str | None = None
    """The part of the text that is reasoning, where a reader was asked to find it."""


class StreamDelta(ShownPiece, EndOfOutput, Piece):
    """A piece of a task's stream. Only the last delta has a `finish_reason`."""

    prepared: Prepared | None = None
    """Only in the delta that announces a task. See docs/streams.md#before-the-first-token."""
    after_prompt: bool | None = None
    """True in the first delta of an output, if deltas of the prompt come before it."""

    error: dict[str, Any] | None = None
    """`{"type", "message", "args"}`, if the task has failed."""

    @property
    def end(self) -> int:
        """The index at which the next delta begins."""
        return self.index + len(self.token_ids)

    @property
    def points(self) -> list[dict[str, float]]:
        """The points that this delta completes."""
        return self._with("x")

    @property
    def objects(self) -> list[dict[str, float]]:
        """The boxes that this delta completes."""
        return self._with("x_min")

    def _with(self, name: str) -> list[dict[str, float]]:
        return [item for item in self.items or () if item is not None and name in item]

    @property
    def is_heartbeat(self) -> bool:
        """Whether this is a sign of life that a reader asked for by `heartbeat_s`, and not a delta of the task."""
        return not self.token_ids and self.finish_reason is None and self.prepared is None


class Point(ResultModel):
    """As shares of the picture's width and height, from its upper left corner."""

    x: float
    y: float


class Box(ResultModel):
    """As shares of the picture's width and height, from its upper left corner."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


class Grounding(ResultModel):
    """The part of a reasoning's text, from `start_idx` to before `end_idx`, that is about `points`, pairs of x and
    y."""

    start_idx: int
    end_idx: int
    points: list[list[float]]


class Reasoning(ResultModel):
    """The model's thoughts before its answer, and which parts of them are about which points of the picture."""

    text: str
    grounding: list[Grounding]


class Ranked(ResultModel):
    """A document of `rerank`: its position among the documents, and its score."""

    index: int
    score: float


class ResultSummary(Shown, EndOfOutput):
    """All of a result but the tokens and their text, which are in the log."""

    attempt: int | None = None
    """The delivery that ended the task, from 1 on."""
    answer: str | None = None
    """The answer to a `query`."""
    reasoning: Reasoning | None = None
    """`chat` and `query`: the model's reasoning."""
    caption: str | None = None
    """The caption of an image."""
    points: list[Point] | None = None
    """`point`: `[{"x": 0.5, "y": 0.25}, ...]`, as shares of width and height."""
    objects: list[Box] | None = None
    """`detect`: `[{"x_min": 0.1, "y_min": 0.2, "x_max": 0.5, "y_max": 0.9}, ...]`."""
    dimensions: int | None = None
    """`embed`: how many numbers each vector has."""
    encoding: Encoding | None = None
    """How vectors are written."""
    token_dimensions: int | None = None
    """The numbers of each vector in `colbert`."""
    fingerprint: str | None = None
    """The digest of the model that made vectors or scores: only those of the same one can be compared."""
    labels: list[str] | None = None
    """`classify`: the classes, in the order of scores."""
    ranking: list[Ranked] | None = None
    """`rerank`: the documents, the best first: `[{"index": 2, "score": 0.98}, ...]`."""


class End(ResultSummary):
    """How a task has ended."""

    finish_reason: FinishReason
    error: dict[str, Any] | None = None
    """`{"type", "message", "args"}`, if the task has failed."""


class Output(ResultModel):
    """All the output of a task."""

    text: str
    """The output, without end token and stop strings (unless `include_stop`) and special tokens (unless
    `skip_special_tokens` is false)."""
    token_ids: list[int]
    """The output, with the end token or the tokens of the stop string."""
    logprobs: list[TokenLogprobs] | None = None
    """As in the deltas."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """The log-probability of each token of the prompt; 0 for the first."""
    vectors: list[str] | None = None
    """`embed`: the vectors in the order of the texts, as base64; `petiole.Vectors.of(result)` reads them."""
    scores: list[list[float]] | None = None
    """A list for each pair or text, in their order: one number, for `classify` one for each of `labels`."""
    sparse: list[str] | None = None
    """`embed` with this output: weights of words, as base64, for `petiole.SparseVectors`."""
    colbert: list[str] | None = None
    """Likewise: vectors of tokens, for `petiole.TokenVectors`."""


class GenerationResult(ResultSummary, Output):
    """A task's result. `AsyncResult.get()` returns it as a dictionary:
    `GenerationResult.model_validate(result.get())`.

    `petiole.contract.types.GenerationDict` is the type of that dictionary.
    """

    finish_reason: FinishReason
    """`stop` (end token or stop condition), `length` (`max_tokens`, the context) or `deadline`. Cancelled tasks
    are REVOKED, without a result."""
    stop_reason: str | int | None
    """`"eos"`, `"max_tokens"`, `"max_model_len"`, `"constraint"` (nothing can follow), or the stop string, id or
    sequence."""
    usage: Usage
    timing: Timing
    model: str
    attempt: int

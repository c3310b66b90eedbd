"""Options and results as type checkers and editors see them: `requests` and `results` as dictionaries.

A checker cannot derive a call's keyword arguments from a pydantic model. `python -m docs.render` writes this
module: change the declarations.
"""

from typing import Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel

from petiole.contract.requests.submission import Reading, Submission
from petiole.contract.results.task_result import FinishReason


class Sampling(TypedDict, total=False):
    """How tokens are drawn, and what ends the output: the fields of the engine's `SamplingParams`."""

    max_tokens: int | Literal["rest"]
    """The most tokens of the output; `"rest"`: all that the context has room for. Default: 256."""
    min_tokens: int
    """No end token or stop condition ends the output before this many tokens. See
    docs/requests.md#not-before-min_tokens. Default: 0."""
    temperature: float
    """0: always the likeliest token; higher values vary more. From 0 to 100. Default: 1.0."""
    top_k: int
    """Draw from the k likeliest tokens; 0: from all. Default: 0."""
    top_p: float
    """Draw from the likeliest tokens that together have this probability, after `temperature` and `top_k`. Above 0
    and at most 1. Default: 1.0."""
    min_p: float
    """Leave out tokens less likely than this share of the likeliest token's probability. From 0 to 1. Default:
    0.0."""
    repetition_penalty: float
    """Above 1: fewer repetitions of tokens of prompt and output. From 0.01 to 100. Default: 1.0."""
    presence_penalty: float
    """Subtracted from the logits of the output's tokens. From -2 to 2. Default: 0.0."""
    frequency_penalty: float
    """Subtracted from a token's logit for each time that the output has it. From -2 to 2. Default: 0.0."""
    logit_bias: dict[int, float]
    """Added to logits, by token id, up to 65,536 of them; -1000 to 1000."""
    allowed_token_ids: list[int] | None
    """The output consists of these tokens only."""
    banned_token_ids: list[int]
    """The output contains none of these tokens."""
    bad_words: list[str]
    """Where the tokens of one of these words would be complete, with a space before it or without, its last token
    is not drawn. Other tokens can still spell a word."""
    seed: int | None
    """Decides what is drawn. `None`: derived from the task's id. See docs/requests.md#seeds."""
    logprobs: int | None
    """The log-probability of each output token, and of this many likeliest tokens in its place. From 0 to 20."""
    logprob_token_ids: list[int]
    """With `logprobs`: these tokens, up to 128, instead of the likeliest ones."""
    logprob_texts: bool
    """The texts and bytes of these tokens, too. Default: False."""
    prompt_logprobs: int | None
    """The same for each token of the prompt, given those before it. See
    docs/requests.md#log-probabilities-of-the-prompt-logprobs. From 0 to 20."""
    ignore_eos: bool
    """End tokens do not end the output. For benchmarks. Default: False."""
    stop: str | list[str]
    """One string, or up to 64. The text ends before the first that it would contain."""
    include_stop: bool
    """The text ends with the stop string, or the text of the stop token. See docs/requests.md#special-tokens.
    Default: False."""
    stop_token_ids: list[int]
    """Any of these tokens ends the output; its id is in the output, its text is not."""
    stop_token_sequences: list[list[int]]
    """Any of these sequences of ids ends the output, which has its text."""
    skip_special_tokens: bool
    """`False` keeps special tokens in the text. See docs/requests.md#special-tokens. Default: True."""


class Common(TypedDict, total=False):
    """Options of every task."""

    salt: str
    """Only requests with the same salt share cached prefixes: one for each tenant."""
    affinity: str | None
    """Give the same to tasks that begin alike: on a Redis broker they run on one worker while it has room. Chats
    and tasks about an image get one without asking. See docs/scaling.md#conversations-stay-where-they-began."""
    deadline_s: float | None
    """The generation ends this many seconds after admission, with its output so far. Above 0 and at most
    1,000,000,000."""
    stream_ttl_s: int | None
    """Seconds that the stream stays readable after its last delta; at most, and by default,
    `PETIOLE_STREAM_TTL_S`."""
    result_expires_s: int | None
    """Seconds that the result is kept, on Redis; at most, and by default, `PETIOLE_RESULT_EXPIRES_S`."""
    cancel_on_disconnect: bool
    """Cancel the task when the reader of its stream goes away. See docs/streams.md#going-away. Default: False."""


class Options(Common, Sampling, total=False):
    """Options of both `generate` and `chat`."""

    json_schema: type[BaseModel] | str | dict[str, Any] | None
    """The output is JSON of this schema (an object or its JSON), or of this pydantic class. At most one of
    `json_schema`, `regex`, `choice`, `grammar`. See docs/constraints.md."""
    regex: str | None
    """The output matches this regular expression."""
    choice: list[str] | None
    """The output is one of these."""
    grammar: str | None
    """The output matches this grammar, in Lark's notation."""
    truncate: Literal["start", "middle", "end"] | None
    """A prompt that leaves no room for `max_tokens` (of `"rest"`: for 256) is cut, not refused: at its `start`, in
    its `middle`, or at its `end`. Of a conversation the longest texts are cut, all to one length, so a short
    instruction stays whole. See docs/batch.md#rows-that-are-too-long."""
    truncate_to: int | None
    """With `truncate`: the prompt is cut if it has more tokens than this, too."""
    adapter: str | None
    """A LoRA adapter: a folder on the workers, or a hub id. See docs/models.md#lora."""


class Answering(Common, total=False):
    """Options of the skills that answer with text: `query` and `caption`."""

    max_tokens: int | Literal["rest"]
    """The output has at most this many tokens; `"rest"`: as many as the context has room for. Default: 768."""
    temperature: float
    """0 always takes the likeliest token; higher values vary more. From 0 to 100. Default: 0.5."""
    top_p: float
    """Draw only from the likeliest tokens that together have this probability. Above 0 and at most 1. Default:
    0.3."""
    seed: int | None
    """The same request with the same seed draws the same tokens. `None`: derived from the task's id."""


class Finding(Common, total=False):
    """Options of the skills that find things: `point` and `detect`. They take the likeliest tokens."""

    max_objects: int
    """At most this many are found. Default: 50."""


class OfTexts(Common, total=False):
    """Options of every task of texts."""

    truncate: bool
    """Cut a text that is too long for the model, instead of refusing it: of a pair, the longer text first.
    Default: False."""
    truncate_to: int | None
    """With `truncate`: a text or pair is cut if it has more tokens than this, too."""


class Judged(OfTexts, total=False):
    """Options of the tasks that say how well two texts match."""

    instruction: str | None
    """What a model that generates is to judge by. `None`: whether a passage answers a query."""


class _GenerateOptions(Options, total=False):
    """What none needs to give."""

    suffix: str | None
    """What follows the output: for models with tokens for filling in the middle, such as Qwen2.5-Coder."""


class GenerateOptions(_GenerateOptions):
    """Options of `generate`."""

    prompt: str | list[int]
    """What to continue: text, to which the tokenizer adds its special tokens (BOS for Llama, none for Qwen), or
    token ids, taken as they are."""


class PartialGenerateOptions(_GenerateOptions, total=False):
    """Options of `generate` in a chain: the previous task may supply what is missing."""

    prompt: str | list[int]
    """What to continue: text, to which the tokenizer adds its special tokens (BOS for Llama, none for Qwen), or
    token ids, taken as they are."""


class GenerateCall(GenerateOptions, Submission):
    """What `generate.delay` takes."""


class GenerateStream(GenerateCall, Reading):
    """What `generate.stream` takes."""


class _ChatOptions(Options, total=False):
    """What none needs to give."""

    tools: list[dict[str, Any]] | None
    """JSON objects for the chat template. See docs/requests.md#conversations-and-tools."""
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any]
    """`auto`, `none`, `required`, or the tools that it must or may call, in the forms of OpenAI's API. See
    docs/tools.md#what-is-enforced. Default: 'auto'."""
    parallel_tool_calls: bool
    """`False`: at most one call. Default: True."""
    reasoning_effort: str | None
    """How long the model thinks, in the words of its chat template, such as `low`; `none`: it does not think."""
    max_reasoning_tokens: int | None
    """The most tokens of a thought, for models that reason. See docs/tools.md#what-is-enforced."""
    chat_template_kwargs: dict[str, Any]
    """Variables for the chat template, such as Qwen3's `enable_thinking`."""
    continue_final_message: bool
    """Continue the last message, which must be the assistant's, instead of answering it. Default: False."""


class ChatOptions(_ChatOptions):
    """Options of `chat`."""

    messages: list[dict[str, Any]]
    """What to answer: `[{"role": "user", "content": "..."}]`. The checkpoint's chat template, which it must have,
    renders them, with their other keys. A vision model takes an image part. See
    docs/vision.md#in-a-conversation."""


class PartialChatOptions(_ChatOptions, total=False):
    """Options of `chat` in a chain: the previous task may supply what is missing."""

    messages: list[dict[str, Any]]
    """What to answer: `[{"role": "user", "content": "..."}]`. The checkpoint's chat template, which it must have,
    renders them, with their other keys. A vision model takes an image part. See
    docs/vision.md#in-a-conversation."""


class ChatCall(ChatOptions, Submission):
    """What `chat.delay` takes."""


class ChatStream(ChatCall, Reading):
    """What `chat.stream` takes."""


class _QueryOptions(Answering, total=False):
    """What none needs to give."""

    image: bytes | str | None
    """What the question is about, if anything: a file's bytes (JPEG, PNG or WebP), base64 of them, a data URL, or
    a handle of `put_image`. See docs/vision.md."""
    reasoning: bool
    """The model reasons first; the result has its reasoning. Default: False."""


class QueryOptions(_QueryOptions):
    """Options of `query`."""

    question: str
    """The question."""


class PartialQueryOptions(_QueryOptions, total=False):
    """Options of `query` in a chain: the previous task may supply what is missing."""

    question: str
    """The question."""


class QueryCall(QueryOptions, Submission):
    """What `query.delay` takes."""


class QueryStream(QueryCall, Reading):
    """What `query.stream` takes."""


class _CaptionOptions(Answering, total=False):
    """What none needs to give."""

    length: Literal["short", "normal", "long"]
    """How much to say. Default: 'normal'."""


class CaptionOptions(_CaptionOptions):
    """Options of `caption`."""

    image: bytes | str
    """What to describe, in the forms that `query` takes."""


class PartialCaptionOptions(_CaptionOptions, total=False):
    """Options of `caption` in a chain: the previous task may supply what is missing."""

    image: bytes | str
    """What to describe, in the forms that `query` takes."""


class CaptionCall(CaptionOptions, Submission):
    """What `caption.delay` takes."""


class CaptionStream(CaptionCall, Reading):
    """What `caption.stream` takes."""


class PointOptions(Finding):
    """Options of `point`."""

    image: bytes | str
    """Where to look, in the forms that `query` takes."""
    object: str
    """What to look for: `"car"`."""


class PartialPointOptions(Finding, total=False):
    """Options of `point` in a chain: the previous task may supply what is missing."""

    image: bytes | str
    """Where to look, in the forms that `query` takes."""
    object: str
    """What to look for: `"car"`."""


class PointCall(PointOptions, Submission):
    """What `point.delay` takes."""


class PointStream(PointCall, Reading):
    """What `point.stream` takes."""


class DetectOptions(Finding):
    """Options of `detect`."""

    image: bytes | str
    """Where to look, in the forms that `query` takes."""
    object: str
    """What to look for: `"car"`."""


class PartialDetectOptions(Finding, total=False):
    """Options of `detect` in a chain: the previous task may supply what is missing."""

    image: bytes | str
    """Where to look, in the forms that `query` takes."""
    object: str
    """What to look for: `"car"`."""


class DetectCall(DetectOptions, Submission):
    """What `detect.delay` takes."""


class DetectStream(DetectCall, Reading):
    """What `detect.stream` takes."""


class _EmbedOptions(OfTexts, total=False):
    """What none needs to give."""

    dimensions: int | None
    """Keep this many of a vector's first numbers (Matryoshka). `None`: all."""
    normalize: bool | None
    """Give each vector the length 1. `None`: as the model's files say."""
    encoding: Literal["float32", "float16", "int8", "bits"]
    """The numbers in the result: `float32`, `float16`, `int8` or `bits`. See docs/embeddings.md#vectors. Default:
    'float32'."""
    prompt_name: str | None
    """The model's prompt before each text, such as `query`. `None`: its default."""
    add_special_tokens: bool
    """`False`: without those that the tokenizer adds. Default: True."""
    outputs: list[Literal["dense", "sparse", "colbert"]] | None
    """`dense`; of BGE-M3 also `sparse`, weights of words, and `colbert`, vectors of tokens. `None`: `dense`."""


class EmbedOptions(_EmbedOptions):
    """Options of `embed`."""

    texts: str | list[str]
    """Texts, or one. The result has their vectors in the same order."""


class PartialEmbedOptions(_EmbedOptions, total=False):
    """Options of `embed` in a chain: the previous task may supply what is missing."""

    texts: str | list[str]
    """Texts, or one. The result has their vectors in the same order."""


class EmbedCall(EmbedOptions, Submission):
    """What `embed.delay` takes."""


class EmbedStream(EmbedCall, Reading):
    """What `embed.stream` takes."""


class _RerankOptions(Judged, total=False):
    """What none needs to give."""

    top_n: int | None
    """The ranking has this many documents. `None`: all."""


class RerankOptions(_RerankOptions):
    """Options of `rerank`."""

    query: str
    """What the documents are ranked for."""
    documents: list[str]
    """The result has their scores in the same order, and their ranking."""


class PartialRerankOptions(_RerankOptions, total=False):
    """Options of `rerank` in a chain: the previous task may supply what is missing."""

    query: str
    """What the documents are ranked for."""
    documents: list[str]
    """The result has their scores in the same order, and their ranking."""


class RerankCall(RerankOptions, Submission):
    """What `rerank.delay` takes."""


class RerankStream(RerankCall, Reading):
    """What `rerank.stream` takes."""


class ScoreOptions(Judged):
    """Options of `score`."""

    pairs: list[list[str]]
    """Pairs of texts. The result has their scores in the same order."""


class PartialScoreOptions(Judged, total=False):
    """Options of `score` in a chain: the previous task may supply what is missing."""

    pairs: list[list[str]]
    """Pairs of texts. The result has their scores in the same order."""


class ScoreCall(ScoreOptions, Submission):
    """What `score.delay` takes."""


class ScoreStream(ScoreCall, Reading):
    """What `score.stream` takes."""


class _ClassifyOptions(OfTexts, total=False):
    """What none needs to give."""

    texts: str | list[str] | None
    """Texts, or one. The result has their lists of scores in the same order."""
    pairs: list[list[str]] | None
    """Pairs of texts in place of texts, for a model that judges the second by the first."""


class ClassifyOptions(_ClassifyOptions):
    """Options of `classify`."""


class PartialClassifyOptions(_ClassifyOptions, total=False):
    """Options of `classify` in a chain: the previous task may supply what is missing."""


class ClassifyCall(ClassifyOptions, Submission):
    """What `classify.delay` takes."""


class ClassifyStream(ClassifyCall, Reading):
    """What `classify.stream` takes."""


class CountCall(Submission, total=False):
    """What `count.delay` takes. Exactly one of `texts`, `messages` and `token_ids` must be given."""

    texts: str | list[str] | None
    """Texts, each counted as `generate` would count it as a prompt."""
    messages: list[dict[str, Any]] | None
    """A conversation, counted as `chat` would count it: rendered, with its images."""
    tools: list[dict[str, Any]] | None
    """The conversation's tools."""
    chat_template_kwargs: dict[str, Any]
    """Variables for the chat template."""
    continue_final_message: bool
    """The last message is continued. Default: False."""
    add_generation_prompt: bool
    """`False`: the conversation ends with its last message, and no answer begins. Default: True."""
    add_special_tokens: bool
    """`False`: without the tokenizer's own in `texts`. Default: True."""
    token_ids: list[list[int]] | None
    """Lists of token ids, to get their texts."""
    with_ids: bool
    """Also return the token ids. A position of an image is -1. Default: False."""
    with_tokens: bool
    """Also return the tokens as the vocabulary writes them (`Ġthe`). A position of an image is empty. Default:
    False."""
    skip_special_tokens: bool
    """`False` keeps special tokens in the texts of `token_ids`. Default: True."""


class TokenLogprobsDict(TypedDict):
    """Natural-log probabilities of one position, after penalties and masks, before temperature; `top` are pairs of
    token id and log probability.  `texts`, `bytes`: those of this token and then of those in `top`, if
    `logprob_texts` was given. A token may be a part of a character, so its text may not say what its bytes are.
    `length`, with these: how many characters the output has up to and including this token. A hidden token adds
    none."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    texts: NotRequired[list[str]]
    bytes: NotRequired[list[list[int]]]
    length: NotRequired[int]


class UsageDict(TypedDict):
    """Numbers of tokens. `cached_prompt_tokens`: how many of the prompt's tokens were in the prefix cache.
    `reasoning_tokens`: how many of the output's tokens are reasoning, where that is known."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: NotRequired[int]


class TimingDict(TypedDict):
    """Milliseconds since arrival in the engine; `prefill_ms` is a duration, from admission to the first token.
    `ended_at`: when the output ended, in seconds since 1970."""

    queue_ms: float
    prefill_ms: float
    ttft_ms: float | None
    total_ms: float
    ended_at: NotRequired[float]


class ToolCallDict(TypedDict):
    """A call of a tool, or the next part of its arguments, which are JSON as text. The first part of a call has
    the id and the name."""

    index: int
    arguments: str
    id: NotRequired[str]
    name: NotRequired[str]


class GroundingDict(TypedDict):
    """The part of a reasoning's text, from `start_idx` to before `end_idx`, that is about `points`, pairs of x and
    y."""

    start_idx: int
    end_idx: int
    points: list[list[float]]


class ReasoningDict(TypedDict):
    """The model's thoughts before its answer, and which parts of them are about which points of the picture."""

    text: str
    grounding: list[GroundingDict]


class PointDict(TypedDict):
    """As shares of the picture's width and height, from its upper left corner."""

    x: float
    y: float


class BoxDict(TypedDict):
    """As shares of the picture's width and height, from its upper left corner."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


class RankedDict(TypedDict):
    """A document of `rerank`: its position among the documents, and its score."""

    index: int
    score: float


class GenerationDict(TypedDict):
    """What a task returns."""

    text: str
    """The output, without end token and stop strings (unless `include_stop`) and special tokens (unless
    `skip_special_tokens` is false)."""
    token_ids: list[int]
    """The output, with the end token or the tokens of the stop string."""
    logprobs: NotRequired[list[TokenLogprobsDict]]
    """As in the deltas."""
    prompt_logprobs: NotRequired[list[TokenLogprobsDict]]
    """The log-probability of each token of the prompt; 0 for the first."""
    vectors: NotRequired[list[str]]
    """`embed`: the vectors in the order of the texts, as base64; `petiole.Vectors.of(result)` reads them."""
    scores: NotRequired[list[list[float]]]
    """A list for each pair or text, in their order: one number, for `classify` one for each of `labels`."""
    sparse: NotRequired[list[str]]
    """`embed` with this output: weights of words, as base64, for `petiole.SparseVectors`."""
    colbert: NotRequired[list[str]]
    """Likewise: vectors of tokens, for `petiole.TokenVectors`."""
    finish_reason: FinishReason
    """`stop` (end token or stop condition), `length` (`max_tokens`, the context) or `deadline`. Cancelled tasks
    are REVOKED, without a result."""
    stop_reason: str | int | None
    """`"eos"`, `"max_tokens"`, `"max_model_len"`, `"constraint"` (nothing can follow), or the stop string, id or
    sequence."""
    usage: UsageDict
    """`prompt_tokens`, `cached_prompt_tokens` (those of them that the prefix cache had), `completion_tokens`,
    `reasoning_tokens`."""
    timing: TimingDict
    """Milliseconds since arrival in the engine: `queue_ms` until admission, `ttft_ms` until the first token,
    `total_ms`. `prefill_ms` is a duration, `ended_at` in seconds since 1970."""
    model: str
    """The name in the worker's `PETIOLE_MODEL`."""
    content: NotRequired[str]
    """The text without reasoning and calls of tools, where it has any."""
    tool_calls: NotRequired[list[ToolCallDict]]
    """The calls of tools in the text. The arguments are JSON as text, and may be cut off where the output was."""
    attempt: int
    """The delivery that ended the task, from 1 on."""
    answer: NotRequired[str]
    """The answer to a `query`."""
    reasoning: NotRequired[ReasoningDict]
    """`chat` and `query`: the model's reasoning."""
    caption: NotRequired[str]
    """The caption of an image."""
    points: NotRequired[list[PointDict]]
    """`point`: `[{"x": 0.5, "y": 0.25}, ...]`, as shares of width and height."""
    objects: NotRequired[list[BoxDict]]
    """`detect`: `[{"x_min": 0.1, "y_min": 0.2, "x_max": 0.5, "y_max": 0.9}, ...]`."""
    dimensions: NotRequired[int]
    """`embed`: how many numbers each vector has."""
    encoding: NotRequired[Literal["float32", "float16", "int8", "bits"]]
    """How vectors are written."""
    token_dimensions: NotRequired[int]
    """The numbers of each vector in `colbert`."""
    fingerprint: NotRequired[str]
    """The digest of the model that made vectors or scores: only those of the same one can be compared."""
    labels: NotRequired[list[str]]
    """`classify`: the classes, in the order of scores."""
    ranking: NotRequired[list[RankedDict]]
    """`rerank`: the documents, the best first: `[{"index": 2, "score": 0.98}, ...]`."""

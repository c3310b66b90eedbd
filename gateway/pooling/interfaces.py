"""Embeddings as OpenAI has them; rerank as Cohere, Jina and vLLM, score and classify as vLLM: which task a request
becomes, and its answer. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from operator import mul
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from petiole.contract.errors import shorten
from petiole.contract.limits import MAX_MESSAGES
from petiole.contract.requests.bounds import Entries, Object
from petiole.contract.requests.validation import listed
from petiole.contract.results.vectors import MOST_TEXTS, Vectors
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.requests import MostPromptTokens, RequestBody, cut_to, one_or_many, submission
from petiole.gateway.core.task_plan import Plan, TaskCall
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelRoute

_OF_A_CHAT = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")

KEEP_S = 600
"""How long the record of a request is kept. It has one answer, which its own client waits for."""

Texts = Annotated[list[str], BeforeValidator(listed), Entries(MOST_TEXTS)]
"""One, or many."""


@dataclass
class PoolingResult:
    """What a task's log says of its texts, and its end of the classes."""

    vectors: list[str] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    prompt_tokens: int = 0


class PoolingBody(RequestBody):
    """What all requests of texts have."""

    PREFIX: ClassVar[str]
    NAMES: ClassVar[dict[str, str]]
    """By an option of the task: the client's field."""
    LABELS: ClassVar[bool] = False
    """Whether the answer names classes."""
    SECOND: ClassVar = ""
    """The client's field of the second texts of pairs."""

    model: str = Field(min_length=1, max_length=1024)
    priority: int | None = Field(default=None, ge=0, le=9)
    truncate_prompt_tokens: MostPromptTokens = None
    truncation_side: Literal["right"] = "right"

    @abstractmethod
    def call(self) -> TaskCall:
        """The task that it becomes."""

    def compared(self) -> TaskCall | None:
        """The task that makes vectors, whose cosines answer. None: cosines do not."""
        return None

    def plan(self, name: str, now: int, found: ModelRoute) -> Plan:
        """Raises `InvalidRequest`."""
        if found.adapter is not None:
            raise InvalidRequest("model", "must not be an adapter: it has none of its own for texts", self.model)
        call, names = self.call(), self.NAMES
        if found.makes_vectors and (compared := self.compared()) is not None:
            call, names = compared, {"texts": self.SECOND}
        options = {**call.options, "cancel_on_disconnect": True}
        if self.truncate_prompt_tokens is not None:
            options |= {"truncate": True, **cut_to(self.truncate_prompt_tokens)}
        record = RequestRecord(
            id=name,
            kind=call.task,
            created=now,
            model=self.model,
            tasks=[name],
            queue=found.queue,
            readers=True,
        )
        return Plan(record, [TaskCall(call.task, options)], submission(self.priority), names, KEEP_S)


class Embeddings(PoolingBody):
    """input: a text, token ids, or a list of either. messages: a conversation in its place (vLLM's). To token ids
    alone, and to a conversation, the tokenizer adds nothing unless `add_special_tokens` says so."""

    IGNORED: ClassVar = frozenset({"user"})
    PREFIX: ClassVar = "embd-"
    NAMES: ClassVar = {"texts": "input"}

    input: Any = None
    messages: Annotated[list[Object], Entries(MAX_MESSAGES, least=1)] | None = None
    chat_template_kwargs: Object = Field(default_factory=dict)
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    prompt_name: str | None = None
    normalize: bool | None = None

    @field_validator("input", mode="after")
    @classmethod
    def _texts(cls, given: object) -> list[str | list[int]]:
        return one_or_many("input", given, MOST_TEXTS, "texts", may_be_empty=False)

    @model_validator(mode="after")
    def _one_subject(self) -> Any:
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("input", "exactly one of input and messages must be given", "none or both")
        for name in _OF_A_CHAT if self.messages is None else ():
            if getattr(self, name):
                raise InvalidRequest(name, "needs messages", "input")
        if self.messages is not None and self.prompt_name is not None:
            raise InvalidRequest("prompt_name", "must not be given with messages", self.prompt_name)
        return self

    @property
    def rendering(self) -> dict[str, Any]:
        """How the conversation is rendered, as options of its count."""
        return {name: getattr(self, name) for name in _OF_A_CHAT}

    def rendered(self, ids: list[int]) -> Embeddings:
        """The same of the conversation's tokens."""
        return self.model_copy(update={"input": [ids], "messages": None})

    @property
    def ids_to_spell(self) -> list[list[int]]:
        return [one for one in self.input if isinstance(one, list)]

    def spelled(self, texts: Sequence[str]) -> Embeddings:
        """The same with the texts of `ids_to_spell` in their places."""
        rest, update = iter(texts), dict[str, Any]()
        if self.add_special_tokens is None and len(texts) == len(self.input):
            update["add_special_tokens"] = False  # token ids are all that there is
        update["input"] = [one if isinstance(one, str) else next(rest) for one in self.input]
        return self.model_copy(update=update)

    def call(self) -> TaskCall:
        names = ("dimensions", "prompt_name", "normalize", "add_special_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return TaskCall("embed", {"texts": self.input, **given})

    def answer(self, record: RequestRecord, made: PoolingResult) -> dict[str, Any]:
        vectors: Sequence[Any] = made.vectors
        if self.encoding_format == "float":
            vectors = Vectors(made.vectors, self.dimensions or 0)
        return {
            "object": "list",
            "data": ({"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(vectors)),
            "model": self.model,
            "usage": _usage(made),
        }


class Judged(PoolingBody):
    """What asks how well texts match. A model that makes vectors says it by their cosine, as in vLLM."""

    instruction: str | None = None

    @abstractmethod
    def texts(self) -> tuple[list[str], list[str]]:
        """The first texts of pairs, or the one of all pairs; the second texts."""

    def compared(self) -> TaskCall:
        if self.instruction is not None:
            limit = "must not be given to a model that makes vectors"
            raise InvalidRequest("instruction", limit, shorten(self.instruction))
        first, second = self.texts()
        return TaskCall("embed", {"texts": [*second, *first], "normalize": True})

    def scores(self, made: PoolingResult) -> list[float]:
        """One for each of the second texts."""
        if not made.vectors:
            return [score for (score,) in made.scores]
        vectors, n = list(Vectors(made.vectors, 0)), len(self.texts()[1])
        return [sum(map(mul, one, two)) for one, two in zip(cycle(vectors[n:]), vectors[:n], strict=False)]


class Rerank(Judged):
    """documents: texts, or objects with a text."""

    PREFIX: ClassVar = "rerank-"
    NAMES: ClassVar = {}
    SECOND: ClassVar = "documents"
    REFUSED: ClassVar = {
        "rank_fields": "is not served: a document has its text",
        "max_tokens_per_doc": "is not served: use truncate_prompt_tokens",
        "max_chunks_per_doc": "is not served: use truncate_prompt_tokens",
    }

    query: str
    documents: Annotated[list[str | Object], Entries(MOST_TEXTS)]
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool = True

    @field_validator("documents", mode="after")
    @classmethod
    def _have_texts(cls, given: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        for position, one in enumerate(given):
            if isinstance(one, dict) and not isinstance(one.get("text"), str):
                raise InvalidRequest(f"documents[{position}].text", "must be text", shorten(one.get("text")))
        return given

    def texts(self) -> tuple[list[str], list[str]]:
        return [self.query], [one if isinstance(one, str) else str(one["text"]) for one in self.documents]

    def call(self) -> TaskCall:
        options: dict[str, Any] = {"query": self.query, "documents": self.texts()[1]}
        if self.instruction is not None:
            options["instruction"] = self.instruction
        return TaskCall("rerank", options)

    def answer(self, record: RequestRecord, made: PoolingResult) -> dict[str, Any]:
        scores = self.scores(made)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        texts, results = self.texts()[1], []
        for index in order[: self.top_n or len(order)]:  # 0, as in vLLM: all
            found: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self.return_documents:
                found["document"] = {"text": texts[index]}
            results.append(found)
        return {"id": record.id, "object": "list", "model": self.model, "results": results, "usage": _usage(made)}


class Score(Judged):
    """Each of text_1 with its own of text_2, or one with all."""

    PREFIX: ClassVar = "score-"
    NAMES: ClassVar = {"pairs": "text_2"}
    SECOND: ClassVar = "text_2"

    text_1: Texts
    text_2: Texts

    @model_validator(mode="after")
    def _as_many_of_both(self) -> Any:
        one, two = self.text_1, self.text_2
        if len(one) not in (1, len(two)):
            limit = f"must be one text, or as many as text_2 has, {len(two)}"
            raise InvalidRequest("text_1", limit, f"{len(one)} texts")
        return self

    def texts(self) -> tuple[list[str], list[str]]:
        return self.text_1, self.text_2

    def call(self) -> TaskCall:
        one, two = self.text_1, self.text_2
        pairs = list(zip(one * len(two) if len(one) == 1 else one, two, strict=True))
        options: dict[str, Any] = {"pairs": pairs}
        if self.instruction is not None:
            options["instruction"] = self.instruction
        return TaskCall("score", options)

    def answer(self, record: RequestRecord, made: PoolingResult) -> dict[str, Any]:
        return {
            "id": record.id,
            "object": "list",
            "created": record.created,
            "model": self.model,
            "data": [
                {"index": at, "object": "score", "score": score} for at, score in enumerate(self.scores(made))
            ],
            "usage": _usage(made),
        }


class Classify(PoolingBody):
    """input: a text, texts, or pairs [text, text], of which the second is judged by the first."""

    PREFIX: ClassVar = "classify-"
    NAMES: ClassVar = {"texts": "input", "pairs": "input"}
    LABELS: ClassVar = True

    input: Annotated[list[Any], BeforeValidator(listed), Entries(MOST_TEXTS)]

    @field_validator("input", mode="after")
    @classmethod
    def _of_one_kind(cls, given: list[Any]) -> list[Any]:
        wanted = list if given and isinstance(given[0], list) else str
        for position, one in enumerate(given):
            if not isinstance(one, wanted):
                limit = "must be a pair of texts, as the first is" if wanted is list else "must be text"
                raise InvalidRequest(f"input[{position}]", limit, shorten(one))
        return given

    def call(self) -> TaskCall:
        pairs = bool(self.input) and isinstance(self.input[0], list)
        return TaskCall("classify", {"pairs" if pairs else "texts": self.input})

    def answer(self, record: RequestRecord, made: PoolingResult) -> dict[str, Any]:
        data = (
            {"index": at, "label": _likeliest(scores, made.labels), "probs": scores, "num_classes": len(scores)}
            for at, scores in enumerate(made.scores)
        )
        return {
            "id": record.id,
            "object": "list",
            "created": record.created,
            "model": self.model,
            "data": data,
            "usage": _usage(made),
        }


def _likeliest(scores: Sequence[float], labels: Sequence[str]) -> str | None:
    """The label with the highest score; None if a worker has not named the labels."""
    return labels[max(range(len(scores)), key=scores.__getitem__)] if len(labels) == len(scores) else None


def _usage(made: PoolingResult) -> dict[str, int]:
    return {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}

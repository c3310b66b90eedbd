"""Embeddings as OpenAI has them; rerank as Cohere, Jina and vLLM, score and classify as vLLM: which task a request
becomes, and its answer. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from petiole.gateway.core.asking import Asked, AtTheLimit, submission
from petiole.gateway.core.plan import Call, Plan
from petiole.gateway.core.record import Record
from petiole.tasks.errors import InvalidRequest, shorten
from petiole.tasks.fleet.models import Found
from petiole.vectors import MOST_TEXTS, Vectors

KEEP_S = 600
"""How long the record of a request is kept. It has one answer, which its own client waits for."""


@dataclass
class Made:
    """What a task's log says of its texts, and its end of the classes."""

    vectors: list[str] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    prompt_tokens: int = 0


class OfTexts(Asked):
    """What all requests of texts have."""

    PREFIX: ClassVar[str]
    NAMES: ClassVar[dict[str, str]]
    """By an option of the task: the client's field."""
    LABELS: ClassVar[bool] = False
    """Whether the answer names classes."""

    model: str = Field(min_length=1, max_length=1024)
    priority: int | None = Field(default=None, ge=0, le=9)
    truncate_prompt_tokens: AtTheLimit = None

    @abstractmethod
    def call(self) -> Call:
        """The task that it becomes."""

    def plan(self, name: str, now: int, found: Found) -> Plan:
        """Raises `InvalidRequest`."""
        if found.adapter is not None:
            raise InvalidRequest("model", "must not be an adapter: it has none of its own for texts", self.model)
        call = self.call()
        options = {**call.options, "cancel_on_disconnect": True}
        if self.truncate_prompt_tokens is not None:
            options["truncate"] = True
        record = Record(
            id=name,
            kind=call.task,
            created=now,
            model=self.model,
            tasks=[name],
            queue=found.queue,
            readers=True,
        )
        return Plan(record, [Call(call.task, options)], submission(self.priority), self.NAMES, KEEP_S)


class Embeddings(OfTexts):
    """input: a text, token ids, or a list of either."""

    IGNORED: ClassVar = frozenset({"user"})
    PREFIX: ClassVar = "embd-"
    NAMES: ClassVar = {"texts": "input"}

    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    prompt_name: str | None = None
    normalize: bool | None = None

    @field_validator("input", mode="after")
    @classmethod
    def _texts(cls, given: object) -> list[str | list[int]]:
        many = isinstance(given, list) and bool(given) and all(isinstance(one, str | list) for one in given)
        texts: list[Any] = given if many and isinstance(given, list) else [given]
        if len(texts) > MOST_TEXTS:
            raise InvalidRequest("input", f"must have at most {MOST_TEXTS} texts", len(texts))
        for one in texts:
            if not isinstance(one, str) and not (
                isinstance(one, list) and bool(one) and all(type(token) is int for token in one)
            ):
                raise InvalidRequest("input", "must be text, token ids, or a list of either", shorten(one))
        return texts

    @property
    def ids_to_spell(self) -> list[list[int]]:
        return [one for one in self.input if isinstance(one, list)]

    def spelled(self, texts: Sequence[str]) -> Embeddings:
        """The same with the texts of `ids_to_spell` in their places."""
        rest = iter(texts)
        return self.model_copy(
            update={"input": [one if isinstance(one, str) else next(rest) for one in self.input]}
        )

    def call(self) -> Call:
        names = ("dimensions", "prompt_name", "normalize")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Call("embed", {"texts": self.input, **given})

    def answer(self, record: Record, made: Made) -> dict[str, Any]:
        vectors: Sequence[Any] = made.vectors
        if self.encoding_format == "float":
            vectors = Vectors(made.vectors, self.dimensions or 0)
        return {
            "object": "list",
            "data": ({"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(vectors)),
            "model": self.model,
            "usage": _usage(made),
        }


class Rerank(OfTexts):
    """documents: texts, or objects with a text."""

    PREFIX: ClassVar = "rerank-"
    NAMES: ClassVar = {}
    REFUSED: ClassVar = {
        "rank_fields": "is not served: a document has its text",
        "max_tokens_per_doc": "is not served: use truncate_prompt_tokens",
        "max_chunks_per_doc": "is not served: use truncate_prompt_tokens",
    }

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = Field(default=None, ge=0)
    return_documents: bool = True
    instruction: str | None = None

    @field_validator("documents", mode="after")
    @classmethod
    def _have_texts(cls, given: list[str | dict[str, Any]]) -> list[str | dict[str, Any]]:
        for position, one in enumerate(given):
            if isinstance(one, dict) and not isinstance(one.get("text"), str):
                raise InvalidRequest(f"documents[{position}].text", "must be text", shorten(one.get("text")))
        return given

    @property
    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else str(one["text"]) for one in self.documents]

    def call(self) -> Call:
        options: dict[str, Any] = {"query": self.query, "documents": self.texts}
        if self.instruction is not None:
            options["instruction"] = self.instruction
        return Call("rerank", options)

    def answer(self, record: Record, made: Made) -> dict[str, Any]:
        scores = [score for (score,) in made.scores]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        texts, results = self.texts, []
        for index in order[: self.top_n or len(order)]:  # 0, as in vLLM: all
            found: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if self.return_documents:
                found["document"] = {"text": texts[index]}
            results.append(found)
        return {"id": record.id, "object": "list", "model": self.model, "results": results, "usage": _usage(made)}


class Score(OfTexts):
    """Each of text_1 with its own of text_2, or one with all."""

    PREFIX: ClassVar = "score-"
    NAMES: ClassVar = {"pairs": "text_2"}

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None

    @model_validator(mode="after")
    def _as_many_of_both(self) -> Any:
        one, two = _listed(self.text_1), _listed(self.text_2)
        if len(one) not in (1, len(two)):
            limit = f"must be one text, or as many as text_2 has, {len(two)}"
            raise InvalidRequest("text_1", limit, f"{len(one)} texts")
        return self

    def call(self) -> Call:
        one, two = _listed(self.text_1), _listed(self.text_2)
        pairs = list(zip(one * len(two) if len(one) == 1 else one, two, strict=True))
        options: dict[str, Any] = {"pairs": pairs}
        if self.instruction is not None:
            options["instruction"] = self.instruction
        return Call("score", options)

    def answer(self, record: Record, made: Made) -> dict[str, Any]:
        return {
            "id": record.id,
            "object": "list",
            "created": record.created,
            "model": self.model,
            "data": [{"index": at, "object": "score", "score": score} for at, (score,) in enumerate(made.scores)],
            "usage": _usage(made),
        }


class Classify(OfTexts):
    PREFIX: ClassVar = "classify-"
    NAMES: ClassVar = {"texts": "input"}
    LABELS: ClassVar = True

    input: str | list[str]

    def call(self) -> Call:
        return Call("classify", {"texts": _listed(self.input)})

    def answer(self, record: Record, made: Made) -> dict[str, Any]:
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


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _usage(made: Made) -> dict[str, int]:
    return {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}

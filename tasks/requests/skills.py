"""Requests beside `generate` and `chat`: one for each skill of a vision model, and those of texts, for vectors,
scores and classes.

The engine checks what depends on the model: which skills it has; its prompts, its dimensions, the longest text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from petiole import limits
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.requests import images
from petiole.tasks.requests.schemas import MAX_PROMPT_CHARACTERS, Common, Given, MaxTokens, checked_text
from petiole.vectors import DENSE, FIELDS, MOST_TEXTS, Encoding, Output, most_texts

Text = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]


def _checked(image: object) -> str | None:
    return None if image is None else images.check("image", image)


class Answering(Common):
    """Options of the skills that answer with text: `query` and `caption`."""

    max_tokens: MaxTokens = 768
    """The output has at most this many tokens; `"rest"`: as many as the context has room for."""
    temperature: limits.Temperature = 0.5
    """0 always takes the likeliest token; higher values vary more."""
    top_p: limits.TopP = 0.3
    """Draw only from the likeliest tokens that together have this probability."""
    seed: limits.Seed | None = None
    """The same request with the same seed draws the same tokens. `None`: derived from the task's id."""

    def sampling(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("max_tokens", "temperature", "top_p", "seed")}


class QueryRequest(Answering):
    """A question, about an image or not."""

    image: Annotated[str | None, Given(bytes)] = None
    """What the question is about, if anything: a file's bytes (JPEG, PNG or WebP), base64 of them, a data URL, or
    a handle of `put_image`. See docs/vision.md."""
    question: Text
    """The question."""
    reasoning: bool = False
    """The model reasons first; the result has its reasoning."""

    _image = field_validator("image", mode="before")(_checked)

    def subject(self) -> dict[str, Any]:
        return {"skill": ("query", {"question": self.question, "reasoning": self.reasoning})}

    def images(self) -> list[str]:
        return [] if self.image is None else [self.image]


class CaptionRequest(Answering):
    """A picture in words."""

    image: Annotated[str, Given(bytes)]
    """What to describe, in the forms that `query` takes."""
    length: Literal["short", "normal", "long"] = "normal"
    """How much to say."""

    _image = field_validator("image", mode="before")(_checked)

    def subject(self) -> dict[str, Any]:
        return {"skill": ("caption", {"length": self.length})}

    def images(self) -> list[str]:
        return [self.image]


class Finding(Common):
    """Options of the skills that find things: `point` and `detect`. They take the likeliest tokens."""

    max_objects: Annotated[int, Field(ge=1, le=1000)] = 50
    """At most this many are found."""


class PointRequest(Finding):
    """Where things are: their centres."""

    image: Annotated[str, Given(bytes)]
    """Where to look, in the forms that `query` takes."""
    object: Text
    """What to look for: `"car"`."""

    _image = field_validator("image", mode="before")(_checked)

    def subject(self) -> dict[str, Any]:
        return {"skill": ("point", {"object": self.object, "max_objects": self.max_objects})}

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": 2 * self.max_objects + 1, "temperature": 0.0, "seed": None}

    def images(self) -> list[str]:
        return [self.image]


class DetectRequest(Finding):
    """A box around each thing."""

    image: Annotated[str, Given(bytes)]
    """Where to look, in the forms that `query` takes."""
    object: Text
    """What to look for: `"car"`."""

    _image = field_validator("image", mode="before")(_checked)

    def subject(self) -> dict[str, Any]:
        return {"skill": ("detect", {"object": self.object, "max_objects": self.max_objects})}

    def sampling(self) -> dict[str, Any]:
        return {"max_tokens": 3 * self.max_objects + 1, "temperature": 0.0, "seed": None}

    def images(self) -> list[str]:
        return [self.image]


MAX_DIMENSIONS = 2**20


def checked_texts(field: str, texts: list[str], each: int = 1) -> list[str]:
    """Texts that are not empty, and not too long together. each: how many belong together. Raises
    InvalidRequest."""
    for position, text in enumerate(texts):
        at, inside = divmod(position, each)
        checked_text(f"{field}[{at}]" if each == 1 else f"{field}[{at}][{inside}]", text)
    characters = sum(map(len, texts))
    if characters > MAX_PROMPT_CHARACTERS:
        limit = f"must have at most {MAX_PROMPT_CHARACTERS} characters in all"
        raise InvalidRequest(field, limit, characters)
    return texts


def listed(value: object) -> object:
    """One text is a list of it."""
    return [value] if isinstance(value, str) else value


class EmbedRequest(Common):
    """Texts of which vectors are made."""

    texts: Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS), Given(str)]
    """Texts, or one. The result has their vectors in the same order."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Keep this many of a vector's first numbers (Matryoshka). `None`: all."""
    normalize: bool | None = None
    """Give each vector the length 1. `None`: as the model's files say."""
    encoding: Encoding = "float32"
    """The numbers in the result: `float32`, `float16`, `int8` or `bits`. See docs/embeddings.md#vectors."""
    prompt_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The model's prompt before each text, such as `query`. `None`: its default."""
    truncate: bool = False
    """Cut a text that is too long for the model, instead of refusing it."""
    outputs: Annotated[list[Output], Field(min_length=1, max_length=len(FIELDS))] | None = None
    """`dense`; of BGE-M3 also `sparse`, weights of words, and `colbert`, vectors of tokens. `None`: `dense`."""

    _texts = field_validator("texts", mode="before")(listed)

    @model_validator(mode="after")
    def _a_result_holds_them(self) -> Self:
        checked_texts("texts", self.texts)
        if self.outputs is not None and len(set(self.outputs)) < len(self.outputs):
            raise InvalidRequest("outputs", "must name each output once", self.outputs)
        dense = DENSE in (self.outputs or (DENSE,))
        if (
            dense
            and self.dimensions is not None
            and len(self.texts) > (most := most_texts(self.dimensions, self.encoding))
        ):
            size = f"of {self.dimensions} dimensions as {self.encoding}"
            limit = f"must be at most {most}, whose vectors {size} fit into a result; embed.many takes more"
            raise InvalidRequest("texts", limit, len(self.texts))
        return self

    def subject(self) -> dict[str, Any]:
        names = ("dimensions", "normalize", "encoding", "prompt_name", "truncate")
        asked = {name: getattr(self, name) for name in names} | {"outputs": tuple(self.outputs or (DENSE,))}
        return {"texts": self.texts, "embedding": asked}

    def sampling(self) -> dict[str, Any]:
        return {"seed": 0}


class Scored(Common):
    """Options of the tasks that give scores."""

    truncate: bool = False
    """Cut a text that is too long for the model, instead of refusing it: of a pair, the longer text first."""

    def sampling(self) -> dict[str, Any]:
        return {"seed": 0}


class ClassifyRequest(Scored):
    """Texts whose classes are asked for."""

    texts: Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS), Given(str)]
    """Texts, or one. The result has their lists of scores in the same order."""

    _texts = field_validator("texts", mode="before")(listed)

    @model_validator(mode="after")
    def _no_text_is_empty(self) -> Self:
        checked_texts("texts", self.texts)
        return self

    def subject(self) -> dict[str, Any]:
        return {"texts": self.texts, "scoring": {"classes": True, "truncate": self.truncate}}


class Judged(Scored):
    """Options of the tasks that say how well two texts match."""

    instruction: Annotated[str, Field(min_length=1, max_length=8192)] | None = None
    """What a model that generates is to judge by. `None`: whether a passage answers a query."""


class ScoreRequest(Judged):
    """Pairs of texts of which scores are wanted."""

    pairs: Annotated[list[list[str]], Field(min_length=1, max_length=MOST_TEXTS)]
    """Pairs of texts. The result has their scores in the same order."""

    @field_validator("pairs", mode="before")
    @classmethod
    def _pairs_are_lists(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        return [list(pair) if isinstance(pair, tuple) else pair for pair in value]

    @model_validator(mode="after")
    def _two_texts_each(self) -> Self:
        for position, pair in enumerate(self.pairs):
            if len(pair) != 2:
                raise InvalidRequest(f"pairs[{position}]", "must have two texts", f"{len(pair)} texts")
        checked_texts("pairs", [text for pair in self.pairs for text in pair], each=2)
        return self

    def subject(self) -> dict[str, Any]:
        asked = {"instruction": self.instruction, "truncate": self.truncate, "field": "pairs"}
        return {"texts": [tuple(pair) for pair in self.pairs], "scoring": asked}


class RerankRequest(Judged):
    """Documents that are ranked by how well they match a query."""

    query: Text
    """What the documents are ranked for."""
    documents: Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
    """The result has their scores in the same order, and their ranking."""
    top_n: Annotated[int, Field(ge=1)] | None = None
    """The ranking has this many documents. `None`: all."""

    @model_validator(mode="after")
    def _no_document_is_empty(self) -> Self:
        checked_texts("documents", self.documents)
        characters = sum(map(len, self.documents)) + len(self.query) * len(self.documents)
        if characters > MAX_PROMPT_CHARACTERS:
            limit = f"must have at most {MAX_PROMPT_CHARACTERS} characters in all, with the query before each"
            raise InvalidRequest("documents", limit, characters)
        return self

    def subject(self) -> dict[str, Any]:
        best = min(self.top_n or len(self.documents), len(self.documents))
        asked = {"best": best, "instruction": self.instruction, "truncate": self.truncate, "field": "documents"}
        return {"texts": [(self.query, document) for document in self.documents], "scoring": asked}

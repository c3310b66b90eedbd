"""Requests to a model of texts: vectors (`embed`), scores (`rerank`, `score`) and classes (`classify`).

The engine checks what depends on the model: its dimensions, and the longest text.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from petiole.contract.errors import InvalidRequest
from petiole.contract.limits import MAX_PROMPT_CHARACTERS
from petiole.contract.requests.bounds import Entries
from petiole.contract.requests.generation import Common, Text, checked_text
from petiole.contract.requests.sampling import SamplingParams
from petiole.contract.requests.validation import Given, listed
from petiole.contract.results.vectors import DENSE, FIELDS, MOST_TEXTS, Encoding, Output, most_texts

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


class OfTexts(Common):
    """Options of every task of texts."""

    truncate: bool = False
    """Cut a text that is too long for the model, instead of refusing it: of a pair, the longer text first."""
    truncate_to: Annotated[int, Field(ge=1)] | None = None
    """With `truncate`: a text or pair is cut if it has more tokens than this, too."""

    @model_validator(mode="after")
    def _truncate_to_needs_truncate(self) -> Self:
        if self.truncate_to is not None and not self.truncate:
            raise InvalidRequest("truncate_to", "needs truncate", self.truncate_to)
        return self

    @property
    def cuts(self) -> dict[str, Any]:
        most = {} if self.truncate_to is None else {"truncate_to": self.truncate_to}
        return {"truncate": self.truncate, **most}

    def sampling(self) -> SamplingParams:
        return SamplingParams(seed=0)


class EmbedRequest(OfTexts):
    """Texts of which vectors are made."""

    texts: Annotated[list[str], BeforeValidator(listed), Entries(MOST_TEXTS, least=1), Given(str)]
    """Texts, or one. The result has their vectors in the same order."""
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    """Keep this many of a vector's first numbers (Matryoshka). `None`: all."""
    normalize: bool | None = None
    """Give each vector the length 1. `None`: as the model's files say."""
    encoding: Encoding = "float32"
    """The numbers in the result: `float32`, `float16`, `int8` or `bits`. See docs/embeddings.md#vectors."""
    prompt_name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The model's prompt before each text, such as `query`. `None`: its default."""
    add_special_tokens: bool = True
    """`False`: without those that the tokenizer adds."""
    outputs: Annotated[list[Output], Entries(len(FIELDS), least=1)] | None = None
    """`dense`; of BGE-M3 also `sparse`, weights of words, and `colbert`, vectors of tokens. `None`: `dense`."""

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
        names = ("dimensions", "normalize", "encoding", "prompt_name", "add_special_tokens")
        asked = {name: getattr(self, name) for name in names}
        return {
            "texts": self.texts,
            "embedding": {**asked, **self.cuts, "outputs": tuple(self.outputs or (DENSE,))},
        }


Pairs = Annotated[list[Annotated[list[str], Entries(2)]], Entries(MOST_TEXTS, least=1)]


def checked_pairs(pairs: list[list[str]]) -> None:
    """Raises InvalidRequest."""
    for position, pair in enumerate(pairs):
        if len(pair) != 2:
            raise InvalidRequest(f"pairs[{position}]", "must have two texts", f"{len(pair)} texts")
    checked_texts("pairs", [text for pair in pairs for text in pair], each=2)


class ClassifyRequest(OfTexts):
    """Texts, or pairs of texts, whose classes are asked for. Exactly one of `texts` and `pairs` is given."""

    texts: Annotated[list[str], BeforeValidator(listed), Entries(MOST_TEXTS, least=1), Given(str)] | None = None
    """Texts, or one. The result has their lists of scores in the same order."""
    pairs: Pairs | None = None
    """Pairs of texts in place of texts, for a model that judges the second by the first."""

    @model_validator(mode="after")
    def _texts_or_pairs(self) -> Self:
        if (self.texts is None) == (self.pairs is None):
            found = "both" if self.texts is not None else "neither"
            raise InvalidRequest("texts", "must be given, or pairs in its place", found)
        checked_texts("texts", self.texts or [])
        checked_pairs(self.pairs or [])
        return self

    def subject(self) -> dict[str, Any]:
        asked: dict[str, Any] = {"classes": True, **self.cuts}
        if self.pairs is None:
            return {"texts": self.texts, "scoring": asked}
        return {"texts": [tuple(pair) for pair in self.pairs], "scoring": asked | {"field": "pairs"}}


class Judged(OfTexts):
    """Options of the tasks that say how well two texts match."""

    instruction: Annotated[str, Field(min_length=1, max_length=8192)] | None = None
    """What a model that generates is to judge by. `None`: whether a passage answers a query."""


class ScoreRequest(Judged):
    """Pairs of texts of which scores are wanted."""

    pairs: Pairs
    """Pairs of texts. The result has their scores in the same order."""

    @model_validator(mode="after")
    def _two_texts_each(self) -> Self:
        checked_pairs(self.pairs)
        return self

    def subject(self) -> dict[str, Any]:
        asked = {"instruction": self.instruction, **self.cuts, "field": "pairs"}
        return {"texts": [tuple(pair) for pair in self.pairs], "scoring": asked}


class RerankRequest(Judged):
    """Documents that are ranked by how well they match a query."""

    query: Text
    """What the documents are ranked for."""
    documents: Annotated[list[str], Entries(MOST_TEXTS, least=1)]
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
        asked = {"best": best, "instruction": self.instruction, **self.cuts, "field": "documents"}
        return {"texts": [(self.query, document) for document in self.documents], "scoring": asked}

"""Texts of which a model makes vectors or scores: how they are asked for, what the model takes, and how vectors
and scores are sent.

A score says how well the texts of a pair match, or how much a text is of a class. A classifier's head makes it. A
model that generates is asked a question instead, and its score is the share of "yes" against "no"."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from petiole.contract.results.vectors import (
    COLBERT,
    DENSE,
    ENCODINGS,
    FIELDS,
    MOST_BYTES,
    MOST_TEXTS,
    SPARSE,
    Encoding,
    how_many_fit,
    most_texts,
)
from petiole.gpu_worker.exceptions import EngineError, require

FLAT = 1e-12
"""A vector shorter than this has no direction, and is not normalised."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """What is made of each text. dimensions: the vector's first numbers, as of a Matryoshka model; None: all.
    normalize: whether the vector then gets the length 1; None: as the model's files say. prompt_name: the prompt
    of the model that stands before each text; None: its default, if it has one. truncate: a text that is too long
    is cut, and not refused; truncate_to: one that has more tokens is too long. add_special_tokens: whether the
    tokenizer adds its own. outputs: a vector ("dense"), and
    what BGE-M3 makes of each token beside it, see `petiole.contract.results.vectors`."""

    dimensions: int | None = None
    normalize: bool | None = None
    encoding: Encoding = "float32"
    prompt_name: str | None = None
    truncate: bool = False
    truncate_to: int | None = None
    add_special_tokens: bool = True
    outputs: Sequence[str] = (DENSE,)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a delta that these outputs fill."""
        return tuple(field for output, field in FIELDS.items() if output in self.outputs)


class Pooled(NamedTuple):
    """What a model of texts makes of one text. vector: float32 [vector_size]; weights: float32 [tokens]; vectors:
    float32 [tokens - 1, numbers]; the latter two only where they are asked for."""

    vector: npt.NDArray[np.float32]
    weights: npt.NDArray[np.float32] | None = None
    vectors: npt.NDArray[np.float32] | None = None


Made = Mapping[str, str | tuple[float, ...]]
"""What is delivered of a text: its vectors or its scores, by the field of a delta."""


Text = str | tuple[str, str]
"""A text, or a pair of them."""

Scale = Literal["none", "sigmoid", "softmax"]
"""What makes scores of a head's numbers."""

MOST_INSTRUCTION = 8192
"""Characters of an instruction."""
_BYTES_A_SCORE = 24


@dataclass(frozen=True, slots=True)
class Scoring:
    """What is asked of each text or pair. classes: the scores of all classes; False: one score. best: how many
    are ranked, see `Result`. instruction: what a model that generates is to judge by; None: whether a passage
    answers a query. truncate: a text that is too long is cut, and not refused; truncate_to: one that has more
    tokens is too long. field: how errors name the texts."""

    classes: bool = False
    best: int | None = None
    instruction: str | None = None
    truncate: bool = False
    truncate_to: int | None = None
    field: str = "texts"


@dataclass(frozen=True, slots=True)
class Judge:
    """How a model that generates scores a pair (`LogitScore`): by the difference of the logits of two tokens, of
    which a sigmoid may make a share. instruction: what it judges by, unless a request says so."""

    yes: int
    no: int
    sigmoid: bool = True
    instruction: str | None = None


@dataclass(frozen=True, slots=True)
class TextLimits:
    """What a model of texts takes and makes. dimensions: the numbers of a vector. max_tokens: of a text.
    prompts: by name. normalize: what it does unless a request says otherwise. whole: a step computes a text from
    its first position to its last. lower_case: texts are lowered first. labels: what each number is called, of a
    classifier; empty: the numbers are a vector. scale: what makes scores of a classifier's numbers. types:
    tokens of the second text of a pair are marked. of_tokens: the outputs of each token that it makes beside a
    vector, with their numbers. lacking: why it does not make others. pools_prompts: whether a
    prompt's tokens are pooled with those of its text."""

    dimensions: int
    max_tokens: int
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    normalize: bool = False
    whole: bool = False
    lower_case: bool = False
    labels: tuple[str, ...] = ()
    scale: Scale = "none"
    types: bool = False
    of_tokens: Mapping[str, int] = field(default_factory=dict)
    lacking: Mapping[str, str] = field(default_factory=dict)
    pools_prompts: bool = True

    def check_scoring(self, asked: Scoring, n_texts: int) -> None:
        """Raises InvalidRequest."""
        n = len(self.labels)
        one = f"must be 1 for a score of a pair: classify gives those of all {n} classes"
        require(asked.classes or n == 1, "num_labels", one, n)
        require(asked.instruction is None, "instruction", "must not be given: this model takes none", "one")
        most = min(MOST_TEXTS, MOST_BYTES // (_BYTES_A_SCORE * n))
        require(n_texts <= most, asked.field, f"must be at most {most}, whose scores fit into a result", n_texts)

    def scored(self, pooled: Pooled) -> Made:
        """Scores as they are sent. Raises EngineError if a number is not finite."""
        numbers = pooled.vector
        if not np.isfinite(numbers).all():
            raise EngineError("the model made scores that are not finite numbers")
        wide = numbers.astype(np.float64)
        match self.scale:
            case "sigmoid":
                wide = 1 / (1 + np.exp(-wide))
            case "softmax":
                wide = np.exp(wide - wide.max())
                wide /= wide.sum()
        return {"scores": tuple(wide.astype(np.float32).tolist())}

    def check(self, asked: Embedding, n_texts: int) -> None:
        """Raises InvalidRequest."""
        prompts = ", ".join(sorted(self.prompts)) or "none"
        known = asked.prompt_name is None or asked.prompt_name in self.prompts
        require(known, "prompt_name", f"must be one of the model's prompts ({prompts})", asked.prompt_name)
        require(asked.encoding in ENCODINGS, "encoding", f"must be {', '.join(ENCODINGS)}", asked.encoding)
        if asked.dimensions is not None:
            limit, given = f"must be 1 to {self.dimensions}, the model's", asked.dimensions
            require(type(given) is int and 1 <= given <= self.dimensions, "dimensions", limit, given)
        able = [DENSE, *self.of_tokens]
        for output in asked.outputs:
            why = f"; {self.lacking[output]}" if output in self.lacking else ""
            require(output in able, "outputs", f"must be {', '.join(able)} for this model{why}", output)
        require(len(asked.fields) > 0, "outputs", f"must name one of {', '.join(able)}", "none")
        if DENSE not in asked.outputs:
            return
        most = most_texts(self.dimensions_of(asked), asked.encoding)
        size = f"of {self.dimensions_of(asked)} dimensions as {asked.encoding}"
        require(
            n_texts <= most, "texts", f"must be at most {most}, whose vectors {size} fit into a result", n_texts
        )

    def dimensions_of(self, asked: Embedding) -> int:
        return asked.dimensions or self.dimensions

    def check_size(self, asked: Embedding, tokens: Sequence[int]) -> None:
        """tokens: how many each text has. Raises InvalidRequest if a result does not hold what is made of them."""
        most = how_many_fit(
            tokens, asked.outputs, self.dimensions_of(asked), self.of_tokens.get(COLBERT, 0), asked.encoding
        )
        what = f"must be at most {most}, whose {' and '.join(asked.outputs)} vectors fit into a result"
        require(most == len(tokens), "texts", what, len(tokens))

    def prompt(self, asked: Embedding) -> str:
        name = asked.prompt_name or self.default_prompt
        return self.prompts[name] if name is not None else ""

    def written(self, pooled: Pooled, asked: Embedding, ids: Sequence[int], special: Set[int]) -> Made:
        """Vectors as they are sent. ids: the text's tokens. special: those that no search by words is for. Raises
        EngineError for numbers that are not finite."""
        made: dict[str, Callable[[], str]] = {DENSE: lambda: self._dense(pooled.vector, asked)}
        if pooled.weights is not None:
            made[SPARSE] = lambda: _sparse(_finite(pooled.weights), ids, special)
        if pooled.vectors is not None:
            made[COLBERT] = lambda: base64.b64encode(
                b"".join(encoded(one, asked.encoding) for one in _finite(pooled.vectors))
            ).decode()
        return {FIELDS[output]: made[output]() for output in asked.outputs}

    def _dense(self, vector: npt.NDArray[np.float32], asked: Embedding) -> str:
        """Cut, then normalised, then encoded."""
        vector = _finite(vector[: self.dimensions_of(asked)])
        if self.normalize if asked.normalize is None else asked.normalize:
            length = np.sqrt(np.dot(vector.astype(np.float64), vector.astype(np.float64)))
            vector = (vector / max(float(length), FLAT)).astype(np.float32)
        return base64.b64encode(encoded(vector, asked.encoding)).decode()


def _sparse(weights: npt.NDArray[np.float32], ids: Sequence[int], special: Set[int]) -> str:
    """The largest weight of each token that is no special one."""
    best = dict[int, float]()
    for token, weight in zip(ids, weights.tolist(), strict=True):
        if weight > 0 and token not in special:
            best[token] = max(weight, best.get(token, 0.0))
    tokens = sorted(best)
    numbers = np.array([best[token] for token in tokens], "<f4")
    return base64.b64encode(np.array([len(tokens), *tokens], "<u4").tobytes() + numbers.tobytes()).decode()


def _finite(numbers: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    if numbers is None or not np.isfinite(numbers).all():
        raise EngineError("the model made a vector that is not of finite numbers")
    return numbers


def encoded(vector: npt.NDArray[np.float32], encoding: Encoding) -> bytes:
    """See `petiole.contract.results.vectors`."""
    return _as_array(vector, encoding).tobytes()


def _as_array(vector: npt.NDArray[np.float32], encoding: Encoding) -> npt.NDArray[Any]:
    match encoding:
        case "float32":
            return vector.astype("<f4")
        case "float16":
            most = np.finfo(np.float16).max
            return vector.clip(-most, most).astype("<f2")
        case "int8":
            scale = np.float32(float(np.abs(vector).max(initial=0.0)) / 127 or 1.0)
            codes = np.rint(vector / scale).clip(-127, 127).astype(np.int8)
            return np.concatenate([np.array([scale], "<f4").view(np.int8), codes])
        case "bits":
            return np.packbits(vector > 0)

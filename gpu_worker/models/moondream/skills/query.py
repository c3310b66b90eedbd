"""Query: a question, about a picture or not.

    options   question; reasoning (false)
    answer    {"answer": "..."}; with reasoning also {"reasoning": {"text": "...", "grounding": [
              {"start_idx": 3, "end_idx": 9, "points": [[0.5, 0.25]]}, ...]}}: which part of the text is about
              which points of the picture

With reasoning the output is the reasoning, the answer token, and the answer. The end is banned in the first part,
the answer token in the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Self, cast

import numpy as np

from petiole.gpu_worker.exceptions import require
from petiole.gpu_worker.models.moondream.config import MoondreamConfig, TokenConfig
from petiole.gpu_worker.models.moondream.skills import options as checks
from petiole.gpu_worker.request.prepared_images import ImagePlace
from petiole.gpu_worker.request.skills import SkillPrompt, TextCodec


def ask(options: Mapping[str, Any], config: MoondreamConfig, n_images: int, codec: TextCodec) -> SkillPrompt:
    tokens = config.tokens
    checks.check_names("query", options, ("question", "reasoning"))
    reasoning = options.get("reasoning", False)
    require(isinstance(reasoning, bool), "reasoning", "must be true or false", reasoning)
    require(n_images <= 1, "image", "query takes one image, or none", f"{n_images} images")
    around = tokens.templates["query"]
    question = codec.encode(checks.text(options, "question"), field="question")
    start = [tokens.bos, ImagePlace(0)] if n_images else [tokens.bos]
    mode = tokens.thinking if reasoning else tokens.answer
    prompt = [*start, *around["prefix"], *question, *around["suffix"], mode]
    if reasoning:
        return SkillPrompt(prompt, ReasoningState(tokens, codec, config.text.vocab_size), steering="tokens")
    return SkillPrompt(prompt, answer="answer", banned_token_ids=(tokens.answer,))


@dataclass(slots=True)
class ReasoningState:
    """A `SkillState`. parts: the parts of the reasoning, each with its tokens and the values of its coordinates. A
    part begins where points are announced, and where they end. answer: the tokens of the answer, None before it
    begins."""

    tokens: TokenConfig
    codec: TextCodec
    vocab_size: int
    parts: list[tuple[list[int], list[float]]] = field(default_factory=lambda: [([], [])])
    answer: list[int] | None = None

    def allowed_token_ids(self) -> Sequence[int]:
        tokens = self.tokens
        return _all_but(self.vocab_size, (tokens.eos, tokens.size) if self.answer is None else (tokens.answer,))

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> None:
        tokens = self.tokens
        if self.answer is not None:
            if token_id != tokens.eos:
                self.answer.append(token_id)
        elif token_id == tokens.answer:
            self.answer = []
        else:
            if token_id in (tokens.points, tokens.points_end):
                self.parts.append(([], []))
            part, numbers = self.parts[-1]
            part.append(token_id)
            numbers.extend(values)

    def finalize(self) -> dict[str, Any]:
        text, grounding = "", []
        for tokens, numbers in self.parts:
            part = self._decoded(tokens)
            points = [list(point) for point in zip(numbers[::2], numbers[1::2], strict=False)]
            if points:
                span = {"start_idx": len(text), "end_idx": len(text) + len(part)}
                grounding.append({**span, "points": points})
            text += part
        answer = self._decoded(self.answer or [])
        return {"reasoning": {"text": text, "grounding": grounding}, "answer": answer}

    def fork(self) -> Self:
        parts = [(list(tokens), list(numbers)) for tokens, numbers in self.parts]
        answer = None if self.answer is None else list(self.answer)
        return type(self)(self.tokens, self.codec, self.vocab_size, parts, answer)

    def _decoded(self, token_ids: Sequence[int]) -> str:
        tokens = self.tokens
        silent = {tokens.coordinate, tokens.points, tokens.points_end}
        return self.codec.decode([token for token in token_ids if token not in silent])


@lru_cache(maxsize=8)
def _all_but(vocab_size: int, banned: tuple[int, ...]) -> Sequence[int]:
    """As an array, because a mask of tens of thousands of tokens is made from an array in no time."""
    return cast(Sequence[int], np.delete(np.arange(vocab_size), list(banned)))

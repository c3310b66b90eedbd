"""A tokenizer and a constraint for the toy model: one letter a token, and a rule that looks back.

`ToyTokenizer` has what the engine uses of `gpu_worker.text.Tokenizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.request.requests import check_text

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class ToyDetokenizer:
    """Holds every third token's text back until the next one, as an incomplete character would be."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            text += self._held + LETTERS[token]
            self._held = ""
            if token % 3 == 2:
                self._held, text = text[-1], text[:-1]
        return text

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text


class ToyTokenizer:
    vocab_size = 48
    eos_token_ids: frozenset[int] = frozenset()

    def encode(
        self, text: str, *, field: str = "prompt", add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        return [LETTERS.index(letter) for letter in check_text(field, text)]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(LETTERS[token] for token in token_ids)

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown: Sequence[str] = (), before: Sequence[int] = ()
    ) -> ToyDetokenizer:
        return ToyDetokenizer()


class ToyConstraint:
    """Allows a third of the vocabulary, which third depending on all tokens so far; satisfied after `length`
    tokens. `fail_at`: raises once so many tokens are consumed."""

    def __init__(self, vocab_size: int, length: int, fail_at: int | None = None) -> None:
        self._vocab_size, self._length, self._fail_at = vocab_size, length, fail_at
        self._tokens: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self._tokens) >= self._length

    def allowed(self) -> list[int]:
        return [v for v in range(self._vocab_size) if self._allows(v)]

    def _allows(self, token_id: int) -> bool:
        return (token_id + sum(token // 3 for token in self._tokens)) % 3 == 1

    def fill_mask(self, out: Any) -> None:
        if self._fail_at is not None and len(self._tokens) >= self._fail_at:
            raise RuntimeError("a broken grammar")
        bits = np.zeros(len(out) * 32, np.uint8)
        bits[self.allowed()] = 1
        out[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def rollback(self, n: int) -> None:
        if n:
            del self._tokens[-n:]


def compile_toy(constraint: Constraint) -> ToyConstraint:
    """`Constraint("regex", length)` or `Constraint("regex", (length, fail_at))`."""
    length, fail_at = constraint.value if isinstance(constraint.value, tuple) else (constraint.value, None)
    return ToyConstraint(48, length, fail_at)

"""Words that an output must not contain.

A word is banned in the tokens that its text has, at the beginning of a text and behind a space. Its last token may
not come where the others stand at the end of the output. A word of one token needs no state: its token is one of
`banned_token_ids`.

It stands around another constraint, or around none. What is banned follows from the output's tokens alone. So
preemption, resume and drafts need nothing of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from petiole.gpu_worker.constraints.budget import BudgetState
from petiole.gpu_worker.errors import InvalidRequest
from petiole.gpu_worker.protocols import ConstraintState, Int32Array, set_first_bits
from petiole.gpu_worker.text import Tokenizer

Tokens = tuple[int, ...]


def spellings(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> set[Tokens]:
    """The tokens of each word. A model may have fewer tokens than its tokenizer: it cannot say those words."""
    texts = {f"{before}{word.lstrip(' ')}" for word in words for before in ("", " ")} - {""}
    found = (tuple(tokenizer.encode(text, field="bad_words", add_special_tokens=False)) for text in texts)
    return {tokens for tokens in found if tokens and max(tokens) < vocab_size}


@dataclass(frozen=True)
class Bans:
    """`sequences`: of two tokens or more each. `vocab_size`: the model's."""

    sequences: frozenset[Tokens]
    vocab_size: int

    @cached_property
    def _begun(self) -> dict[int, list[tuple[Tokens, int]]]:
        """By a token: the sequences in which it is not the last one, and how many tokens have come with it."""
        found = defaultdict(list)
        for tokens in self.sequences:
            for n, token in enumerate(tokens[:-1], 1):
                found[token].append((tokens, n))
        return found

    @cached_property
    def _shortest(self) -> int:
        return min(map(len, self.sequences))

    def standing(self, output: Sequence[int]) -> Iterator[tuple[Tokens, int]]:
        """The sequences that have begun at the end of an output, and how many of their tokens stand there."""
        for tokens, n in self._begun.get(output[-1], ()) if output else ():
            if tuple(output[-n:]) == tokens[:n]:
                yield tokens, n

    def banned(self, output: Sequence[int]) -> list[int]:
        """The tokens that may not come next."""
        return [tokens[-1] for tokens, n in self.standing(output) if n == len(tokens) - 1]

    def is_free_for(self, output: Sequence[int], n_tokens: int) -> bool:
        """Whether no sequence can be complete within the next `n_tokens`."""
        return n_tokens < self._shortest and all(len(tokens) - n > n_tokens for tokens, n in self.standing(output))


class BannedState:
    """The constraint of one sequence. `inner`: what else its output must match. `output`: its tokens so far."""

    __slots__ = ("_bans", "_inner", "_output")

    def __init__(self, bans: Bans, inner: ConstraintState | None, output: Sequence[int] = ()) -> None:
        self._bans, self._inner, self._output = bans, inner, list(output)

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def is_free_for(self, n_tokens: int) -> bool:
        """Whether any token may come at each of the next `n_tokens` places, whatever comes before it."""
        inner = self._inner
        if inner is not None and not (isinstance(inner, BudgetState) and inner.is_free_for(n_tokens)):
            return False
        return self._bans.is_free_for(self._output, n_tokens)

    def fill_mask(self, out: Int32Array) -> None:
        if self._inner is None:
            set_first_bits(out, self._bans.vocab_size)
        else:
            self._inner.fill_mask(out)
        words = out.view("uint32")
        for token in self._bans.banned(self._output):
            words[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF
        if not words.any():
            raise InvalidRequest("bad_words", "must leave a token", f"after {len(self._output)} tokens")

    def consume(self, token_id: int) -> bool:
        if token_id in self._bans.banned(self._output):
            return False
        if self._inner is not None and not self._inner.consume(token_id):
            return False
        self._output.append(token_id)
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n <= len(self._output), "more than was consumed"
        if self._inner is not None:
            self._inner.rollback(n)
        del self._output[len(self._output) - n :]

    def fork(self) -> Self:
        return type(self)(self._bans, None if self._inner is None else self._inner.fork(), self._output)

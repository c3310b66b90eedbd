"""Words that an output must not contain.

A word is banned in the tokens that its text has, at the beginning of a text and after a space. Its last token may
not come where the others stand at the end of the output. A word of one token needs no state: its token is one of
`banned_token_ids`.

It stands around another constraint, or around none. What is banned follows from the output's tokens alone. So
preemption, resume and drafts need nothing of their own."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Self

from petiole.gpu_worker.constraints.budget import BudgetState
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request.protocols import ConstraintState, Int32Array, set_first_bits
from petiole.gpu_worker.text import Tokenizer

Tokens = tuple[int, ...]


def spellings(words: Iterable[str], tokenizer: Tokenizer, vocab_size: int) -> set[Tokens]:
    """The tokens of each word. A model may have fewer tokens than its tokenizer: it cannot say those words."""
    texts = {f"{before}{word.lstrip(' ')}" for word in words for before in ("", " ")} - {""}
    found = (tuple(tokenizer.encode(text, field="bad_words", add_special_tokens=False)) for text in texts)
    return {tokens for tokens in found if tokens and max(tokens) < vocab_size}


class _BanNode:
    """The end of an output, as far as it may begin a word: a place in the tree of the words' tokens.

    `after`: the nodes one token further. `last`: the tokens that complete a word here. `nearest`: how many tokens
    complete the nearest word. `shorter`: the node of the longest shorter end; None: this is the root, an end that
    begins nothing."""

    __slots__ = ("after", "last", "nearest", "shorter")

    def __init__(self) -> None:
        self.after: dict[int, _BanNode] = {}
        self.last: tuple[int, ...] = ()
        self.nearest = sys.maxsize
        self.shorter: _BanNode | None = None


class Bans:
    """`sequences`: of two tokens or more each. `vocab_size`: the model's. It is Aho and Corasick's automaton: what
    a token costs does not depend on how many words there are."""

    def __init__(self, sequences: Iterable[Tokens], vocab_size: int) -> None:
        self.sequences, self.vocab_size = tuple(sequences), vocab_size
        self.root = _BanNode()
        for tokens in self.sequences:
            node = self.root
            for n, token in enumerate(tokens[:-1]):
                node.nearest = min(node.nearest, len(tokens) - n)
                node = node.after.setdefault(token, _BanNode())
            node.nearest = 1
            node.last += tokens[-1:]
        nodes = deque([self.root])  # shorter ones first
        while nodes:
            node = nodes.popleft()
            for token, longer in node.after.items():
                shorter = self.root if node.shorter is None else self.after(node.shorter, token)
                longer.shorter, longer.nearest = shorter, min(longer.nearest, shorter.nearest)
                nodes.append(longer)

    def after(self, node: _BanNode, token: int) -> _BanNode:
        """The node of an output that goes on with this token."""
        while (found := node.after.get(token)) is None:
            if node.shorter is None:
                return node
            node = node.shorter
        return found

    def banned(self, node: _BanNode) -> Iterator[int]:
        """The tokens that may not come next."""
        end: _BanNode | None = node
        while end is not None and end.nearest == 1:
            yield from end.last
            end = end.shorter


class BannedState:
    """The constraint of one sequence. `inner`: what else its output must match. `output`: its tokens so far."""

    __slots__ = ("_bans", "_inner", "_nodes")

    def __init__(self, bans: Bans, inner: ConstraintState | None, output: Iterable[int] = ()) -> None:
        self._bans, self._inner = bans, inner
        self._nodes = [*accumulate(output, bans.after, initial=bans.root)]

    @property
    def inner(self) -> ConstraintState | None:
        return self._inner

    @property
    def sequences(self) -> tuple[Tokens, ...]:
        """The tokens of the words."""
        return self._bans.sequences

    @property
    def finished(self) -> bool:
        return self._inner is not None and self._inner.finished

    def is_free_for(self, n_tokens: int) -> bool:
        """Whether any token may come at each of the next `n_tokens` places, whatever comes before it."""
        inner = self._inner
        if inner is not None and not (isinstance(inner, BudgetState) and inner.is_free_for(n_tokens)):
            return False
        return n_tokens < self._nodes[-1].nearest

    def fill_mask(self, out: Int32Array) -> None:
        if self._inner is None:
            set_first_bits(out, self._bans.vocab_size)
        else:
            self._inner.fill_mask(out)
        words = out.view("uint32")
        for token in self._bans.banned(self._nodes[-1]):
            words[token // 32] &= ~(1 << token % 32) & 0xFFFFFFFF
        if not words.any():
            raise InvalidRequest("bad_words", "must leave a token", f"after {len(self._nodes) - 1} tokens")

    def consume(self, token_id: int) -> bool:
        if token_id in self._bans.banned(self._nodes[-1]):
            return False
        if self._inner is not None and not self._inner.consume(token_id):
            return False
        self._nodes.append(self._bans.after(self._nodes[-1], token_id))
        return True

    def rollback(self, n: int) -> None:
        assert 0 <= n < len(self._nodes), "more than was consumed"
        if self._inner is not None:
            self._inner.rollback(n)
        del self._nodes[len(self._nodes) - n :]

    def fork(self) -> Self:
        fork = type(self)(self._bans, None if self._inner is None else self._inner.fork())
        fork._nodes = [*self._nodes]
        return fork

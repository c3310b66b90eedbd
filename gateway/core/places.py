"""At which character a token's log-probabilities are: they belong to one numbered place, whatever deltas the token
fell into.

A token's place is its first character. Text may lag behind tokens, because a half character or a possible stop
string is held back, and one character may take several tokens. So a token waits until the character with its place
is emitted, and a token for which no character comes waits for the end. The place follows from the bytes of the
tokens before it, and from nothing else."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from petiole.gateway.core.parts import Placed
from petiole.outputs import TokenLogprobs

_decoder = codecs.getincrementaldecoder("utf-8")


class Places:
    def __init__(self) -> None:
        self._characters = _decoder("replace")
        self._next = 0  # the place of the next token: how many characters the tokens before it have
        self._emitted = 0
        self._waiting: deque[tuple[int, TokenLogprobs]] = deque()

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        for token in tokens:
            self._waiting.append((self._next, token))
            self._next += len(self._characters.decode(bytes(token.bytes[0]) if token.bytes else b""))

    def emit(self, text: str) -> Sequence[Placed]:
        """The tokens that come with this text."""
        first, self._emitted = self._emitted, self._emitted + len(text)
        if not self._waiting:
            return ()
        found = []
        while self._waiting and self._waiting[0][0] < self._emitted:
            place, token = self._waiting.popleft()
            found.append(Placed(max(0, place - first), token))
        return found

    def rest(self) -> list[TokenLogprobs]:
        rest = [token for _, token in self._waiting]
        self._waiting.clear()
        return rest

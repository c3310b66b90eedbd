"""The text of a prompt, emitted with its tokens: at which character each token is, whatever its delta.

A prompt's text is known, and its tokens need not spell it: a tokenizer may add tokens, and may normalize. So a
token's place is where its text is found next, and a token whose text is not found has the place of what follows.
All of the text is emitted: its last character waits for the last token, so that no token is left over."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

from petiole.gateway.core.parts import Placed
from petiole.outputs import TokenLogprobs

_decoder = codecs.getincrementaldecoder("utf-8")
NEAR = 8
"""How many characters a tokenizer may leave out before a token."""


class PromptText:
    def __init__(self, text: str) -> None:
        self._text = text
        self._characters = _decoder("replace")
        self._next = self._emitted = 0
        self._waiting: deque[Placed] = deque()

    def add(self, tokens: Sequence[TokenLogprobs], *, last: bool) -> tuple[str, Sequence[Placed]]:
        """The text that is emitted with these tokens, and the tokens that come with it. `last`: no tokens
        follow."""
        for token in tokens:
            place = self._place(self._characters.decode(bytes(token.bytes[0]) if token.bytes else b""))
            self._waiting.append(Placed(min(place, max(0, len(self._text) - 1)), token))
        end = len(self._text) if last else max(self._emitted, min(self._next, len(self._text) - 1))
        first, self._emitted = self._emitted, end
        found = []
        while self._waiting and (last or self._waiting[0].at < end):
            at, token, _ = self._waiting.popleft()
            found.append(Placed(max(0, at - first), token))
        return self._text[first:end], found

    def _place(self, text: str) -> int:
        begin = self._next
        for spelled in (text, text.strip(" ")):  # some tokenizers put a space before a text
            if spelled and (at := self._text.find(spelled, begin, begin + NEAR + len(spelled))) >= 0:
                self._next = at + len(spelled)
                return at
        return begin

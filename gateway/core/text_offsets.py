"""At which character a token's log-probabilities are: they belong to one numbered place, whatever deltas the token
fell into.

A token's place is its first character. Text may lag behind tokens, because a half character or a possible stop
string is held back, and one character may take several tokens. So a token waits until the character with its
place is emitted, and a token for which no character comes waits for the end. The place follows from the tokens
before it, and from nothing else: the worker says how long the output is with each token. A worker of the version
before does not; then the tokens' bytes are counted. A token of whole characters with which the output gets no
longer is hidden, such as a special token. It is no content.

Where the output is divided, some of its characters are emitted and others, such as marks, are not. A token with an
emitted character comes with the first of these. Others come with the next character that is emitted, so that
tokens stay in order.

A prompt's text is known, and its tokens need not spell it: a tokenizer may add tokens, and may normalize. So
there a token's place is where its text is found next, and a token whose text is not found has the place of what
follows. All of the text is emitted: its last character waits for the last token, so that no token is left over."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from petiole.contract.results.outputs import TokenLogprobs
from petiole.gateway.core.parts import PositionedToken

_decoder = codecs.getincrementaldecoder("utf-8")


class _PendingToken(NamedTuple):
    """A token that has the characters of the output from `begin` to before `end`. One that completes no character
    has the character that it begins. `hidden`: it has none."""

    begin: int
    end: int
    token: TokenLogprobs
    hidden: bool


class TokenOffsets:
    def __init__(self) -> None:
        self._characters = _decoder("replace")
        self._next = 0  # the place of the next token: how many characters the tokens before it have
        self._emitted = 0
        self._waiting: deque[_PendingToken] = deque()

    def add(self, tokens: Sequence[TokenLogprobs]) -> None:
        for token in tokens:
            begin = self._next
            data = bytes(token.bytes[0]) if token.bytes else b""
            hidden = token.length == begin and _is_whole(data)
            counted = 0 if hidden else len(self._characters.decode(data))
            self._next = begin + counted if token.length is None else token.length
            self._waiting.append(_PendingToken(begin, max(self._next, begin + 1), token, hidden))

    def emit(self, text: str, at: int | None = None, *, said: bool = True) -> Sequence[PositionedToken]:
        """The tokens that come with this text. `at`: where it is in the output; None: after what was emitted
        before. `said`: it is content."""
        first = self._emitted if at is None else at
        self._emitted = first + len(text)
        if not self._waiting:
            return ()
        found = []
        while self._waiting and self._waiting[0].begin < self._emitted:
            begin, end, token, hidden = self._waiting.popleft()
            found.append(PositionedToken(max(0, begin - first), token, said and end > first and not hidden))
        return found

    def rest(self, length: int, *, said: bool = True) -> list[PositionedToken]:
        """The tokens that no character came for. `length`: how many characters the output has. `said`: its last
        characters are content, and so are the tokens after them."""
        rest = [PositionedToken(0, token, said and end > length) for _, end, token, _ in self._waiting]
        self._waiting.clear()
        return rest


def _is_whole(data: bytes) -> bool:
    """Whether this is at least one character, and no part of one."""
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


NEAR = 8
"""How many characters a tokenizer may leave out before a token."""


class PromptText:
    """The text of a prompt, emitted with its tokens."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._characters = _decoder("replace")
        self._next = self._emitted = 0
        self._waiting: deque[PositionedToken] = deque()

    def add(self, tokens: Sequence[TokenLogprobs], *, last: bool) -> tuple[str, Sequence[PositionedToken]]:
        """The text that is emitted with these tokens, and the tokens that come with it. `last`: no tokens
        follow."""
        for token in tokens:
            place = self._place(self._characters.decode(bytes(token.bytes[0]) if token.bytes else b""))
            self._waiting.append(PositionedToken(min(place, max(0, len(self._text) - 1)), token))
        end = len(self._text) if last else max(self._emitted, min(self._next, len(self._text) - 1))
        first, self._emitted = self._emitted, end
        found = []
        while self._waiting and (last or self._waiting[0].at < end):
            at, token, _ = self._waiting.popleft()
            found.append(PositionedToken(max(0, at - first), token))
        return self._text[first:end], found

    def _place(self, text: str) -> int:
        begin = self._next
        for spelled in (text, text.strip(" ")):  # some tokenizers put a space before a text
            if spelled and (at := self._text.find(spelled, begin, begin + NEAR + len(spelled))) >= 0:
                self._next = at + len(spelled)
                return at
        return begin

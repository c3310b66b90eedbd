"""What an output is made of, whatever the interface. A part opens, gets text, and closes before the next one
opens:

    OutputStarted  PromptTokens*  (ItemStarted  TextDelta*  ItemDone)*  OutputEnded

A failed output just ends: its last part stays open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from petiole.contract.results.outputs import TokenLogprobs, Usage
from petiole.contract.results.task_result import FinishReason

Kind = Literal["content", "reasoning", "call", "custom"]
"""`custom`: a call of a tool that takes text."""


class PositionedToken(NamedTuple):
    """A token and its place: it comes with the character `at` of the text that it is given with, from 0. `said`:
    whether it is a token of content. Others are tokens of reasoning, calls and marks."""

    at: int
    token: TokenLogprobs
    said: bool = True


class OutputStarted(NamedTuple):
    """A worker has prepared the request. Only of outputs that are divided, and not of one whose log is gone."""

    prompt_tokens: int


class PromptTokens(NamedTuple):
    """The next tokens of the prompt, with their log-probabilities. They come before all else. `last`: no others
    follow."""

    tokens: Sequence[TokenLogprobs]
    last: bool


class TokenCount(NamedTuple):
    """How many tokens there are by now. It comes before the parts that they make, where the record asks for it."""

    prompt_tokens: int
    completion_tokens: int


class ItemStarted(NamedTuple):
    """A call has a name and an id."""

    kind: Kind
    name: str = ""
    call_id: str = ""


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """At least one character more of the open part. A struct: nothing else is made as often."""

    text: str
    tokens: Sequence[PositionedToken] = ()


class ItemDone(NamedTuple):
    """The open part has all its text."""


class OutputEnded(NamedTuple):
    """The record of the end. `tokens`: those that no character came for, such as the end token; they have no
    place. `at`: when the output ended, in seconds since 1970."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None
    tokens: Sequence[PositionedToken] = ()
    at: float | None = None


Part = OutputStarted | PromptTokens | TokenCount | ItemStarted | TextDelta | ItemDone | OutputEnded


@dataclass
class OutputItem:
    """A part as a whole."""

    kind: Kind
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    tokens: list[PositionedToken] = field(default_factory=list)
    length: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, part: TextDelta) -> None:
        self.texts.append(part.text)
        self.tokens += [PositionedToken(self.length + at, token, said) for at, token, said in part.tokens]
        self.length += len(part.text)


class CollectedOutput:
    """All parts of one output, collected. `ended`: None as long as it goes on. `prompt`: the tokens of the prompt,
    if their log-probabilities were asked for."""

    def __init__(self) -> None:
        self.pieces: list[OutputItem] = []
        self.ended: OutputEnded | None = None
        self.prompt: list[TokenLogprobs] = []

    def add(self, part: Part) -> None:
        match part:
            case TextDelta():
                self.pieces[-1].add(part)
            case ItemStarted():
                self.pieces.append(OutputItem(part.kind, part.name, part.call_id))
            case PromptTokens():
                self.prompt += part.tokens
            case OutputEnded():
                self.ended = part

    def text(self, kind: Kind = "content") -> str:
        return "".join(piece.text for piece in self.pieces if piece.kind == kind)

    @property
    def tokens(self) -> list[PositionedToken]:
        """In the order in which they were generated."""
        rest = self.ended.tokens if self.ended else ()
        return [*(placed for piece in self.pieces for placed in piece.tokens), *rest]

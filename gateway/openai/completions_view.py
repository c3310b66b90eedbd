"""The answer of completions, streamed and whole: a view of parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from petiole.gateway.core.events import StreamEvent, encode
from petiole.gateway.core.parts import (
    CollectedOutput,
    OutputEnded,
    Part,
    PositionedToken,
    PromptTokens,
    TextDelta,
    TokenCount,
)
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.core.text_offsets import PromptText
from petiole.gateway.openai import logprobs
from petiole.gateway.openai.answers import ChoicesView, ended, finish_reason, head, stop_reason, usage


class CompletionsView(ChoicesView):
    """Events of a completion:

    text     a piece of the text; its field says how long the choice's text is behind it
    prompt   the same of the prompt's, with tokens
    end      the chunk with the finish reason, and the tokens that have no text
    error    in place of an end
    usage    the last chunk, if it was asked for
    """

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record, record.kind)
        self._lengths = [0] * len(record.tasks)
        self._prompts: dict[int, PromptText] = {}

    def begin(self, choice: int) -> Iterable[StreamEvent]:
        if self._asked.get("scored"):
            return []  # the text comes with its tokens
        return [self._text(choice, text, ())] if (text := echo(self._asked, choice)) else []

    def events(self, choice: int, part: Part) -> Iterable[StreamEvent]:
        if isinstance(part, PromptTokens):
            return self._of_prompt(choice, part) if self._asked.get("scored") else []
        if isinstance(part, TextDelta):
            return [] if self._asked.get("nothing_more") else [self._text(choice, part.text, part.tokens)]
        if isinstance(part, TokenCount):
            self._counts[choice] = part
        if not isinstance(part, OutputEnded):
            return []
        part = _shown_end(self._asked, part)
        return self._ended(choice, part, (self._lengths[choice], part))

    def _of_prompt(self, choice: int, part: PromptTokens) -> Iterable[StreamEvent]:
        begins = choice not in self._prompts
        prompt = self._prompts.setdefault(choice, PromptText(echo(self._asked, choice)))
        text, tokens = prompt.add(logprobs.of_prompt(part.tokens, begins=begins), last=part.last)
        return [self._text(choice, text, tokens, "prompt")] if text else []

    def _text(self, choice: int, text: str, tokens: Sequence[PositionedToken], name: str = "text") -> StreamEvent:
        self._lengths[choice] += len(text)
        return StreamEvent(name, self._lengths[choice], text, tokens)

    def encode(self, choice: int, number: int, event: StreamEvent) -> bytes:
        match event.name:
            case "text" | "prompt":
                assert event.text is not None
                first = event.fields - len(event.text)
                tokens = [PositionedToken(first + at, token) for at, token, _ in event.tokens]
                of_prompt = len(tokens) if event.name == "prompt" else 0
                return self._chunk(choice, event.text, tokens, of_prompt=of_prompt, begins=not first)
            case "end":
                length, end = event.fields
                tokens = [PositionedToken(length, one.token) for one in end.tokens]
                return self._chunk(choice, "", tokens, end, begins=not length)
            case _:
                return self._last(event, self._asked["each"])

    def _chunk(
        self,
        choice: int,
        text: str,
        tokens: Sequence[PositionedToken],
        end: OutputEnded | None = None,
        of_prompt: int = 0,
        *,
        begins: bool,
    ) -> bytes:
        made = shown(self._asked, choice, text, tokens, end, of_prompt, begins=begins)
        return self._head + encode(made) + self._behind(choice)


def whole(record: RequestRecord, outputs: Sequence[CollectedOutput]) -> dict[str, Any]:
    """The answer of a request whose outputs have all ended. Raises `Failure`."""
    choices = []
    for index, output in enumerate(outputs):
        end, prompt = _shown_end(record.asked, ended(output)), output.prompt
        before, text, of_prompt = echo(record.asked, index), output.text(), list[PositionedToken]()
        if record.asked.get("scored"):
            _, of_prompt[:] = PromptText(before).add(logprobs.of_prompt(output.prompt, begins=True), last=True)
        if record.asked.get("nothing_more"):
            text, output = "", CollectedOutput()
        tokens = [
            PositionedToken(len(before) + at, token) for piece in output.pieces for at, token, _ in piece.tokens
        ]
        rest = [PositionedToken(len(before) + len(text), one.token) for one in end.tokens]
        said = shown(record.asked, index, before + text, [*of_prompt, *tokens, *rest], end, len(of_prompt))
        choice = {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None, **said}  # as vLLM's
        if (likeliest := record.asked.get("prompt_logprobs")) is not None:
            choice["prompt_logprobs"] = logprobs.by_id(prompt, likeliest)
        choices.append(choice)
    return {
        **head(record),
        "choices": choices,
        "usage": usage(
            [_shown_end(record.asked, output.ended).usage for output in outputs if output.ended],
            record.asked["each"],
        ),
    }


def _shown_end(asked: dict[str, Any], end: OutputEnded) -> OutputEnded:
    """The end as the client sees it: if the answer shows nothing of the output, nothing was generated."""
    if not asked.get("nothing_more"):
        return end
    used = None if end.usage is None else replace(end.usage, completion_tokens=0)
    reason = "length" if end.finish_reason == "stop" else end.finish_reason
    return end._replace(finish_reason=reason, usage=used, tokens=())


def echo(asked: dict[str, Any], choice: int) -> str:
    echoes = asked.get("echoes")
    return str(echoes[choice // asked["each"]]) if echoes else ""


def shown(
    asked: dict[str, Any],
    choice: int,
    text: str,
    tokens: Sequence[PositionedToken],
    end: OutputEnded | None,
    of_prompt: int = 0,
    *,
    begins: bool = True,
) -> dict[str, Any]:
    """A choice, or a piece of one. `of_prompt`: how many of the first tokens are the prompt's. `begins`: no other
    piece is before this one."""
    likeliest = asked.get("logprobs")
    found: dict[str, Any] = {"index": choice, "text": text, "logprobs": None}
    if likeliest is not None and (tokens or end):
        found["logprobs"] = _logprobs(tokens, likeliest, bool(asked.get("as_ids")))
    if asked.get("token_ids"):
        found["token_ids"] = [one.token.token_id for one in tokens[of_prompt:]]
    if begins and "prompt_ids" in asked:
        found["prompt_token_ids"] = asked["prompt_ids"][choice // asked["each"]]
    found["finish_reason"] = None if end is None else finish_reason(end)
    if end is not None:
        found["stop_reason"] = stop_reason(end)
    return found


def _logprobs(tokens: Sequence[PositionedToken], likeliest: int, as_ids: bool) -> dict[str, Any]:
    read = [(at, logprobs.shown(token, likeliest, as_ids)) for at, token, _ in tokens]
    return {
        "text_offset": [at for at, _ in read],
        "tokens": [one["token"] for _, one in read],
        "token_logprobs": [one["logprob"] for _, one in read],
        "top_logprobs": [_likeliest(one) for _, one in read],
    }


def _likeliest(token: dict[str, Any]) -> dict[str, float] | None:
    """The token itself, then the likeliest ones. Of two with the same text, the first."""
    if token["logprob"] is None:
        return None
    found: dict[str, float] = {}
    for one in (token, *token["top_logprobs"]):
        found.setdefault(one["token"], one["logprob"])
    return found

"""The answer of chat/completions, streamed and whole: a view of parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from petiole.gateway.core.events import StreamEvent, encode
from petiole.gateway.core.parts import (
    CollectedOutput,
    ItemStarted,
    Kind,
    OutputEnded,
    OutputItem,
    Part,
    PositionedToken,
    TextDelta,
    TokenCount,
)
from petiole.gateway.core.record import RequestRecord
from petiole.gateway.openai import logprobs
from petiole.gateway.openai.answers import ChoicesView, ended, finish_reason, head, stop_reason, usage

CALLS: tuple[Kind, ...] = ("call", "custom")


class ChatView(ChoicesView):
    """Events of a chat completion:

    role       the first chunk of a choice
    text       a piece of the content; with `echo` the text that the choice continues comes first
    reasoning  a piece of the reasoning
    call       a call of a tool begins
    arguments  a piece of its arguments
    end        the chunk with the finish reason, and the tokens that have no text
    error      in place of an end
    usage      the last chunk, if it was asked for
    """

    def __init__(self, record: RequestRecord) -> None:
        super().__init__(record, "chat.completion.chunk")
        self._open: list[Kind] = ["content"] * len(record.tasks)
        self._calls = [0] * len(record.tasks)
        # The bytes around a text that comes without tokens.
        self._plain = not (self._asked.keys() & {"top_logprobs", "token_ids", "counts"})
        self._unsaid = _unsaid(self._asked, ("reasoning_content",))
        inner = encode(self._unsaid)[1:-1] + b"," if self._unsaid else b""
        self._before = [
            b'%b{"index":%d,"delta":{%b"content":' % (self._head, choice, inner)
            for choice in range(len(record.tasks))
        ]
        self._after = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def begin(self, choice: int) -> Iterable[StreamEvent]:
        echo = self._asked.get("echo")
        return [StreamEvent("role"), *([StreamEvent("text", None, echo)] if echo else [])]

    def events(self, choice: int, part: Part) -> Iterable[StreamEvent]:
        if isinstance(part, TextDelta):
            match self._open[choice]:
                case "content":
                    return [StreamEvent("text", None, part.text, part.tokens)]
                case "reasoning":
                    hidden = self._asked.get("unthought")
                    return [] if hidden else [StreamEvent("reasoning", None, part.text, part.tokens)]
                case "call" | "custom" as kind:
                    return [StreamEvent("arguments", (self._calls[choice] - 1, kind), part.text)]
        if isinstance(part, ItemStarted):
            self._open[choice] = part.kind
            if part.kind not in CALLS:
                return []
            self._calls[choice] += 1
            return [StreamEvent("call", _call(part, "", self._calls[choice] - 1))]
        if isinstance(part, TokenCount):
            self._counts[choice] = part
        if not isinstance(part, OutputEnded):
            return []
        return self._ended(choice, part, (part, self._calls[choice] > 0))

    def encode(self, choice: int, number: int, event: StreamEvent) -> bytes:
        match event.name:
            case "text" if self._plain:
                return self._before[choice] + encode(event.text) + self._after
            case "text":
                return self._chunk(choice, {"content": event.text}, event.tokens)
            case "reasoning":
                return self._chunk(choice, _reasoning(self._asked, event.text or ""), event.tokens)
            case "call":
                return self._chunk(choice, {"tool_calls": [event.fields]})
            case "arguments":
                index, kind = event.fields
                piece = {"index": index, **_said(kind, {}, event.text or "")}
                return self._chunk(choice, {"tool_calls": [piece]})
            case "role":
                first = self._chunk(choice, {"role": "assistant", "content": ""})
                if choice or "prompt_ids" not in self._asked:
                    return first
                return first[:-1] + b',"prompt_token_ids":' + encode(self._asked["prompt_ids"]) + b"}"
            case "end":
                end, called = event.fields
                return self._chunk(choice, {}, end.tokens, end, called)
            case _:
                return self._last(event)

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        tokens: Sequence[PositionedToken] = (),
        end: OutputEnded | None = None,
        called: bool = False,
    ) -> bytes:
        shown: dict[str, Any] = {"index": choice, "delta": self._unsaid | delta, **_tokens(self._asked, tokens)}
        shown["finish_reason"] = None if end is None else _finish_reason(end, called)
        if end is not None:
            shown["stop_reason"] = stop_reason(end)
        return self._head + encode(shown) + self._behind(choice)


def whole(record: RequestRecord, outputs: Sequence[CollectedOutput]) -> dict[str, Any]:
    """The answer of a request whose outputs have all ended. Raises `Failure`."""
    choices = []
    for index, output in enumerate(outputs):
        end = ended(output)
        choices.append(
            {
                "index": index,
                "message": _message(record.asked, output),
                "token_ids": None,
                **_tokens(record.asked, output.tokens),
                "finish_reason": _finish_reason(end, any(piece.kind in CALLS for piece in output.pieces)),
                "stop_reason": stop_reason(end),
            }
        )
    answer = {
        **head(record),
        "choices": choices,
        "usage": usage([output.ended.usage for output in outputs if output.ended]),
    }
    also = {"metadata": "metadata", "prompt_ids": "prompt_token_ids"}
    answer |= {"prompt_logprobs": None, "prompt_token_ids": None}  # as vLLM's clients read them
    if (likeliest := record.asked.get("prompt_logprobs")) is not None:
        answer["prompt_logprobs"] = logprobs.by_id(outputs[0].prompt, likeliest)
    return answer | {shown: record.asked[name] for name, shown in also.items() if name in record.asked}


def _finish_reason(ended: OutputEnded, called: bool) -> str:
    """`tool_calls`: the model waits for the answers to its calls."""
    reason = finish_reason(ended)
    return "tool_calls" if called and reason == "stop" else reason


def _call(part: ItemStarted | OutputItem, arguments: str, index: int | None = None) -> dict[str, Any]:
    kind = "custom" if part.kind == "custom" else "function"
    call = {"id": part.call_id, "type": kind, **_said(part.kind, {"name": part.name}, arguments)}
    return call if index is None else {"index": index, **call}


def _said(kind: Kind, head: dict[str, str], text: str) -> dict[str, Any]:
    """What a call says, or a piece of it."""
    if kind == "custom":
        return {"custom": {**head, "input": text}}
    return {"function": {**head, "arguments": text}}


def _reasoning(asked: dict[str, Any], text: str) -> dict[str, str]:
    """Reasoning has two names, because clients read one or the other, unless a setting chooses one."""
    name = asked.get("reasoning_as")
    return {name: text} if name else {"reasoning": text, "reasoning_content": text}


def _unsaid(asked: dict[str, Any], names: Sequence[str] = ("reasoning", "reasoning_content")) -> dict[str, None]:
    """The names of reasoning where there is none: clients of servers that always send them read them unasked."""
    return dict.fromkeys(name for name in names if asked.get("reasoning_as", name) == name)


def _message(asked: dict[str, Any], output: CollectedOutput) -> dict[str, Any]:
    calls = [_call(piece, piece.text) for piece in output.pieces if piece.kind in CALLS]
    content, reasoning = asked.get("echo", "") + output.text(), output.text("reasoning")
    said: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    said |= _unsaid(asked)
    if reasoning and not asked.get("unthought"):
        said |= _reasoning(asked, reasoning)
    return said | ({"tool_calls": calls} if calls else {})


def _tokens(asked: dict[str, Any], tokens: Sequence[PositionedToken]) -> dict[str, Any]:
    """What a choice says of these tokens: log-probabilities are those of content, ids those of all."""
    likeliest = asked.get("top_logprobs")
    found: dict[str, Any] = {"logprobs": None}
    if likeliest is not None and (said := [placed.token for placed in tokens if placed.said]):
        found["logprobs"] = logprobs.content(
            said, likeliest, bool(asked.get("as_ids")), with_chosen=bool(asked.get("with_chosen"))
        )
    if asked.get("token_ids"):
        found["token_ids"] = [placed.token.token_id for placed in tokens]
    return found

"""What all answers share: usage, finish reasons, errors; lists in pages, as OpenAI's clients turn them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from petiole.contract.results.outputs import Usage
from petiole.gateway.core.events import StreamEvent, encode
from petiole.gateway.core.failures import Failure, invalid, of_end
from petiole.gateway.core.parts import CollectedOutput, OutputEnded, TokenCount
from petiole.gateway.core.record import RequestRecord

DONE = b"data: [DONE]\n\n"


def task_ids(name: str, choices: int) -> list[str]:
    return [name] if choices == 1 else [f"{name}-{choice}" for choice in range(choices)]


def usage(ends: Sequence[Usage | None], each: int | None = None) -> dict[str, Any]:
    """The usage of a request with these outputs. `each`: how many are of one prompt; None: all."""
    known = [one for one in ends if one is not None]
    groups = [ends[at : at + (each or len(ends))] for at in range(0, len(ends), each or len(ends))]
    prompts = [
        max(((one.prompt_tokens, one.cached_prompt_tokens) for one in group if one), default=(0, 0))
        for group in groups
    ]
    prompt, cached = sum(tokens for tokens, _ in prompts), sum(tokens for _, tokens in prompts)
    made, thought = sum(one.completion_tokens for one in known), sum(one.reasoning_tokens or 0 for one in known)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def finish_reason(ended: OutputEnded) -> str:
    """OpenAI's name. A deadline cuts the output as a limit does."""
    return "length" if ended.finish_reason in ("length", "deadline") else "stop"


def stop_reason(ended: OutputEnded) -> str | int | None:
    """vLLM's: the stop string or the stop token's id, if one ended the output."""
    reason = ended.stop_reason
    known = ("eos", "max_tokens", "max_model_len", "constraint")
    return None if ended.finish_reason != "stop" or reason in known else reason


class ChoicesView:
    """What streams of chat and of completions have alike: chunks with choices, how a choice ends, the usage."""

    def __init__(self, record: RequestRecord, kind: str) -> None:
        self._asked = record.asked
        self._usage: list[Usage | None] = [None] * len(record.tasks)
        self._failed = False
        self._head = encode({**head(record), "object": kind})[:-1] + b',"choices":['
        self._tail = b'],"usage":null}' if self._asked.get("usage") else b"]}"
        self._counts = [TokenCount(0, 0)] * len(record.tasks)

    def _behind(self, choice: int) -> bytes:
        """What follows a choice in its chunk: with the usage by now, if that was asked for."""
        if not self._asked.get("counts"):
            return self._tail
        prompt, made = self._counts[choice]
        used = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return b'],"usage":' + encode(used) + b"}"

    def _ended(self, choice: int, part: OutputEnded, fields: Any) -> list[StreamEvent]:
        self._usage[choice] = part.usage
        if (failure := of_end(part)) is not None:
            self._failed = True
            return [StreamEvent("error", failure)]
        return [StreamEvent("end", fields)]

    def finish(self) -> Iterable[StreamEvent]:
        return [StreamEvent("usage")] if self._asked.get("usage") and not self._failed else []

    def event_name(self, event: StreamEvent) -> str | None:
        return None

    def _last(self, event: StreamEvent, each: int | None = None) -> bytes:
        """The usage, or an error."""
        if event.name == "usage":
            return self._head + b'],"usage":' + encode(usage(self._usage, each)) + b"}"
        return encode(error_body(event.fields))


def head(record: RequestRecord) -> dict[str, Any]:
    return {"id": record.id, "object": record.kind, "created": record.created, "model": record.model}


def ended(output: CollectedOutput) -> OutputEnded:
    """The end of an output that has ended well. Raises `Failure`."""
    assert output.ended is not None
    if (failure := of_end(output.ended)) is not None:
        raise failure
    return output.ended


def error_body(failure: Failure) -> dict[str, Any]:
    return {
        "error": {
            "message": failure.message,
            "type": failure.kind,
            "param": failure.param,
            "code": failure.code,
        }
    }


def error_event(failure: Failure) -> bytes:
    return b"data: %b\n\n" % encode(error_body(failure))


MOST_LISTED, USUALLY_LISTED = 100, 20
_MOST_DIGITS = 9


def listed(
    items: Sequence[Mapping[str, Any]],
    query: Mapping[str, str],
    order: str = "desc",
    most: int = MOST_LISTED,
    usual: int = USUALLY_LISTED,
) -> dict[str, Any]:
    """A page of these items, which are oldest first. `order`, `usual`: which end comes first, and how many there
    are, unless the query says so; `most` it may ask for.
    An empty page has empty ids, because OpenAI's description knows no null there. Raises `Failure`."""
    limit, order = query.get("limit", str(usual)), query.get("order", order)
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= _MOST_DIGITS and 1 <= int(limit) <= most):
        raise invalid("limit", f"limit: must be a number from 1 to {most}, got {limit[:64]!r}", "invalid_value")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order: must be asc or desc, got {order[:64]!r}", "invalid_value")
    rest = list(items) if order == "asc" else list(items)[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(rest) if item["id"] == after]
        if not places:
            raise invalid("after", f"after: no item has the id {after[:128]!r}", "invalid_value")
        rest = rest[places[0] + 1 :]
    page = rest[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(rest) > len(page),
    }

"""Cuts what is too long, where its request says so: `truncate`.

Of a prompt tokens are left out. Of a conversation, whose template must stay whole, texts of messages are cut: the
longest ones, all to one length, so that a short instruction beside a long document stays as it is. Which tokens
stay depends on the request and on the model's context alone: workers with the same `max_model_len` keep the same
ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from petiole.contract.limits import Truncate
from petiole.gpu_worker.preparation.tokens import at_most
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.text import Tokenizer
from petiole.gpu_worker.text.tokenizer import kept

REST = 256
"""Tokens for which `max_tokens` "rest" leaves room, if the context has as many twice."""
_TRIES = 4
"""A cut text may have some tokens more, once it is tokenized again."""


def most_of(sampling: SamplingParams, context: int, truncate_to: int | None) -> int:
    """The most tokens of a prompt that leaves room for the output. Its own limits are checked later."""
    limit = sampling.max_tokens
    return at_most(truncate_to, max(1, context - (limit if type(limit) is int else min(REST, context // 2))))


def shortened(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    tokens_of: Callable[[Sequence[Mapping[str, Any]]], list[int]],
    most: int,
    where: Truncate,
) -> list[int]:
    """The tokens of a conversation, whose longest texts are cut if it has more than `most`. They are still more if
    there would be nothing left of its texts: that is another conversation."""
    found = tokens_of(messages)
    if len(found) <= most:
        return found
    encoded = [tokenizer.encoding(text, field="messages") for text in _texts(messages)]
    lengths, excess = [len(one.ids) for one in encoded], 0
    for _ in range(_TRIES):
        excess += len(found) - most
        if not (longest := _level(lengths, excess)):
            break
        cut = iter(
            [_cut(text, one.offsets, longest, where) for text, one in zip(_texts(messages), encoded, strict=True)]
        )
        found = tokens_of([_with(message, cut) for message in messages])
        if len(found) <= most:
            break
    return found


def _level(lengths: Sequence[int], excess: int) -> int:
    """The greatest length so that texts which are cut to it have `excess` tokens less, or 0."""
    low, high = 0, max(lengths, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(max(0, length - middle) for length in lengths) >= excess:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(text: str, offsets: Sequence[tuple[int, int]], most: int, where: Truncate) -> str:
    if len(offsets) <= most:
        return text
    first, last = kept(most, where)
    beginning = text[: offsets[first - 1][1]] if first else ""
    return beginning + (text[offsets[-last][0] :] if last else "")


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """In the order of `_with`. What is malformed is refused when it is rendered."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, Sequence):
            yield from (part["text"] for part in content if _is_text(part))


def _with(message: Mapping[str, Any], texts: Iterator[str]) -> Mapping[str, Any]:
    """The message with the next texts in place of its own."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": next(texts)}
    if isinstance(content, Sequence):
        parts = [{**part, "text": next(texts)} if _is_text(part) else part for part in content]
        return {**message, "content": parts}
    return message


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)

"""Texts and pairs of texts as the tokens that a model gives scores to.

    a classifier that was trained on pairs   [CLS] query [SEP] document [SEP], as its tokenizer puts them together
    a model with a chat template             a question about the pair, which "yes" or "no" answers

The question is that of Qwen3-Reranker. A template that knows the roles `query` and `document`, as those of
sentence-transformers do, asks its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.request.requests import check_text
from petiole.gpu_worker.text import Tokenizer

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
    'the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_ROLES = re.compile(r"""["']document["']""")
_UNSURE = 8
"""Tokens that a cut text may have more, once it is tokenized again."""


class Tokens(NamedTuple):
    """second_at: where the second text begins, if the tokenizer marks its tokens. prompt: how many of the first
    tokens are a prompt that is not pooled."""

    ids: list[int]
    second_at: int | None = None
    prompt: int = 0


def joined(
    tokenizer: Tokenizer, pair: tuple[str, str], *, field: str, max_tokens: int, truncate: bool = False
) -> Tokens:
    """A pair as its tokenizer joins two texts. A pair that is too long is refused, or loses the ends of its texts,
    those of the longer one first."""
    backend, most = tokenizer.backend, max_tokens - tokenizer.backend.num_special_tokens_to_add(True)
    one, two = (tokenizer.encoding(check_text(field, text), field=field) for text in pair)
    sizes = len(one.ids), len(two.ids)
    if sum(sizes) > most:
        n = sum(sizes) + max_tokens - most
        require(truncate and most > 0, field, f"must have at most {max_tokens} tokens", f"{n} tokens")
        for encoding, size in zip((one, two), shortened(sizes, most), strict=True):
            encoding.truncate(size)
    whole = backend.post_process(one, two, True)
    return Tokens(list(whole.ids), next((at for at, kind in enumerate(whole.type_ids) if kind), None))


def shortened(sizes: tuple[int, int], most: int) -> tuple[int, int]:
    """The sizes of two texts that have `most` tokens in all: the longer one is cut, and both if the shorter one
    alone is too long. As the library's `longest_first`."""
    short, long = min(sizes), max(sizes)
    long = max(short, most - short)
    if short + long > most:
        short, long = most // 2, most - most // 2
    return (short, long) if sizes[0] <= sizes[1] else (long, short)


def asked(
    tokenizer: Tokenizer,
    pair: tuple[str, str],
    instruction: str | None,
    *,
    field: str,
    max_tokens: int,
    truncate: bool = False,
) -> Tokens:
    """The question whether the second text meets what the first one asks for. A document that is too long is
    refused, or loses its end."""
    query, document = (check_text(field, text) for text in pair)

    def ids(text: str) -> list[int]:
        return _rendered(tokenizer, query, text, instruction, field)

    found = ids(document)
    if (n := len(found)) > max_tokens:
        require(truncate, field, f"must have at most {max_tokens} tokens with the question", f"{n} tokens")
        found = _cut(tokenizer, document, ids, n - max_tokens, max_tokens, field)
    return Tokens(found)


def _cut(
    tokenizer: Tokenizer, document: str, ids: Callable[[str], list[int]], over: int, most: int, field: str
) -> list[int]:
    own = tokenizer.encode_as_text(document, field=field)
    for spare in (0, _UNSURE, 4 * _UNSURE):
        kept = len(own) - over - spare
        require(kept > 0, field, f"must leave room for a document in {most} tokens", f"{over} tokens too many")
        found = ids(tokenizer.decode(own[:kept]))
        if len(found) <= most:
            return found
    raise InvalidRequest(field, f"must have at most {most} tokens with the question", f"{len(found)} tokens")


def _rendered(tokenizer: Tokenizer, query: str, document: str, instruction: str | None, field: str) -> list[int]:
    template = tokenizer.chat_template
    require(template.known, field, "must be for a model with a chat template, which asks about a pair", "none")
    if _ROLES.search(template.source):
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
    else:
        about = f"<Instruct>: {instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": about}]
    try:
        return tokenizer.apply_chat_template(messages, variables={"enable_thinking": False})
    except InvalidRequest as error:
        raise InvalidRequest(field, error.limit, error.value) from None

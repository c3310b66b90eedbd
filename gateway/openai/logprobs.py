"""Tokens with their log-probabilities, as OpenAI shows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from petiole.contract.results.outputs import TokenLogprobs

LEAST = -9999.0
"""What OpenAI and vLLM show for a token that could not be drawn."""


NOTHING = math.nan
"""Stands for the log-probability of a prompt's first token, which nothing precedes."""


def of_prompt(tokens: Sequence[TokenLogprobs], *, begins: bool) -> list[TokenLogprobs]:
    """`begins`: the first of these tokens is the prompt's."""
    first = [replace(token, logprob=NOTHING, top=[]) for token in (tokens[:1] if begins else ())]
    return [*first, *tokens[len(first) :]]


def by_id(tokens: Sequence[TokenLogprobs], likeliest: int) -> list[dict[str, Any] | None]:
    """vLLM's form of a prompt's tokens, each with the likeliest at its place. The rank of a token that is not
    among those is not known."""
    found: list[dict[str, Any] | None] = []
    for token in of_prompt(tokens, begins=True):
        values = dict(token.top[:likeliest])
        ranks = {token_id: rank for rank, token_id in enumerate(values, 1)}
        texts = dict(
            zip((token.token_id, *(token_id for token_id, _ in token.top)), token.texts or (), strict=False)
        )
        values.setdefault(token.token_id, token.logprob)
        shown = {
            str(one): {
                "logprob": max(LEAST, value),
                "rank": ranks.get(one),
                "decoded_token": texts.get(one),
            }
            for one, value in values.items()
        }
        found.append(None if math.isnan(token.logprob) else shown)
    return found


def shown(
    token: TokenLogprobs, likeliest: int, as_ids: bool = False, *, with_chosen: bool = False
) -> dict[str, Any]:
    """`as_ids`: `token_id:42` in place of a token's text. `with_chosen`: the token itself is among the likeliest,
    too. A prompt's first token has no log-probability."""
    texts, spelled = token.texts or (), token.bytes or ()

    def entry(position: int, token_id: int, logprob: float) -> dict[str, Any]:
        text = texts[position] if position < len(texts) else ""
        return {
            "token": f"token_id:{token_id}" if as_ids else text,
            "logprob": None if math.isnan(logprob) else max(LEAST, logprob),
            "bytes": list(spelled[position]) if position < len(spelled) else None,
        }

    top = [entry(k, token_id, value) for k, (token_id, value) in enumerate(token.top[:likeliest], 1)]
    chosen = entry(0, token.token_id, token.logprob)
    if with_chosen and token.token_id not in dict(token.top[:likeliest]):
        top = [chosen, *top]
    return {**chosen, "top_logprobs": top}


def content(
    tokens: Iterable[TokenLogprobs], likeliest: int, as_ids: bool = False, *, with_chosen: bool = False
) -> dict[str, Any]:
    found = [shown(token, likeliest, as_ids, with_chosen=with_chosen) for token in tokens]
    return {"content": found, "refusal": None}

"""Tokens with their log-probabilities, as OpenAI shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from petiole.outputs import TokenLogprobs

LEAST = -9999.0
"""What OpenAI and vLLM show for a token that could not be drawn."""


def shown(token: TokenLogprobs, likeliest: int, as_ids: bool = False) -> dict[str, Any]:
    """`as_ids`: `token_id:42` in place of a token's text."""
    texts, spelled = token.texts or (), token.bytes or ()

    def entry(position: int, token_id: int, logprob: float) -> dict[str, Any]:
        text = texts[position] if position < len(texts) else ""
        return {
            "token": f"token_id:{token_id}" if as_ids else text,
            "logprob": max(LEAST, logprob),
            "bytes": list(spelled[position]) if position < len(spelled) else None,
        }

    top = [entry(k, token_id, value) for k, (token_id, value) in enumerate(token.top[:likeliest], 1)]
    return {**entry(0, token.token_id, token.logprob), "top_logprobs": top}


def content(tokens: Iterable[TokenLogprobs], likeliest: int, as_ids: bool = False) -> dict[str, Any]:
    return {"content": [shown(token, likeliest, as_ids) for token in tokens], "refusal": None}

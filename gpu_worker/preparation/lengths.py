"""Refuses a request for its length: what a prompt and its output may have of the context and of the KV cache.

Producers know neither. What is cut instead, where a request says so, `truncation` has cut before. Each check
raises InvalidRequest."""

from __future__ import annotations

from petiole.gpu_worker.exceptions import require
from petiole.gpu_worker.preparation.tokens import InputTokens
from petiole.gpu_worker.request import Request
from petiole.gpu_worker.runtime.interface import ModelLimits

MOST_SCORES = 2**20
"""Log-probabilities of a prompt: 49,932 tokens with the 20 likeliest of each."""


def check_prompt(given: InputTokens, field: str, limits: ModelLimits) -> None:
    """The prompt leaves room for a token of the output."""
    n, limit = len(given.ids), limits.max_model_len - 1
    require(n > 0, field, "must not be empty", "0 tokens")
    most = f"must have at most {limit} tokens{' with its images' if given.images else ''}"
    require(n <= limit, field, most, f"{n} tokens")
    most = f"must have at most {limit} positions, of which the time between frames takes more at a lower fps"
    positions = n + given.skipped
    require(positions <= limit, field, most, f"{positions} positions for {n} tokens")


def check_output(request: Request, n_resumed: int, limits: ModelLimits) -> None:
    limit, context = request.sampling.max_tokens, limits.max_model_len
    most = context if limit == "rest" else limit
    require(most <= context, "max_tokens", f"must be at most the model's context, {context}", limit)
    require(n_resumed <= most, "resume_token_ids", f"must have at most {most} tokens", n_resumed)


def check_scores(request: Request, given: InputTokens, limits: ModelLimits) -> None:
    """The log-probabilities of a prompt are kept until the request ends."""
    top, n, delivered = request.sampling.prompt_logprobs, len(given.ids), request.resume_prompt_tokens
    require(0 <= delivered <= n, "resume_prompt_tokens", f"must be at most {n}, those of the prompt", delivered)
    if top is None:
        return
    plain = not given.images and limits.values is None and limits.texts is None
    require(plain, "prompt_logprobs", "is only for prompts of text, of models that generate text", top)
    limit = f"must give at most {MOST_SCORES} numbers in all, (prompt_logprobs + 1) for each token of the prompt"
    require((top + 1) * n <= MOST_SCORES, "prompt_logprobs", limit, f"{top} for {n} tokens")


def context_of(request: Request, given: InputTokens, limits: ModelLimits) -> int:
    """The most tokens of prompt and output together. The rest of the context also ends where the KV cache does,
    but for a prompt that leaves no room there, which is refused."""
    longest = limits.max_model_len - given.skipped
    if request.sampling.max_tokens != "rest":
        return longest
    held = limits.positions_that_fit + 1  # the last token of an output has no KV
    return min(longest, max(held, len(given.ids) + 1))


def check_fits(n_prompt: int, n_output: int, limits: ModelLimits) -> None:
    """The request fits when it runs alone, with all pages to itself."""
    if limits.whole_texts:
        return
    size, pages = limits.page_size, limits.n_pages - 1
    needed = -(-(n_prompt + n_output - 1) // size)
    limit = f"must fit, with the prompt, into the KV cache: {pages} pages of {size} tokens"
    what = f"{needed} pages for {n_prompt} prompt tokens and {n_output} output tokens"
    require(needed <= pages, "max_tokens", limit, what)

"""Checks the tokens of a prompt and of a resumed output, the numbers that they carry, and images; and refuses what
is too long for the context or for the KV cache. What a request lets be cut, `truncation` has cut before. Each
check raises InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from petiole.cache import ValueToken
from petiole.contract.errors import shorten
from petiole.contract.limits import Truncate
from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.request import Request
from petiole.gpu_worker.request.prepared_images import IMAGE, ImagePlace, RequestImage, rotary_positions
from petiole.gpu_worker.request.requests import check_token_ids
from petiole.gpu_worker.request.values import Numbers, ValueKind, ValueKinds
from petiole.gpu_worker.runtime.interface import ModelLimits

MOST_SCORES = 2**20
"""Log-probabilities of a prompt: 49,932 tokens with the 20 likeliest of each."""


@dataclass(frozen=True, slots=True)
class InputTokens:
    """Token ids, with IMAGE at the positions of images. By position: the numbers that tokens carry, and the images
    that begin there. n_images: how many were to be placed."""

    ids: list[int]
    numbers: dict[int, Numbers] = field(default_factory=dict)
    images: dict[int, RequestImage] = field(default_factory=dict)
    n_images: int = 0

    @property
    def skipped(self) -> int:
        """By how many more than its tokens its rotary positions are, of what follows them, too: a video whose
        frames are far apart in time has few tokens and a great last position."""
        rotary = rotary_positions(len(self.ids), self.images)
        return 0 if rotary is None else max(0, int(rotary.max()) + 1 - len(self.ids))


def prompt_tokens(
    prompt: object, vocab_size: int, values: ValueKinds | None, images: Sequence[RequestImage] = ()
) -> InputTokens:
    """A prompt of token ids, values and images. Raises InvalidRequest."""
    typed = ValueToken | ImagePlace
    if not isinstance(prompt, list | tuple) or not any(isinstance(one, typed) for one in prompt):
        return InputTokens(check_token_ids("prompt", prompt, vocab_size), n_images=len(images))
    known = check_token_ids("prompt", [0 if isinstance(one, typed) else one for one in prompt], vocab_size)
    tokens = InputTokens([], n_images=len(images))
    for k, token in enumerate(prompt):
        at, where = len(tokens.ids), f"prompt[{k}]"
        if isinstance(token, ImagePlace):
            last = len(images) - 1
            require(0 <= token.index <= last, where, f"must name one of the images, 0 to {last}", token.index)
            tokens.images[at] = images[token.index]
            tokens.ids.extend([IMAGE] * images[token.index].n_positions)
        elif isinstance(token, ValueToken):
            kind = None if values is None else values.kind_of(token)
            if kind is None:
                raise InvalidRequest(where, "this model knows no such values", type(token).__name__)
            tokens.ids.append(kind.token_id)
            tokens.numbers[at] = _checked(where, kind, token.cache_key()[1:])
        else:
            tokens.ids.append(known[k])
    return tokens


def resumed_tokens(
    token_ids: object, numbers: Sequence[Sequence[int] | None], vocab_size: int, values: ValueKinds | None
) -> InputTokens:
    """The output of earlier attempts, with the numbers that its tokens carry, all of them. Raises
    InvalidRequest."""
    ids = check_token_ids("resume_token_ids", token_ids, vocab_size)
    if values is None:
        return InputTokens(ids)
    known = list(numbers) if numbers else [None] * len(ids)
    require(len(known) == len(ids), "resume_bins", f"must have {len(ids)} entries, one for each token", len(known))
    found = {
        at: _checked(f"resume_bins[{at}]", kind, of or ())
        for at, (token, of) in enumerate(zip(ids, known, strict=True))
        if (kind := values.kind(token)) is not None
    }
    return InputTokens(ids, found)


def _checked(field_name: str, kind: ValueKind, numbers: Sequence[int]) -> Numbers:
    good = len(numbers) == kind.n and all(type(one) is int and 0 <= one < kind.limit for one in numbers)
    require(good, field_name, f"must have {kind.n} numbers from 0 to {kind.limit - 1}", list(numbers))
    return tuple(numbers)


# ---- how long a prompt and its output may be: what producers do not know


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


def check_truncate(truncate: object, truncate_to: object) -> None:
    """Raises InvalidRequest."""
    known = get_args(Truncate)
    require(truncate is None or truncate in known, "truncate", f"must be one of {', '.join(known)}", truncate)
    at_most(truncate_to, 1)


def at_most(truncate_to: object, most: int) -> int:
    """The most tokens of what is cut. most: what the model takes. Raises InvalidRequest."""
    if truncate_to is None:
        return most
    if not isinstance(truncate_to, int) or isinstance(truncate_to, bool) or truncate_to < 1:
        raise InvalidRequest("truncate_to", "must be an integer of at least 1", shorten(truncate_to))
    return min(truncate_to, most)

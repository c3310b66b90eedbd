"""Checks the tokens of a prompt and of a resumed output, the bins of value tokens, and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from petiole.cache import CoordToken, SizeToken
from petiole.gpu_worker.errors import InvalidRequest, require
from petiole.gpu_worker.request.images import IMAGE, ImagePlace, RequestImage
from petiole.gpu_worker.request.values import Bins, ValueTokens
from petiole.gpu_worker.text.checks import check_token_ids


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, with IMAGE at the positions of images. By position: the bins of value tokens, and the images that
    begin there."""

    ids: list[int]
    bins: dict[int, Bins] = field(default_factory=dict)
    images: dict[int, RequestImage] = field(default_factory=dict)


def prompt_tokens(
    prompt: object, vocab_size: int, values: ValueTokens | None, images: Sequence[RequestImage] = ()
) -> Tokens:
    """A prompt of token ids, coordinates, sizes and images. Raises InvalidRequest."""
    typed = (CoordToken, SizeToken, ImagePlace)
    if not isinstance(prompt, list | tuple) or not any(isinstance(one, typed) for one in prompt):
        return Tokens(check_token_ids("prompt", prompt, vocab_size))
    known = check_token_ids("prompt", [0 if isinstance(one, typed) else one for one in prompt], vocab_size)
    tokens = Tokens([])
    for k, token in enumerate(prompt):
        at, where = len(tokens.ids), f"prompt[{k}]"
        if isinstance(token, ImagePlace):
            last = len(images) - 1
            require(0 <= token.index <= last, where, f"must name one of the images, 0 to {last}", token.index)
            tokens.images[at] = images[token.index]
            tokens.ids.extend([IMAGE] * images[token.index].n_positions)
        elif isinstance(token, CoordToken | SizeToken):
            if values is None:
                raise InvalidRequest(where, "this model knows no coordinates and sizes", type(token).__name__)
            tokens.ids.append(values.coordinate_id if isinstance(token, CoordToken) else values.size_id)
            tokens.bins[at] = _checked(where, tokens.ids[at], token.cache_key()[1:], values)
        else:
            tokens.ids.append(known[k])
    return tokens


def resumed_tokens(
    token_ids: object, bins: Sequence[Sequence[int] | None], vocab_size: int, values: ValueTokens | None
) -> Tokens:
    """The output of earlier attempts. Each of its value tokens needs its bins. Raises InvalidRequest."""
    ids = check_token_ids("resume_token_ids", token_ids, vocab_size)
    if values is None:
        return Tokens(ids)
    known = list(bins) if bins else [None] * len(ids)
    require(len(known) == len(ids), "resume_bins", f"must have {len(ids)} entries, one for each token", len(known))
    found = {
        at: _checked(f"resume_bins[{at}]", token, of or (), values)
        for at, (token, of) in enumerate(zip(ids, known, strict=True))
        if values.n_bins(token)
    }
    return Tokens(ids, found)


def _checked(field_name: str, token_id: int, bins: Sequence[int], values: ValueTokens) -> Bins:
    n, limit = values.n_bins(token_id), values.limit(token_id)
    good = len(bins) == n and all(type(one) is int and 0 <= one < limit for one in bins)
    require(good, field_name, f"must have {n} bins from 0 to {limit - 1}", list(bins))
    return tuple(bins)

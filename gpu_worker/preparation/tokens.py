"""Checks the tokens of a prompt and of a resumed output, the numbers that they carry, and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from petiole.cache import ValueToken
from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.request.prepared_images import IMAGE, ImagePlace, RequestImage, rotary_positions
from petiole.gpu_worker.request.values import Numbers, ValueKind, ValueKinds
from petiole.gpu_worker.text.checks import check_token_ids


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

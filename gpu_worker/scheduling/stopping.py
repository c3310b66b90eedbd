"""Stop conditions on tokens, as pure functions.

Tokens are checked one by one, each in this order: stop token sequences, EOS, stop token ids, length limits. The
token that ends a sequence is part of its output. Stop *strings* are matched on the text thread.

The first `min_tokens` tokens complete no stop token sequence. EOS and stop tokens need no such check: among these
tokens they are drawn only if nothing else is left, and then they do end the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from petiole.gpu_worker.request import FinishReason, SamplingParams


class Finish(NamedTuple):
    """Why a sequence ended. `stop_reason` as in `Result`."""

    reason: FinishReason
    stop_reason: str | int | None = None


End = Finish | BaseException
"""The end of a request: how its output finished, or the error that replaces it."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stop conditions of one sequence.

    `end_ids`: the tokens that are not drawn before `min_tokens`: stop tokens and EOS, even with `ignore_eos`.
    `last_ids`: all tokens that can end the output before its length limit, so that one look-up suffices for most
    tokens. `length_reason`: the limit that `max_output_tokens` comes from.
    """

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    end_ids: frozenset[int]
    last_ids: frozenset[int]
    sequences: tuple[tuple[int, ...], ...]
    min_tokens: int
    max_output_tokens: int
    length_reason: str

    @staticmethod
    def of(
        sampling: SamplingParams, eos_ids: frozenset[int], num_prompt_tokens: int, max_model_len: int
    ) -> StopRules:
        eos = frozenset() if sampling.ignore_eos else eos_ids
        stops = frozenset(sampling.stop_token_ids)
        sequences = tuple(tuple(ids) for ids in sampling.stop_token_sequences)
        room = max_model_len - num_prompt_tokens
        limit = room + 1 if sampling.max_tokens == "rest" else sampling.max_tokens
        return StopRules(
            eos_ids=eos,
            stop_ids=stops,
            end_ids=eos_ids | stops,
            last_ids=eos | stops | {ids[-1] for ids in sequences},
            sequences=sequences,
            min_tokens=sampling.min_tokens,
            max_output_tokens=min(limit, room),
            length_reason="max_tokens" if limit <= room else "max_model_len",
        )

    def cut(self, generated: Sequence[int], fresh: Sequence[int]) -> tuple[int, Finish | None]:
        """The number of `fresh` tokens that follow `generated` up to the end, and how the sequence finishes, or
        None if it does not end."""
        if self.last_ids.isdisjoint(fresh) and len(generated) + len(fresh) < self.max_output_tokens:
            return len(fresh), None
        n = 0
        for token in fresh:
            n += 1
            if self.sequences and (stop := self._matched(generated, fresh[:n])) is not None:
                return n, Finish(FinishReason.STOP, str(list(stop)))
            if token in self.eos_ids:
                return n, Finish(FinishReason.STOP, "eos")
            if token in self.stop_ids:
                return n, Finish(FinishReason.STOP, token)
            if len(generated) + n >= self.max_output_tokens:
                return n, Finish(FinishReason.LENGTH, self.length_reason)
        return n, None

    def _matched(self, generated: Sequence[int], fresh: Sequence[int]) -> tuple[int, ...] | None:
        """The stop token sequence that the output ends with, or None if it ends with none or may not end yet."""
        if len(generated) + len(fresh) <= self.min_tokens:
            return None
        longest = max(len(stop) for stop in self.sequences)
        tail = (*generated[-longest:], *fresh)
        return next((stop for stop in self.sequences if tail[-len(stop) :] == stop), None)

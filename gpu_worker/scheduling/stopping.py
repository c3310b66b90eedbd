"""When a sequence ends by itself: pure functions over its tokens.

Tokens are taken one by one, in this order of checks for each: stop token sequences, EOS, stop token ids, caps.
The token that ends a sequence belongs to its output. Stop *strings* are found on the text thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_worker.request import FinishReason, SamplingParams


class Finish(NamedTuple):
    """Why a sequence ended. `stop_reason` as in `Result`."""

    reason: FinishReason
    stop_reason: str | int | None = None


End = Finish | BaseException
"""Of a request: how its output ended, or what there is instead of one."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """What ends one sequence. `last_ids`: every token with which an output can end before its caps, so that one
    look-up is enough for the tokens that end nothing. `length_reason`: which of the two caps `max_output_tokens`
    comes from."""

    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    last_ids: frozenset[int]
    sequences: tuple[tuple[int, ...], ...]
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
        return StopRules(
            eos_ids=eos,
            stop_ids=stops,
            last_ids=eos | stops | {ids[-1] for ids in sequences},
            sequences=sequences,
            max_output_tokens=min(sampling.max_tokens, room),
            length_reason="max_tokens" if sampling.max_tokens <= room else "max_model_len",
        )

    def cut(self, generated: Sequence[int], fresh: Sequence[int]) -> tuple[int, Finish | None]:
        """How many of `fresh` still belong behind `generated`, and how the last of those ends the sequence."""
        if self.last_ids.isdisjoint(fresh) and len(generated) + len(fresh) < self.max_output_tokens:
            return len(fresh), None
        taken = 0
        for token in fresh:
            taken += 1
            if self.sequences and (stop := self._matched(generated, fresh[:taken])) is not None:
                return taken, Finish(FinishReason.STOP, str(list(stop)))
            if token in self.eos_ids:
                return taken, Finish(FinishReason.STOP, "eos")
            if token in self.stop_ids:
                return taken, Finish(FinishReason.STOP, token)
            if len(generated) + taken >= self.max_output_tokens:
                return taken, Finish(FinishReason.LENGTH, self.length_reason)
        return taken, None

    def _matched(self, generated: Sequence[int], fresh: Sequence[int]) -> tuple[int, ...] | None:
        """The stop token sequence that the output now ends with."""
        longest = max(len(stop) for stop in self.sequences)
        tail = (*generated[-longest:], *fresh)
        return next((stop for stop in self.sequences if tail[-len(stop) :] == stop), None)

"""Drafts of models whose layers keep a state: a row goes back to the state before those that were rejected, and
the tokens are those of plain decoding."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from petiole.gpu_worker import Engine, Request, SamplingParams
from petiole.gpu_worker.speculation import Launched, Price
from petiole.gpu_worker.speculation.proposer import behind
from tests.support.families import WITH_STATES

PROMPTS = [[5, 17, 200, 33, 91], [9] * 40, [7, 8, 9, 7, 8, 9, 7, 8]]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95, seed=3, max_tokens=24, ignore_eos=True),
    "penalized": SamplingParams(temperature=0.7, seed=4, frequency_penalty=0.6, max_tokens=24, ignore_eos=True),
}
TRIALS = [(0.7, 4, "pipelined"), (0.0, 1, "mixed"), (0.95, 3, "mixed"), (1.0, 2, "drain")]
"""How many drafts are right, how many there are at most, and the policy of prefills."""


class Guesses:
    """Drafts the known answer, of which each token is right with some probability."""

    def __init__(self, answers: dict[tuple[int, ...], Sequence[int]], right: float) -> None:
        self.answers, self.right = answers, right

    def drafter(self, tokens: Sequence[int]) -> Guesses.Of:
        begun = next(p for p in self.answers if list(p) == list(tokens)[: len(p)])
        drafter = self.Of(self.answers[begun], self.right, len(begun))
        drafter.extend(tokens)
        return drafter

    class Of:
        def __init__(self, answer: Sequence[int], right: float, n_prompt: int) -> None:
            self.answer, self.right, self.at = answer, right, -n_prompt

        def extend(self, tokens: Sequence[int], n_drafts: int = 0, n_held: int = 0) -> None:
            self.at += len(tokens)

        def worth(self, price: Price, *, in_flight: bool) -> int:
            return 8

        def rests(self, price: Price, *, in_flight: bool) -> int:
            return 0

        def expects(self, n: int) -> float:
            return 8

        def propose(self, count: int, launched: Launched | None = None) -> list[int]:
            if launched is None:
                return self.guess(count)
            return list(behind(launched.drafts, self.guess(1 + len(launched.drafts) + count), count))

        def guess(self, count: int) -> list[int]:
            wanted = enumerate(self.answer[self.at : self.at + count], self.at)
            return [t if random.Random(at).random() < self.right else (t + 1) % 320 for at, t in wanted]


def answers(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    return [list(r.token_ids) for r in engine.generate([Request(prompt=p, sampling=sampling) for p in PROMPTS])]


@pytest.mark.parametrize("family", sorted(WITH_STATES))
def test_rejected_drafts_leave_no_trace_in_states(
    family: str, checkpoint: Callable[..., Any], open_runtime: Callable[..., Any]
) -> None:
    folder, _ = checkpoint(family)
    plain = open_runtime(folder, prefix_cache="off")
    with Engine(plain.config, runtime=plain) as engine:
        expected = {name: answers(engine, sampling) for name, sampling in SAMPLINGS.items()}
    for right, drafts, policy in TRIALS if family == "qwen3.5" else TRIALS[:1]:
        runtime = open_runtime(
            folder, speculative_tokens=drafts, prefill_policy=policy, chunk_size=16, num_pages=140, debug=True
        )
        guesses = Guesses({}, right)
        with Engine(runtime.config, runtime=runtime, proposer=guesses) as engine:
            for name, sampling in SAMPLINGS.items():
                guesses.answers = dict(zip(map(tuple, PROMPTS), expected[name], strict=True))
                assert answers(engine, sampling) == expected[name], (name, right)
            stats = engine.stats()
        assert stats["draft_tokens"] > 0
        assert (stats["accepted_draft_tokens"] > 0) == (right > 0)

"""Rules of sampling with drafts, each broken on purpose: other tokens come out, and the comparison notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from petiole.gpu_worker import Engine, EngineError, SamplingParams
from petiole.gpu_worker.runtime.cpu import platform
from petiole.gpu_worker.runtime.memory.states import StatePool
from petiole.gpu_worker.runtime.step import rows as step_rows
from petiole.gpu_worker.runtime.step.in_doubt import RowsInDoubt
from petiole.gpu_worker.runtime.step.sampler import OutputSampler
from petiole.gpu_worker.runtime.step.verify import accept
from tests.gpu_worker.models.test_states_and_drafts import PROMPTS, Guesses, answers

SETTLED, NOTE = RowsInDoubt.settled, RowsInDoubt.note
PENALISED = SamplingParams(max_tokens=40, temperature=0.0, frequency_penalty=0.9, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
LATE = SamplingParams(max_tokens=40, temperature=1.0, seed=6, min_tokens=30, stop_token_ids=range(0, 320, 2))


def accepted_whatever_was_sampled(token_ids: torch.Tensor, values: Any, drafts: torch.Tensor, *rest: Any) -> Any:
    drafts = drafts.clone()
    following = drafts[-len(token_ids) :]
    following[following >= 0] = token_ids[following >= 0]
    return accept(token_ids, values, drafts, *rest)


BROKEN: dict[str, tuple[str, SamplingParams, Any, str, Any]] = {
    "a draft is accepted if it was sampled in its place": (
        "qwen3",
        DRAWN,
        platform,
        "accept",
        accepted_whatever_was_sampled,
    ),
    "drafts count for the penalties of the outputs behind them": (
        "qwen3",
        PENALISED,
        step_rows,
        "draft_pairs",
        lambda *_: np.empty((0, 2), np.int64),
    ),
    "accepted tokens alone are counted": (
        "qwen3",
        PENALISED,
        OutputSampler,
        "_counted",
        lambda self, batch, accepted: torch.ones(int(batch.outputs.sum()), dtype=torch.bool),
    ),
    "noise is that of the position where a row in doubt is": (
        "qwen3",
        DRAWN,
        RowsInDoubt,
        "settled",
        lambda self, batch, pending: replace(SETTLED(self, batch, pending), starts=batch.starts),
    ),
    "ends are barred up to the position where a row in doubt is": (
        "qwen3",
        LATE,
        step_rows,
        "_early_ends",
        lambda early, tokens: np.empty((0, 2), np.int64),
    ),
    "a state goes back before drafts that were rejected": (
        "qwen3.5",
        DRAWN,
        StatePool,
        "_go_back",
        lambda self, rows, own: self.reached.__setitem__(rows, self.before[rows]),
    ),
    "what was accepted behind a state is computed again": (
        "qwen3.5",
        DRAWN,
        RowsInDoubt,
        "note",
        lambda self, *given: (NOTE(self, *given), self._repeated.clear()),
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_noticed(
    rule: str,
    checkpoint: Callable[..., Any],
    open_runtime: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family, sampling, owner, name, instead = BROKEN[rule]
    folder, _ = checkpoint(family)
    plain = open_runtime(folder, prefix_cache="off")
    with Engine(plain.config, runtime=plain) as engine:
        expected = answers(engine, sampling)
    guesses = Guesses(dict(zip(map(tuple, PROMPTS), expected, strict=True)), 0.7)

    def drafted() -> list[list[int]] | None:
        """None: the engine fails."""
        runtime = open_runtime(folder, speculative_tokens=3, prefix_cache="off")
        try:
            with Engine(runtime.config, runtime=runtime, proposer=guesses) as engine:
                return answers(engine, sampling)
        except EngineError:
            return None

    assert drafted() == expected
    monkeypatch.setattr(owner, name, instead)
    assert drafted() != expected

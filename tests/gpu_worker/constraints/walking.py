"""Walks of a constraint by random tokens, with a tokenizer of single bytes and some words."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np

from petiole.gpu_worker.constraints import ConstraintState, compile_constraint
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.text import Tokenizer
from tests.support import tokenizers as samples

PADDED_VOCAB = 512  # the model's, larger than the tokenizer's
WORDS = PADDED_VOCAB // 32


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(samples.byte_level(), special_tokens={"eos_token": "<|im_end|>"}, eos_token_ids=[0, 2])


def compiled(kind: Any, value: Any) -> ConstraintState:
    return compile_constraint(Constraint(kind, value), tokenizer())


def allowed(state: ConstraintState) -> list[int]:
    """Read as the runtime reads a TokenMask: bit v % 32 of word v // 32."""
    mask = np.full(WORDS, -1, np.int32)
    state.fill_mask(mask)
    return [v for v in range(PADDED_VOCAB) if int(mask[v // 32]) >> (v % 32) & 1]


def feed(state: ConstraintState, text: str) -> bool:
    return all(state.consume(v) for v in tokenizer().encode(text))


def accepts(state: ConstraintState, text: str) -> bool:
    """Whether `text` is a whole output. The state stays where it is."""
    copy = state.fork()
    return feed(copy, text) and not tokenizer().eos_token_ids.isdisjoint(allowed(copy))


@cache
def _closing() -> frozenset[int]:
    made = tokenizer()
    return frozenset(v for v in range(made.vocab_size) if made.decode([v]) in ('"', "}", "]"))


def draw(state: ConstraintState, rng: random.Random, made: Tokenizer | None = None) -> str:
    """An output of random allowed tokens, ended by EOS. The longer it gets, the more it closes what is open."""
    eos, ids = (made or tokenizer()).eos_token_ids, list[int]()
    for n in range(4000):
        choices = allowed(state)
        ends = [v for v in choices if v in eos]
        closing = (
            [v for v in choices if v in _closing()] if made is None and rng.random() < min(n / 400, 0.7) else []
        )
        token_id = rng.choice(ends) if ends and rng.random() < 0.5 else rng.choice(closing or choices)
        assert state.consume(token_id)
        if token_id in eos:
            return (made or tokenizer()).decode(ids)
        ids.append(token_id)
    raise AssertionError(f"no end: {(made or tokenizer()).decode(ids)[:200]!r}")

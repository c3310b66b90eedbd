"""Whole greedy generations equal those of transformers."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from bench.harness.driver import Driver
from petiole.gpu_worker.request import SamplingParams
from tests.support.families import by_family
from tests.support.trials import rest

PROMPTS = [[5, 17, 200, 33, 91], [7], [301, 4, 4, 9, 12, 80, 81, 82, 83, 90, 11, 3, 250]]
N_TOKENS = 24


_KNOWN: WeakKeyDictionary[Any, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()
"""For each model its longest greedy generation from each prompt so far, which begins with all shorter ones."""


def oracle(model: Any, prompt: list[int], n_tokens: int = N_TOKENS, guess: list[int] | None = None) -> list[int]:
    """The greedy generation of transformers. A right `guess` takes one forward, and not one for each token."""
    known = _KNOWN.setdefault(model, {})
    longest = known.get(tuple(prompt), [])
    if len(longest) < n_tokens:
        if guess is None or len(guess) != n_tokens or not is_greedy(model, prompt, guess):
            guess = generated(model, prompt, n_tokens)
        longest = known[tuple(prompt)] = list(guess)
    return longest[:n_tokens]


def is_greedy(model: Any, prompt: list[int], output: list[int]) -> bool:
    """Whether each token of `output` has the greatest logit behind those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output[:-1]]]), use_cache=False).logits[0]
    return bool(logits[len(prompt) - 1 :].argmax(dim=-1).tolist() == output)


def generated(model: Any, prompt: list[int], n_tokens: int) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=n_tokens,
        min_new_tokens=n_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = ids[0, len(prompt) :].tolist()
    return found


def oracle_of_min_tokens(model, prompt, sampling):
    """Up to the token that ends it."""
    ids = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=N_TOKENS,
        min_new_tokens=sampling.min_tokens,
        do_sample=False,
        eos_token_id=list(sampling.stop_token_ids),
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


MIN_TOKENS = [
    SamplingParams(temperature=0.0, min_tokens=n, stop_token_ids=range(0, 320, 2)) for n in (1, 9, N_TOKENS)
]


@pytest.mark.parametrize("family", by_family())
def test_a_greedy_generation_equals_that_of_transformers(family, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    outputs = Driver(open_runtime(folder)).generate(PROMPTS, N_TOKENS)
    assert outputs == [oracle(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("sampling", MIN_TOKENS, ids=lambda sampling: sampling.min_tokens)
def test_min_tokens_are_those_of_transformers(sampling, checkpoint, open_runtime):
    folder, model = checkpoint("qwen3")
    outputs = Driver(open_runtime(folder)).generate(PROMPTS, N_TOKENS, sampling, depth=2)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = oracle_of_min_tokens(model, prompt, sampling)
        assert output[: len(expected)] == expected


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "lfm2"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", rest([4, 0, 1]))
@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_pages_and_pipelining_change_no_token(family, page_size, chunk, depth, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    runtime = open_runtime(folder, page_size=page_size, prefix_cache="off")
    outputs = Driver(runtime).generate(PROMPTS, N_TOKENS, chunk=chunk, depth=depth)
    assert outputs == [oracle(model, prompt) for prompt in PROMPTS]

"""A verify step accepts what sampling confirms, and changes nothing about which tokens come."""

from __future__ import annotations

import numpy as np
import pytest

from bench.harness.driver import Driver
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.interface import TokenMask

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.8, top_p=0.95),
    "penalized": SamplingParams(
        temperature=0.0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "min_tokens": SamplingParams(temperature=0.8, min_tokens=11, stop_token_ids=range(0, 320, 2)),
    "seeded and penalized": SamplingParams(temperature=1.0, top_k=30, frequency_penalty=0.6),
}
PROMPT = [5, 17, 200, 33, 91]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("wrong_at", [0, 1, 3, 99])
def test_drafts_give_the_tokens_of_plain_decoding(name, wrong_at, checkpoint, open_runtime):
    folder, _ = checkpoint("qwen3")
    runtime = open_runtime(folder, speculative_tokens=4)
    sampling = SAMPLINGS[name]
    plain = Driver(runtime).generate([PROMPT], 21, sampling, seeds=[3])[0]

    driver = Driver(runtime)
    other = driver.sequence([9, 9, 8], sampling, seed=4)
    sequence = driver.sequence(PROMPT, sampling, seed=3)
    driver.prefill([other, sequence])
    while len(sequence.output) <= 16:
        done = len(sequence.output)
        drafts = plain[done : done + 4]
        if wrong_at < len(drafts):
            drafts[wrong_at] = (drafts[wrong_at] + 1) % 320
        output = driver.verify([other, sequence], [[], drafts])
        assert output.accepted.tolist() == [1, min(wrong_at, len(drafts)) + 1]
    assert sequence.output == plain[: len(sequence.output)]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.9, frequency_penalty=0.5, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, min_tokens=13, stop_token_ids=range(0, 320, 2)),
    ],
    ids=["penalized", "min_tokens"],
)
def test_a_known_pending_token_continues_a_recomputed_sequence(sampling, checkpoint, open_runtime):
    folder, _ = checkpoint("qwen3")
    runtime = open_runtime(folder)
    whole = Driver(runtime).generate([PROMPT], 20, sampling, seeds=[11])[0]

    driver = Driver(runtime)
    resumed = driver.sequence(PROMPT, sampling, seed=11)
    resumed.output = whole[:8]
    known = PROMPT + whole[:8]
    step = driver.launch("prefill", [resumed], [known[:-1]], [0], pending=[known[-1]])
    assert driver.finish_step(*step).accepted.tolist() == [0]
    driver.decode_many([resumed], 12)
    assert resumed.output == whole


def test_a_mask_restricts_the_outputs_it_names(checkpoint, open_runtime):
    folder, _ = checkpoint("qwen3")
    runtime = open_runtime(folder)
    expected = Driver(runtime).generate([PROMPT], 2)[0]
    driver = Driver(runtime)
    free, bound = driver.sequence(PROMPT), driver.sequence(PROMPT)
    driver.prefill([free, bound])
    bits = np.zeros((1, 10), dtype=np.int32)
    for token in (37, 63, 319):
        bits[0, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
    output = driver.decode([free, bound], TokenMask(np.array([1], dtype=np.int32), bits))
    assert output.token_ids[0] == expected[1]
    assert output.token_ids[1] in (37, 63, 319)

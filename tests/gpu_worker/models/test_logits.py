"""Log-probabilities over the whole vocabulary agree with transformers, however the positions were computed."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from bench.harness.driver import Driver
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.cpu.native import build, stack
from tests.support.families import EVERY_FAMILY, MIXTURES, WITH_STATES, by_family
from tests.support.trials import rest

VOCAB = 320
ALL = SamplingParams(temperature=0.0, logprobs=VOCAB)
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(3, VOCAB, n).tolist()


def reference(model, ids):
    """float64 [len(ids), vocab]"""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return logits.double().log_softmax(-1).numpy()


def table(output):
    """[O, vocab] log-probabilities of a step whose rows asked for all of them."""
    full = np.empty((len(output.top_ids), VOCAB))
    np.put_along_axis(full, output.top_ids.astype(np.int64), output.top_logprobs, axis=1)
    return full


def relative_error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


def error_of_most(got, expected):
    """The median of the positions' errors: where rounding turns the choice of an expert, the rest is different."""
    return np.median([relative_error(one, other) for one, other in zip(got, expected, strict=True)])


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "float32") for family in sorted(EVERY_FAMILY)), *by_family("bfloat16")]
)
def test_every_position_of_a_full_prefill(family, dtype, checkpoint, open_runtime, tmp_path):
    folder, model = checkpoint(family)
    rounded = copy.deepcopy(model).to(getattr(torch, dtype))
    if family in WITH_STATES:  # some of whose weights are read in float32
        rounded.save_pretrained(folder := tmp_path)
    outputs = {"max_num_seqs": 40} if family in WITH_STATES else {"speculative_tokens": 7}
    driver = Driver(open_runtime(folder, dtype=dtype, **outputs))
    ids = tokens(40)
    sequence = driver.sequence(ids, ALL)
    step = driver.launch("verify", [sequence], [ids], [len(ids)])
    got = table(driver.finish_step(*step))
    exact = copy.deepcopy(rounded).float()  # the same weights, computed in float32
    expected = reference(exact, ids)
    error = error_of_most if dtype == "bfloat16" and family in MIXTURES else relative_error
    if (found := error(got, expected)) > TOLERANCE[dtype]:  # some draws are worse conditioned
        assert dtype == "bfloat16"
        assert found < 1.2 * error(reference(rounded, ids), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_of_several_blocks_of_keys(dtype, checkpoint, open_runtime):
    folder, model = checkpoint("qwen3")
    driver = Driver(open_runtime(folder, dtype=dtype))
    sequence = driver.sequence(tokens(200), ALL)
    driver.prefill([sequence], [131])
    got = table(driver.prefill([sequence]))
    exact = copy.deepcopy(model).to(getattr(torch, dtype)).float()
    assert relative_error(got, reference(exact, tokens(200))[-1:]) < TOLERANCE[dtype]


@pytest.mark.slow
def test_bfloat16_on_a_processor_without_products_for_it(checkpoint, open_runtime, monkeypatch):
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, "-mno-avx512bf16"))
    monkeypatch.setattr(stack, "load_library", build.load_library.__wrapped__)
    test_a_prompt_of_several_blocks_of_keys("bfloat16", checkpoint, open_runtime)


@pytest.mark.parametrize("family", by_family())
@pytest.mark.parametrize("chunk", rest([7, 1, 16]))
def test_a_chunked_prefill(family, chunk, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    driver = Driver(open_runtime(folder))
    ids = tokens(33)
    sequence = driver.sequence(ids, ALL)
    for end in range(chunk, len(ids), chunk):
        driver.prefill([sequence], [end])
    got = table(driver.prefill([sequence]))
    assert relative_error(got, reference(model, ids)[-1:]) < 1e-4


@pytest.mark.parametrize("family", by_family())
def test_an_append_after_a_prefix_that_another_sequence_computed(family, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    driver = Driver(open_runtime(folder))
    shared, mine = tokens(20), tokens(9, seed=1)
    first = driver.sequence(shared + tokens(3, seed=2), ALL)
    driver.keep(first, len(shared))
    driver.prefill([first])
    second = driver.fork(first, shared + mine, len(shared))
    got = table(driver.prefill([second]))
    assert relative_error(got, reference(model, shared + mine)[-1:]) < 1e-4


@pytest.mark.parametrize("family", by_family())
def test_a_batched_decode_of_mixed_lengths(family, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    driver = Driver(open_runtime(folder))
    sequences = [driver.sequence(tokens(n, seed=n), ALL) for n in (1, 5, 18, 40)]
    driver.prefill(sequences)
    for _ in range(6):
        got = table(driver.decode(sequences))
        expected = [reference(model, s.prompt + s.output[:-1])[-1] for s in sequences]
        assert relative_error(got, np.array(expected)) < 1e-4


def test_a_mixed_batch_of_chunks_decodes_and_verifies(checkpoint, open_runtime):
    folder, model = checkpoint("mistral")
    driver = Driver(open_runtime(folder, speculative_tokens=2))
    prompts = [tokens(n, seed=n) for n in (12, 9, 30)]
    decoding, verifying = driver.sequence(prompts[0], ALL), driver.sequence(prompts[1], ALL)
    driver.prefill([decoding, verifying])
    prefilling = driver.sequence(prompts[2], ALL)
    drafts = [40, 41]
    inputs = [[-1], [-1, *drafts], prompts[2]]
    output = driver.finish_step(*driver.launch("verify", [decoding, verifying, prefilling], inputs, [1, 3, 1]))
    history = prompts[1] + verifying.output[:1] + drafts
    expected = [
        reference(model, prompts[0] + decoding.output[:1])[-1:],
        reference(model, history)[-3:],
        reference(model, prompts[2])[-1:],
    ]
    assert relative_error(table(output), np.concatenate(expected)) < 1e-4

"""With the compiled CPU path a sequence gets the same bits alone, in a batch, in chunks, on any thread count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.harness.checkpoints.decoders import Shape, checkpoint as bench_checkpoint, write_adapter
from bench.harness.driver import Driver
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.cpu.native import stack
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from tests.gpu_worker.models.weights.test_quantised_models import quantise  # noqa: F401 - a fixture
from tests.support.processors import FEWER, kernels_for
from tests.support.quantised import FORMATS

ALL = SamplingParams(temperature=0.0, logprobs=320)
SHAPE = Shape("qwen3", "float32", 320, 64, 96, 3, 4, 2, 32)
FAMILIES = ["qwen3", "mistral", "llama-biases", "gpt-oss", "glm4-moe", "deepseek-v3"]
WITH_STATES = ["qwen3.5", "lfm2"]


@pytest.fixture
def cpu_path(monkeypatch):
    if load_library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    monkeypatch.setenv("PETIOLE_EXACT", "on")
    return "native"


def prompts(lengths=(1, 2, 3, 7, 20, 33, 150, 8)):
    random = np.random.default_rng(0)
    return [random.integers(3, 320, n).tolist() for n in lengths]


def trace(driver, sequences, chunk=0, steps=5):
    """Bits of the log-probabilities that lead to each sequence's tokens."""
    for sequence in sequences:
        while chunk and len(sequence.prompt) - sequence.length > chunk:
            driver.prefill([sequence], [sequence.length + chunk])
    outputs = [driver.prefill(sequences)] + [driver.decode(sequences) for _ in range(steps)]
    bits = [[o.top_logprobs[i].tobytes() for o in outputs] for i in range(len(sequences))]
    for sequence in sequences:
        driver.finish(sequence)
    return bits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "bfloat16"},
        {"weight_quantization": "int8"},
        {"dtype": "bfloat16", "weight_quantization": "int8"},
        {"weight_quantization": "int4"},
        {"dtype": "bfloat16", "weight_quantization": "int4", "head_quantization": "int4"},
        {"weight_quantization": "int4", "head_quantization": "int4", "activation_quantization": "int8"},
        {"kv_dtype": "fp8"},
        {"dtype": "bfloat16", "kv_dtype": "fp8"},
    ],
    ids=str,
)
def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(family, settings, checkpoint, open_runtime):
    driver = Driver(open_runtime(checkpoint(family)[0], **settings))
    alone = [trace(driver, [driver.sequence(p, ALL)])[0] for p in prompts()]
    together = trace(driver, [driver.sequence(p, ALL) for p in prompts()])
    assert together == alone


@pytest.mark.parametrize("processor", FEWER)
@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", *WITH_STATES])
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "weight_quantization": "int4"}], ids=str)
def test_a_sequence_gets_the_same_bits_on_a_processor_with_fewer_instructions(
    processor, family, settings, cpu_path, checkpoint, open_runtime, monkeypatch
):
    """Alone, in a batch and in chunks."""
    monkeypatch.setattr(stack, "load_library", lambda: kernels_for(processor))
    driver = Driver(open_runtime(checkpoint(family)[0], **settings))
    alone = [trace(driver, [driver.sequence(p, ALL)])[0] for p in prompts()]
    assert trace(driver, [driver.sequence(p, ALL) for p in prompts()]) == alone
    assert [trace(driver, [driver.sequence(p, ALL)], 5)[0] for p in prompts()] == alone


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_a_sequence_gets_the_same_bits_in_a_wide_model(quantization, cpu_path, open_runtime):
    """Sums of more terms than are added up in one go, and not a multiple of them."""
    with bench_checkpoint(Shape("wide", "bfloat16", 320, 288, 608, 2, 8, 2, 32)) as folder:
        driver = Driver(open_runtime(folder, dtype="bfloat16", weight_quantization=quantization))
        alone = [trace(driver, [driver.sequence(p, ALL)])[0] for p in prompts()]
        for chunk in (0, 70):
            assert [trace(driver, [driver.sequence(p, ALL)], chunk)[0] for p in prompts()] == alone
        assert trace(driver, [driver.sequence(p, ALL) for p in prompts()]) == alone


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_sequence_gets_the_same_bits_in_every_format(
    name,
    cpu_path,
    quantise,  # noqa: F811
    open_runtime,
    caplog,
):
    """Alone, in a batch, in chunks, and when it goes on from its own tokens as a prompt."""
    found = quantise("llama2", lambda _: name, FORMATS[name][1])
    with caplog.at_level("INFO", "petiole"):
        driver = Driver(open_runtime(found.folder))
    assert "compiled code computes all" in caplog.text
    alone = [trace(driver, [driver.sequence(p, ALL)])[0] for p in prompts()]
    assert trace(driver, [driver.sequence(p, ALL) for p in prompts()]) == alone
    assert [trace(driver, [driver.sequence(p, ALL)], 5)[0] for p in prompts()] == alone
    sequence = driver.sequence(prompts()[5], ALL)
    driver.prefill([sequence])
    driver.decode([sequence])
    resumed = driver.sequence(sequence.prompt + sequence.output, ALL)
    assert trace(driver, [resumed], steps=3)[0] == alone[5][2:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_gets_the_same_bits_in_a_share_of_a_large_batch(
    family, page_size, dtype, checkpoint, open_runtime
):
    lengths = [*range(1, 40), 130, 200, 240]
    cache = "radix" if page_size == 1 else "block"
    settings = {"dtype": dtype, "page_size": page_size, "prefix_cache": cache, "max_num_seqs": len(lengths)}
    runtime = open_runtime(checkpoint(family)[0], num_threads=3, **settings)
    driver = Driver(runtime)
    alone = [trace(driver, [driver.sequence(p, ALL)])[0] for p in prompts(lengths)]
    for order in (lengths, lengths[::-1], lengths[1::2] + lengths[::2]):
        at = [lengths.index(n) for n in order]
        together = trace(driver, [driver.sequence(prompts(lengths)[i], ALL) for i in at])
        assert together == [alone[i] for i in at]


@pytest.mark.parametrize("family", FAMILIES + WITH_STATES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_a_prompt_gets_the_same_bits_in_chunks(family, dtype, kv_dtype, checkpoint, open_runtime):
    driver = Driver(open_runtime(checkpoint(family)[0], dtype=dtype, kv_dtype=kv_dtype))
    whole = [trace(driver, [driver.sequence(p, ALL)])[0] for p in prompts()]
    for chunk in (1, 5, 64):
        assert [trace(driver, [driver.sequence(p, ALL)], chunk)[0] for p in prompts()] == whole


@pytest.mark.parametrize("family", WITH_STATES)
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "weight_quantization": "int4"}], ids=str)
def test_a_sequence_with_states_gets_the_same_bits_in_a_batch_when_it_resumes_and_behind_a_snapshot(
    family, settings, checkpoint, open_runtime
):
    driver = Driver(open_runtime(checkpoint(family)[0], **settings))
    alone = [trace(driver, [driver.sequence(p, ALL)])[0] for p in prompts()]
    assert trace(driver, [driver.sequence(p, ALL) for p in prompts()]) == alone
    sequence = driver.sequence(prompts()[5], ALL)
    driver.keep(sequence, 11)
    driver.prefill([sequence])
    driver.decode([sequence])
    resumed = driver.sequence(sequence.prompt + sequence.output, ALL)
    assert trace(driver, [resumed], steps=3)[0] == alone[5][2:]
    fork = driver.fork(sequence, sequence.prompt, 11)
    assert trace(driver, [fork])[0] == alone[5]


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "weight_quantization": "int4"},
        {"dtype": "bfloat16", "weight_quantization": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [(4, 11, 7), (900, 600, 1)], ids=["odd", "above every width"])
def test_a_sequence_with_an_adapter_gets_the_same_bits_alone_and_in_a_batch(
    ranks, settings, checkpoint, tmp_path, open_runtime
):
    runtime = open_runtime(checkpoint("qwen3")[0], lora_slots=3, lora_max_rank=max(ranks), **settings)
    for slot, rank in enumerate(ranks, 1):
        write_adapter(SHAPE, tmp_path / str(slot), rank=rank, seed=slot, spread=0.3)
        runtime.load_adapter(str(tmp_path / str(slot)), slot)
    driver = Driver(runtime)
    slots = [0, 1, 1, 2, 0, 3, 2, 1]
    alone = [
        trace(driver, [driver.sequence(p, ALL, adapter_slot=s)])[0] for p, s in zip(prompts(), slots, strict=True)
    ]
    together = trace(
        driver, [driver.sequence(p, ALL, adapter_slot=s) for p, s in zip(prompts(), slots, strict=True)]
    )
    assert together == alone
    assert len({bits[0] for bits in alone}) == len(alone)


def test_a_sequence_gets_the_same_bits_beside_others_that_must_not_end_yet(checkpoint, open_runtime):
    driver = Driver(open_runtime(checkpoint("qwen3")[0]))
    late = replace(ALL, min_tokens=3, stop_token_ids=range(0, 320, 2))
    samplings = [ALL, late, ALL, late, late, ALL, ALL, late]
    asked = list(zip(prompts(), samplings, strict=True))
    alone = [trace(driver, [driver.sequence(p, s)])[0] for p, s in asked]
    assert trace(driver, [driver.sequence(p, s) for p, s in asked]) == alone


def test_the_number_of_threads_changes_no_bit(checkpoint, open_runtime, monkeypatch):
    """Neither does which steps one thread computes."""
    before = torch.get_num_threads()
    try:
        traces = []
        for n_threads, small in ((1, 0), (2, 0), (2, 2**23), (2, 2**40)):
            monkeypatch.setattr(stack, "SMALL", small)
            driver = Driver(open_runtime(checkpoint("qwen3")[0], num_threads=n_threads))
            traces.append(trace(driver, [driver.sequence(p, ALL) for p in prompts()]))
        assert all(one == traces[0] for one in traces)
    finally:
        torch.set_num_threads(before)

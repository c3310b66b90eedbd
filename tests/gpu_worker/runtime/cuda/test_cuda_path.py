"""The CUDA path's plumbing (plans, page lists, padding, staging) gives the CPU path's tokens.

FlashInfer is replaced by its interface in torch, and decodes run without graphs; see `support`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types

import numpy as np
import pytest
import torch

from bench.harness.checkpoints.decoders import QWEN3_06B, config as shape_config
from bench.harness.driver import Driver
from petiole.cache import WindowPages
from petiole.contract.settings.engine import BATCHING, Batching
from petiole.gpu_worker import Engine, EngineConfig, Request
from petiole.gpu_worker.exceptions import MachineError, ModelError
from petiole.gpu_worker.models.families.registry import ARCHITECTURES, model_of
from petiole.gpu_worker.models.fast_paths import Support
from petiole.gpu_worker.models.loading import read_decoder
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.cuda import executor as cuda, graphs
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    DecodeWrappers,
    FlashInferKernels,
    Geometry,
    host_page_counts,
    new_workspace,
)
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture, eager
from petiole.gpu_worker.runtime.cuda.executor import batching_that_fits, require_flashinfer, working_bytes
from petiole.gpu_worker.runtime.cuda.fused import linear
from petiole.gpu_worker.runtime.cuda.graphs import Graphs
from petiole.gpu_worker.runtime.cuda.shapes import Shape, append_shapes, batch_ladder, token_ladder
from petiole.gpu_worker.runtime.cuda.simulated import SimulatedCard
from petiole.gpu_worker.runtime.interface import VALUES, RowBinding
from petiole.gpu_worker.runtime.memory.room import sampling_bytes
from petiole.gpu_worker.runtime.step.rows import RowStates
from petiole.gpu_worker.runtime.step.sampling import choose
from tests.gpu_worker.engine.test_prompt_logprobs import check as check_scores
from tests.gpu_worker.models.test_generation import MIN_TOKENS, N_TOKENS, PROMPTS, oracle, oracle_of_min_tokens
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support import fake_flashinfer
from tests.support.families import FAMILIES, NOT_ON_CUDA, WITH_LATENTS, WITH_STATES, build_model, write_adapter
from tests.support.plans import each_mixer
from tests.support.values import OWN, WithValues

PLAIN = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture
def cpu_path(monkeypatch):
    """The executor is replaced: what the CPU would have computed with makes no difference."""
    monkeypatch.setenv("PETIOLE_NATIVE", "off")


@pytest.fixture(params=[1, 16])
def open_cuda(request, open_runtime, monkeypatch, cpu_path):
    """A runtime on the CPU whose executor is the CUDA one."""
    fake_flashinfer.install(monkeypatch)

    def get(folder, **settings):
        settings = {"page_size": request.param, "prefix_cache": "off", "chunk_size": 32} | settings
        return fake_flashinfer.compute_as_on_cuda(open_runtime(folder, **settings))

    return get


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2-window", "qwen3"])
@pytest.mark.parametrize("chunk", [0, 4])
def test_a_greedy_generation_equals_that_of_transformers(family, chunk, checkpoint, open_cuda):
    folder, model = checkpoint(family)
    outputs = Driver(open_cuda(folder)).generate(PROMPTS, N_TOKENS, chunk=chunk, depth=2)
    assert outputs == [oracle(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("family", sorted(WITH_STATES.keys() - NOT_ON_CUDA))
def test_layers_with_a_state_generate_what_transformers_generates(family, chunk, checkpoint, open_cuda, replayed):
    folder, model = checkpoint(family)
    outputs = Driver(open_cuda(folder)).generate(PROMPTS, N_TOKENS, chunk=chunk, depth=2)
    assert outputs == [oracle(model, prompt) for prompt in PROMPTS]
    assert replayed


@pytest.mark.parametrize("family", sorted(WITH_STATES.keys() - NOT_ON_CUDA))
@pytest.mark.parametrize("settings", [{}, {"cuda_graphs": "off"}], ids=str)
def test_a_row_goes_on_behind_a_snapshot(family, settings, checkpoint, open_runtime, monkeypatch, cpu_path):
    fake_flashinfer.install(monkeypatch)
    folder, model = checkpoint(family)
    runtime = open_runtime(folder, **settings)
    driver, ids = Driver(fake_flashinfer.compute_as_on_cuda(runtime)), tokens(60)
    first, beside = driver.sequence(ids, ALL), driver.sequence(tokens(7, 5), ALL)
    for position in (1, 30, 59, 61):
        driver.keep(first, position)
    driver.prefill([beside])
    driver.prefill([first], [17])
    got = table(driver.finish_step(*driver.launch("mixed", [beside, first], [[-1], ids[17:]], [1, 1])))
    seen = [(beside.prompt + beside.output)[:8], ids]
    assert relative_error(got, np.array([reference(model, one)[-1] for one in seen])) < 1e-5
    driver.decode_many([beside, first], 3)
    for position in first.snapshots:
        known = (first.prompt + first.output)[:position]
        other = driver.fork(first, known + tokens(5, seed=position), position)
        got = table(driver.prefill([other]))
        assert relative_error(got, reference(model, other.prompt)[-1:]) < 1e-5


def test_long_rows_of_delta_nets_go_to_fla(checkpoint, open_runtime, monkeypatch, cpu_path):
    """Chunks of a prompt, one with a snapshot in it, beside a row that decodes. transformers takes it, too."""
    found, rule = [], fake_flashinfer.chunk_gated_delta_rule

    def counted(q, *more, **named):
        found.append(q.shape[1])
        return rule(q, *more, **named)

    folder, model = checkpoint("qwen3.5")
    with monkeypatch.context() as patched:
        patched.setenv("PETIOLE_EXACT", "off")
        patched.setenv("PETIOLE_UNTIMED", "chunks")
        patched.setattr(fake_flashinfer, "chunk_gated_delta_rule", counted)
        fake_flashinfer.install(patched)
        fake_flashinfer.install_fla(patched)
        driver = Driver(fake_flashinfer.compute_as_on_cuda(open_runtime(folder, cuda_graphs="off")))
        beside, long = driver.sequence(tokens(5), ALL), driver.sequence(tokens(200, 3), ALL)
        driver.keep(long, 150)
        driver.prefill([beside])
        driver.prefill([long], [80])
        step = driver.launch("mixed", [beside, long], [[-1], long.prompt[80:]], [1, 1])
        first = table(driver.finish_step(*step))
        other = driver.fork(long, [*long.prompt[:150], *tokens(5, 8)], 150)
        second = table(driver.prefill([other]))
    seen = [(beside.prompt + beside.output)[:6], long.prompt, other.prompt]
    expected = np.array([reference(model, one)[-1] for one in seen])
    assert relative_error(np.concatenate([first, second]), expected) < 2e-2
    layers = len(list(driver.runtime._decoder.plan.recurrent))
    assert found == [80] * layers + [70] * layers, "the 50 behind the snapshot are fewer than a chunk"


@pytest.mark.parametrize("sampling", MIN_TOKENS, ids=lambda sampling: sampling.min_tokens)
def test_min_tokens_are_those_of_transformers(sampling, checkpoint, open_cuda):
    """In captured steps of one size, beside rows that do not ask for them."""
    folder, model = checkpoint("qwen3")
    driver = Driver(open_cuda(folder, graph_batch_sizes=(4,)))
    bound, free = driver.sequence(PROMPTS[0], sampling), driver.sequence(PROMPTS[1])
    driver.prefill([bound, free])
    driver.decode_many([bound, free], N_TOKENS - 1)
    expected = oracle_of_min_tokens(model, PROMPTS[0], sampling)
    assert bound.output[: len(expected)] == expected
    assert free.output == oracle(model, PROMPTS[1])


@pytest.mark.parametrize("policy", ["pipelined", "mixed"])
def test_prompts_are_scored_in_captured_steps_and_in_others(policy, checkpoint, open_cuda, replayed):
    folder, model = checkpoint("qwen3")
    settings = {"prefill_policy": policy, "chunk_size": 16, "speculative_tokens": 2, "max_num_seqs": 8}
    runtime = open_cuda(folder, graph_batch_sizes=(4,), **settings)
    with Engine(dataclasses.replace(runtime.config, debug=True), runtime=runtime) as engine:
        plain = [Request(prompt=tokens(n, n), sampling=PLAIN) for n in (40, 3, 21, 1)]
        expected = [result.token_ids for result in engine.generate(plain)]
        scoring = dataclasses.replace(PLAIN, prompt_logprobs=2)
        scored = [dataclasses.replace(one, request_id="", sampling=scoring) for one in plain]
        results = engine.generate([*scored, *plain])
    assert [result.token_ids for result in results] == expected * 2
    assert replayed
    for result, request in zip(results, scored, strict=False):
        check_scores(result, request.prompt, model)


def test_sampling_is_warmed_up_with_the_types_that_steps_have(checkpoint, open_cuda, monkeypatch):
    """A kernel is compiled for its arguments' types: others would compile while somebody waits, or not at all."""
    seen = []

    def spy(logits, choice):
        if choice is not None:
            parts = (logits, *(getattr(choice, field.name) for field in dataclasses.fields(choice)))
            seen.append([part.dtype for part in parts])
        return choose(logits.float(), choice)

    monkeypatch.setattr(cuda, "choose", spy)
    monkeypatch.setattr("petiole.gpu_worker.runtime.cpu.platform.choose", spy)
    driver = Driver(open_cuda(checkpoint("qwen3")[0], dtype="bfloat16"))
    warmed_up, seen[:] = list(seen), []
    sampling = SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.1)
    driver.generate([tokens(5)], 2, sampling)
    driver.generate([tokens(5)], 2, dataclasses.replace(sampling, presence_penalty=0.5))
    assert [kind for kind, *_ in seen] == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert warmed_up == [seen[0], seen[2]] == [seen[1], seen[3]]


def test_logits_in_the_models_type_are_adjusted_in_float32(checkpoint, open_cuda, open_runtime, monkeypatch):
    """What changes them, and what reads their log-probabilities, does as it does for a CPU's."""
    seen = []

    def spy(logits, choice):
        seen.append(logits.dtype)
        return choose(logits.float(), choice)

    monkeypatch.setattr(cuda, "choose", spy)
    monkeypatch.setattr("petiole.gpu_worker.runtime.cpu.platform.choose", spy)
    bias = {"logit_bias": {5: 3.0}, "banned_token_ids": [7]}
    folder, outcomes = checkpoint("qwen3")[0], []
    for get, kind in ((open_runtime, torch.float32), (open_cuda, torch.bfloat16)):
        driver = Driver(get(folder, dtype="bfloat16"))
        seen.clear()
        sequence = driver.sequence(tokens(5), dataclasses.replace(ALL, repetition_penalty=1.2, **bias))
        outcomes.append(table(driver.prefill([sequence])))
        driver.prefill([driver.sequence(tokens(5))])
        assert seen == [torch.float32, kind]
    assert np.isneginf(outcomes[1][:, 7]).all()
    known = np.isfinite(outcomes[0])
    assert relative_error(outcomes[1][known], outcomes[0][known]) < 2e-2


@pytest.mark.parametrize("family", sorted(FAMILIES | WITH_LATENTS))
def test_every_family_in_chunks_and_in_captured_decodes(family, checkpoint, open_cuda):
    folder, model = checkpoint(family)
    runtime = open_cuda(folder, graph_batch_sizes=(2, 4))
    if family in FAMILIES:
        require_flashinfer(each_mixer(runtime._decoder.plan, head_dim=64))
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (4, 19, 33)]
    driver.prefill(sequences, [2, 9, 20])
    for step in (driver.prefill, driver.decode, driver.decode):
        got = table(step(sequences))
        expected = [reference(model, one.prompt + one.output[: len(one.output) - 1])[-1] for one in sequences]
        assert relative_error(got, np.array(expected)) < 1e-4


@pytest.mark.parametrize("heads", [5, 20])
def test_blocks_of_latent_attention_end_between_queries(heads, tmp_path, open_cuda):
    """Where they end inside one, FlashInfer refuses the plan."""
    model = build_model("deepseek-v3", num_attention_heads=heads, num_key_value_heads=heads)
    model.save_pretrained(tmp_path)
    driver = Driver(open_cuda(tmp_path, speculative_tokens=4, graph_batch_sizes=(2,)))
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (40, 21)]
    driver.prefill(sequences, [20, 9])
    driver.prefill(sequences)
    driver.decode(sequences)
    history = [one.prompt + one.output for one in sequences]
    got = table(driver.verify(sequences, [[7, 8, 9, 10], [11]]))
    expected = [reference(model, [*history[0], 7, 8, 9, 10])[-5:], reference(model, [*history[1], 11])[-2:]]
    assert relative_error(got, np.concatenate(expected)) < 1e-4


def test_latents_of_sizes_without_a_kernel_and_in_eight_bits_are_refused_by_name(checkpoint, open_runtime):
    runtime = open_runtime(checkpoint("deepseek-v2-lite")[0])
    decoder, card = runtime._decoder, SimulatedCard(2**40, lambda: 2**40)
    (mixer, *_) = decoder.plan.mixers
    for rank, turning, named in ((24, 64, "kv_lora_rank"), (512, 8, "qk_rope_head_dim")):
        latent = dataclasses.replace(mixer.latent, rank=rank)
        with pytest.raises(MachineError, match=f"{named}: must be a multiple of .* on CUDA"):
            card.require(each_mixer(decoder.plan, head_dim=rank + turning, latent=latent))
    card.require(each_mixer(decoder.plan, head_dim=576, latent=dataclasses.replace(mixer.latent, rank=512)))
    with pytest.raises(ValueError, match="kv_dtype: must be auto on CUDA"):
        card.decided(dataclasses.replace(runtime.config, kv_dtype="fp8"), decoder)


@pytest.mark.parametrize(("heads", "rows", "most"), [(128, 256, 15_616), (100, 256, 15_616), (16, 64, 128_000)])
def test_no_step_over_latents_is_larger_than_flashinfer_plans(checkpoint, open_runtime, heads, rows, most):
    """It plans 16,384 blocks of 128 queries; 100 heads are computed as 128."""
    runtime = open_runtime(checkpoint("deepseek-v2-lite")[0])
    card, config = SimulatedCard(2**60, lambda: 2**60), dataclasses.replace(runtime.config, max_num_seqs=rows)
    decoder = types.SimpleNamespace(
        plan=each_mixer(runtime._decoder.plan, heads=heads), dtype=torch.bfloat16, images=None
    )
    assert card.decided(dataclasses.replace(config, max_num_batched_tokens=most), decoder).max_num_seqs == rows
    limit = f"max_num_batched_tokens: must be at most {most} on CUDA.* with max_num_seqs {rows}, got {most + 1}"
    with pytest.raises(ValueError, match=limit):
        card.decided(dataclasses.replace(config, max_num_batched_tokens=most + 1), decoder)


def test_experts_without_a_kernel_are_computed_beside_padding(checkpoint, open_cuda, monkeypatch):
    """Three rows in a step for four, which nothing captures."""
    monkeypatch.setattr(FlashInferKernels, "mix_experts", lambda *_: None)
    folder, model = checkpoint("mixtral")
    driver = Driver(open_cuda(folder, graph_batch_sizes=(4,)))
    sequences = [driver.sequence(tokens(n, n), ALL) for n in (4, 19, 33)]
    driver.prefill(sequences)
    got = table(driver.decode(sequences))
    expected = [reference(model, one.prompt + one.output[:1])[-1] for one in sequences]
    assert relative_error(got, np.array(expected)) < 1e-4


def test_batches_between_the_sizes_of_the_ladder_and_above_it(checkpoint, open_cuda):
    folder, model = checkpoint("qwen3")
    runtime = open_cuda(folder, graph_batch_sizes=(2, 5))
    for n in (1, 2, 3, 5, 7):
        prompts = [tokens(3 + i, i) for i in range(n)]
        assert Driver(runtime).generate(prompts, 5) == [oracle(model, prompt, 5) for prompt in prompts]


def test_an_append_after_a_shared_prefix_and_a_verify(checkpoint, open_cuda):
    folder, model = checkpoint("qwen3")
    driver = Driver(open_cuda(folder, speculative_tokens=2))
    shared = tokens(32)
    first = driver.sequence([*shared, 9, 9], ALL)
    driver.prefill([first])
    second = driver.fork(first, [*shared, 7], 32)
    got = table(driver.prefill([second]))
    assert relative_error(got, reference(model, [*shared, 7])[-1:]) < 1e-4
    history = second.prompt + second.output
    got = table(driver.verify([second], [[40, 41]]))
    assert relative_error(got, reference(model, [*history, 40, 41])[-3:]) < 1e-4


@pytest.mark.parametrize("drafts", [0, 2], ids=["decode", "verify"])
def test_a_captured_step_takes_the_pages_of_rows_that_were_remapped(drafts, checkpoint, open_cuda, monkeypatch):
    """Many entries of the page table in a step that has room for as many as it has positions."""
    replayed, run = [], Graphs.run
    monkeypatch.setattr(
        Graphs,
        "run",
        lambda self, shape, i, *more: replayed.append(len(i.pages.rows)) or run(self, shape, i, *more),
    )
    folder, model = checkpoint("qwen3")
    driver = Driver(open_cuda(folder, speculative_tokens=drafts))
    one, two = (driver.sequence(tokens(40)) for _ in range(2))
    driver.prefill([one, two])
    driver.decode_many([one, two], 3)
    driver.remap(two, one, 32)
    driver.prefill([driver.sequence(tokens(32, 9))])  # gets the pages that are free now
    if drafts:
        driver.verify([one, two], [[1, 2], [1, 2]])
    driver.decode_many([one, two], 3)
    assert max(replayed) > 2 * (1 + drafts) or driver.runtime.limits.page_size > 1
    assert one.output == two.output == oracle(model, tokens(40), len(one.output))


@pytest.mark.parametrize("setting", [{}, {"frequency_penalty": 0.4}], ids=["plain", "penalised"])
def test_captured_verify_steps_give_the_tokens_of_plain_decoding(setting, checkpoint, open_cuda, monkeypatch):
    """Rows with all drafts, with some and with none, padded to a size of the ladder; right drafts and wrong. A
    row that is too short for padding has a step without."""
    replayed, run = [], Graphs.run
    monkeypatch.setattr(
        Graphs, "run", lambda self, shape, i, *more: replayed.append(shape.queries) or run(self, shape, i, *more)
    )
    runtime = open_cuda(checkpoint("qwen3")[0], speculative_tokens=3, graph_batch_sizes=(1, 4))
    sampling = SamplingParams(temperature=0.7, **setting)
    prompts, n = [tokens(3), tokens(21, 1), tokens(9, 2), tokens(16, 3)], 12
    plain = Driver(runtime).generate(prompts, n, sampling, seeds=range(4))
    driver = Driver(runtime)
    sequences = [driver.sequence(prompt, sampling, seed) for seed, prompt in enumerate(prompts)]
    driver.prefill(sequences)
    for wrong_at in (3, 0, 2, 1):
        replayed.clear()
        drafts = []
        for sequence, expected, k in zip(sequences, plain, (3, 2, 0, 1), strict=True):
            done = len(sequence.output)
            drafts.append(expected[done : done + k])
        for draft in drafts:
            draft[wrong_at:] = [(token + 1) % 320 for token in draft[wrong_at:]]
        accepted = driver.verify(sequences, drafts).accepted.tolist()
        assert accepted == [1 + min(len(d), wrong_at) for d in drafts]
        assert replayed == [4]
    assert [s.output for s in sequences] == [p[: len(s.output)] for p, s in zip(plain, sequences, strict=True)]
    short = driver.sequence(tokens(1))
    driver.prefill([short])
    replayed.clear()
    driver.verify([short], [[5]])
    assert replayed == [0]


@pytest.fixture
def replayed(monkeypatch):
    """The shapes of the captured steps that are replayed."""
    shapes, run = [], Graphs.run
    monkeypatch.setattr(Graphs, "run", lambda self, shape, *more: shapes.append(shape) or run(self, shape, *more))
    return shapes


@pytest.mark.parametrize("policy", ["pipelined", "mixed"])
def test_captured_prefills_and_mixed_steps_give_the_tokens_of_transformers(
    policy, checkpoint, open_cuda, replayed
):
    """Chunks, a prompt behind a cached prefix, decodes and a verification in steps of their own and together; what
    no graph has room for is launched."""
    folder, model = checkpoint("qwen3")
    settings = {"prefill_policy": policy, "chunk_size": 16, "speculative_tokens": 2, "max_num_seqs": 10}
    runtime = open_cuda(folder, graph_batch_sizes=(4,), **settings)
    driver, most = Driver(runtime), 26 if policy == "mixed" else 16
    prompts = [tokens(n, n) for n in (3, 40, 9, 1, 5)]
    first, long, *others = (driver.sequence(prompt) for prompt in prompts)
    driver.prefill([first, long], [3, 13])
    assert replayed == [Shape(8, 16)]
    step = driver.launch("mixed", [first, long], [[-1], long.prompt[13:25]], [1, 0])
    driver.finish_step(*step)
    right = oracle(model, first.prompt, 4)[2:]
    step = driver.launch("mixed", [first, *others], [[-1, *right], *(s.prompt for s in others)], [3, 1, 1, 1])
    output = driver.finish_step(*step)
    assert output.accepted.tolist() == [3, 1, 1, 1]
    assert replayed[1:] == [Shape(8, 16), *([Shape(8, 26)] if most == 26 else [])]
    assert len(replayed) == 2 + (most == 26), "15 rows and positions, then 18"
    replayed.clear()
    behind = driver.fork(long, [*long.prompt[:16], *tokens(9, 3)], 16)
    driver.prefill([long, behind], [40, 25])
    assert replayed == ([Shape(8, 26)] if most == 26 else [])
    sequences = [first, long, *others, behind]
    driver.decode_many(sequences, 6)
    for sequence in sequences:
        assert sequence.output == oracle(model, sequence.prompt, len(sequence.output))


def test_a_prompt_whose_prefix_has_more_pages_than_the_step_has_tokens(checkpoint, open_cuda, replayed):
    folder, model = checkpoint("qwen3")
    driver = Driver(open_cuda(folder, chunk_size=64))
    shared = tokens(160)
    first = driver.sequence([*shared, 9])
    driver.prefill([first])
    assert replayed == [], "no graph has so much room"
    second = driver.fork(first, [*shared, 7, 8], 160)
    driver.prefill([second])
    driver.decode_many([first, second], 4)
    assert replayed[0] == Shape(8, 16)
    for sequence in (first, second):
        assert sequence.output == oracle(model, sequence.prompt, 5)


def test_prefills_that_no_graph_knows_are_launched(checkpoint, open_cuda, tmp_path, replayed):
    """Adapters, and without graphs all of them."""
    folder, base = checkpoint("qwen3")
    model = write_adapter(base, tmp_path)
    runtime = open_cuda(folder, lora_slots=1, lora_max_rank=8)
    runtime.load_adapter(str(tmp_path), 1)
    driver = Driver(runtime)
    plain, adapted = driver.sequence(tokens(6), ALL), driver.sequence(tokens(6), ALL, adapter_slot=1)
    got = table(driver.prefill([plain, adapted]))
    expected = [reference(base, plain.prompt)[-1], reference(model, adapted.prompt)[-1]]
    assert relative_error(got, np.array(expected)) < 1e-4
    assert replayed == []
    driver = Driver(open_cuda(folder, cuda_graphs="off"))
    driver.prefill([driver.sequence(tokens(6))])
    assert replayed == []


def test_decodes_with_and_without_adapters(checkpoint, open_cuda, tmp_path):
    folder, base = checkpoint("qwen3")
    model = write_adapter(base, tmp_path)
    runtime = open_cuda(folder, lora_slots=1, lora_max_rank=8)
    runtime.load_adapter(str(tmp_path), 1)
    driver = Driver(runtime)
    plain, adapted = driver.sequence(tokens(6), ALL), driver.sequence(tokens(6), ALL, adapter_slot=1)
    driver.prefill([plain, adapted])
    got = table(driver.decode([plain, adapted]))
    expected = [
        reference(base, plain.prompt + plain.output[:-1])[-1],
        reference(model, adapted.prompt + adapted.output[:-1])[-1],
    ]
    assert relative_error(got, np.array(expected)) < 1e-4


@pytest.mark.parametrize("sizes", [(1, 4, 8), (1,)], ids=["captured", "eager"])
def test_values_beside_the_tokens(sizes, checkpoint, open_cuda, open_runtime, monkeypatch):
    """Coordinates, sizes and, beside them, text, which has none."""
    qwen3 = ARCHITECTURES["Qwen3ForCausalLM"]
    kind = dataclasses.replace(qwen3, read=lambda *found: WithValues(read_decoder(*found)))
    monkeypatch.setitem(ARCHITECTURES, "Qwen3ForCausalLM", kind)
    monkeypatch.setattr(cuda, "supports", lambda *_: Support(None))  # or nothing of it would be captured
    folder, found = checkpoint("qwen3")[0], []
    for get in (open_runtime, open_cuda):
        driver = Driver(get(folder, graph_batch_sizes=sizes))
        given = [SamplingParams(temperature=0.0, allowed_token_ids=[kind]) for kind in (5, 6, 7)]
        sequences = [driver.sequence(tokens(n, n), one) for n, one in zip((3, 9, 5), given, strict=True)]
        outputs = [np.where(OWN, driver.prefill(sequences).side_outputs[VALUES], 0)]
        outputs += [np.where(OWN, driver.decode(sequences).side_outputs[VALUES], 0) for _ in range(6)]
        found.append(outputs)
    assert np.abs(np.array(found[1]) - np.array(found[0])).max() <= 1, "a number may lie at an edge"
    changes = np.abs(np.diff(found[0], axis=0)).max(axis=0)
    assert ((changes > 50) == OWN).all(), "from step to step"


@pytest.mark.parametrize("ending", ["ends", "raises"])
def test_a_capture_that_fails_is_refused_by_its_cause_and_the_setting(ending, monkeypatch):
    """Torch raises at the end of a capture that became invalid, which would hide why it did."""

    class Capture(contextlib.nullcontext):
        def __exit__(self, *error):
            if ending == "raises":
                raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", types.SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: Capture())
    capture = cuda_capture(types.SimpleNamespace(synchronize=lambda: None, raw=None))

    def work():
        raise ValueError("it waits for the device")

    with pytest.raises(ModelError, match=r"ValueError: it waits for the device.*PETIOLE_CUDA_GRAPHS=off"):
        capture(work)


def test_captures_that_are_only_compared_leave_the_memory_of_the_others_alone(monkeypatch):
    pools = []

    def graph(graph, *, stream, pool, capture_error_mode):
        assert capture_error_mode == "thread_local", "other threads pin memory meanwhile"
        pools.append(pool)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: types.SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    capture = cuda_capture(types.SimpleNamespace(synchronize=lambda: None, raw=None))
    for kept in (True, False, True):
        capture(lambda: None, kept=kept)
    assert pools == [(0, 1), None, (0, 1)]


def test_what_is_compared_is_not_kept(checkpoint, open_cuda, monkeypatch):
    """Two ways for each size that fused products know; then each slot's graphs: three decodes, and prefills."""
    captured = []

    def capture(work, *, kept=True):
        captured.append(kept)
        return eager(work)

    monkeypatch.setattr(fake_flashinfer, "eager", capture)
    runtime = open_cuda(checkpoint("qwen3")[0], graph_batch_sizes=(1, 2, 4))
    n_prefills = len(append_shapes(runtime.config, runtime.limits.max_model_len))
    assert n_prefills > 0
    assert (captured.count(False), captured.count(True)) == (4, 2 * (3 + n_prefills))


@pytest.mark.parametrize("width", [32, 80, 96, 192])
def test_heads_that_the_kernels_would_compute_wrongly_are_refused(width, checkpoint, open_runtime, monkeypatch):
    fake_flashinfer.install(monkeypatch)
    model = open_runtime(checkpoint("qwen3")[0])._decoder.plan
    require_flashinfer(each_mixer(model, head_dim=128))
    with pytest.raises(ModelError, match=rf"64, 128, 256.*{width}"):
        require_flashinfer(each_mixer(model, head_dim=width))


def test_page_counts_of_rows():
    """Layers with a window read from the window of each row's first position on, or from its padding on."""
    cache = types.SimpleNamespace(page_size=4, tables=[0, 1], windows=[WindowPages(6, 9)])
    starts, queries, ends = np.array([[4, 0, 11, 30, 20], [1, 1, 1, 8, 9], [5, 1, 12, 38, 21]], np.int32)
    firsts, indptr, last = host_page_counts(cache, starts, queries, ends)
    assert firsts.tolist() == [[0] * 5, [0, 0, 1, 6, 3]]
    assert indptr.tolist() == [[0, 2, 3, 6, 16, 22], [0, 2, 3, 5, 9, 12]]
    assert last.tolist() == [1, 1, 4, 2, 1]


def test_the_ladder_ends_at_the_largest_batch():
    assert batch_ladder((), 1) == [1]
    assert batch_ladder((), 64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert batch_ladder((), 100)[-1] == 100
    assert batch_ladder((3, 500), 64) == [3, 64]


def test_prefills_are_captured_up_to_a_chunk_and_mixed_steps_with_all_decodes_beside_it():
    config = EngineConfig(max_num_seqs=20, chunk_size=200)
    assert token_ladder(config) == [16, 32, 64, 128, 200]
    assert token_ladder(dataclasses.replace(config, prefill_policy="mixed")) == [16, 32, 64, 128, 220]
    assert token_ladder(dataclasses.replace(config, chunk_size=8192))[-3:] == [256, 384, 512]
    assert token_ladder(dataclasses.replace(config, chunk_size=3)) == [3]
    few, many = (
        [Shape(8, n) for n in (16, 32, 64, 128, 200)],
        [Shape(min(20, n), n) for n in (16, 32, 64, 128, 200)],
    )
    shapes = append_shapes(config, 4096)
    assert shapes[::2] == few
    assert shapes[1::2] == many
    assert append_shapes(config, 10)[-1] == Shape(20, 200), "of ten positions each"
    assert Shape(8, 128) not in append_shapes(config, 10)


@pytest.mark.parametrize(("heads", "whole"), [(4, [False] * 4), (8, [False, False, True, True])])
def test_a_batch_that_fills_the_card_is_not_split_where_tensor_cores_attend(
    heads, whole, checkpoint, open_runtime, monkeypatch
):
    """Two blocks on each processor, one for each row and head of keys."""
    fake_flashinfer.install(monkeypatch)
    runtime = open_runtime(checkpoint("qwen3")[0])
    model = each_mixer(runtime._decoder.plan, heads=heads, kv_heads=2)
    geometry = Geometry(model, runtime._memory.cache, torch.float32)
    indices, workspace = [torch.zeros(8, dtype=torch.int32)], new_workspace(geometry.device)
    sizes = (1, fake_flashinfer.PROCESSORS - 1, fake_flashinfer.PROCESSORS, 8)
    found = [DecodeWrappers(geometry, size, workspace, indices).whole for size in sizes]
    assert [list(one.values()) for one in found] == [[one] for one in whole]


def test_working_memory_grows_with_the_batch(checkpoint, open_runtime):
    runtime = open_runtime(checkpoint("qwen3")[0])
    small, large = (
        working_bytes(dataclasses.replace(runtime.config, max_num_seqs=n), runtime._decoder.plan, 2)
        for n in (1, 256)
    )
    assert small < large < 4 * 2**30


def test_working_memory_has_room_for_the_states_of_rows_that_later_requests_allocate(checkpoint, open_runtime):
    config, model = (runtime := open_runtime(checkpoint("qwen3")[0])).config, runtime._decoder.plan
    states = RowStates(config.max_num_seqs + 1, model.vocab_size, torch.device("cpu"))
    sampling = SamplingParams(presence_penalty=1.0, logit_bias={1: 1.0})
    states.apply_bindings([RowBinding(1, sampling, 1, np.ones(1, np.int32), np.empty(0, np.int32))])
    allocated = sum(t.nbytes for t in (states._counts, states._seen, states._bias))
    assert allocated == (config.max_num_seqs + 1) * sampling_bytes(model)


@pytest.mark.parametrize("margin", [-1e9, 1.0])
def test_the_quicker_of_two_ways_to_compute_a_small_batch_is_taken_by_both_slots(
    margin, checkpoint, open_cuda, monkeypatch
):
    calls = []

    def forward(*given):
        calls.append(len(given[1]))
        return fake_flashinfer.forward(*given)

    monkeypatch.setattr(linear.decode, "forward", forward)
    monkeypatch.setattr(graphs, "MARGIN", margin)
    folder, model = checkpoint("qwen3")
    runtime = open_cuda(folder, graph_batch_sizes=(1, 2, 4))
    assert runtime._executor.fused == {1: margin < 0, 2: margin < 0}
    calls.clear()
    for n in (1, 2, 3):
        outputs = Driver(runtime).generate(PROMPTS[:n], N_TOKENS, depth=2)
        assert outputs == [oracle(model, prompt) for prompt in PROMPTS[:n]]
    assert set(calls) == ({1, 2} if margin < 0 else set())


@pytest.mark.parametrize("untimed", ["off", "rows"])
@pytest.mark.parametrize("family", ["qwen3", "starcoder2", "gemma2"])
def test_more_rows_and_more_families_wait_for_the_switch(family, untimed, checkpoint, open_cuda, monkeypatch):
    """Of the first family, the rows of today keep their products."""
    calls = []

    def forward(*given):
        calls.append(len(given[1]))
        return fake_flashinfer.split_k_forward(*given)

    monkeypatch.setenv("PETIOLE_UNTIMED", untimed)
    monkeypatch.setattr(linear.split_k, "forward", forward)
    monkeypatch.setattr(graphs, "MARGIN", -1e9)
    folder, model = checkpoint(family)
    runtime = open_cuda(folder, graph_batch_sizes=(1, 4, 8))
    known = {1} if family == "qwen3" else set()
    wanted = {1, 4} if untimed == "rows" else known
    assert runtime._executor.fused == dict.fromkeys(wanted, True)
    calls.clear()
    outputs = Driver(runtime).generate(PROMPTS[:3], N_TOKENS, depth=2)
    assert outputs == [oracle(model, prompt) for prompt in PROMPTS[:3]]
    assert set(calls) == ({4} if untimed == "rows" else set())


def test_without_a_compiler_for_other_kernels_the_usual_ones_serve(checkpoint, open_cuda, monkeypatch, caplog):
    def failing(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(linear.decode, "forward", failing)
    folder, model = checkpoint("qwen3")
    with caplog.at_level("WARNING"):
        runtime = open_cuda(folder, graph_batch_sizes=(1, 4))
    assert runtime._executor.fused == {1: False}
    assert "no such instruction" in caplog.text
    assert Driver(runtime).generate(PROMPTS[:1], N_TOKENS) == [oracle(model, PROMPTS[0])]


@pytest.mark.parametrize(
    ("gigabytes", "settings", "decided"),
    [
        (80, {}, Batching(256, 8192, 2048)),
        (8, {}, Batching(128, 4096, 1024)),
        (8, {"chunk_size": 700}, Batching(128, 4096, 700)),
        (8, {"max_num_seqs": 256}, Batching(256, 2048, 512)),
        (2, {}, Batching(64, 2048, 512)),
    ],
)
def test_defaults_leave_the_memory_to_the_kv_cache(gigabytes, settings, decided):
    """For the shape of Qwen3-0.6B."""
    model = model_of(shape_config(QWEN3_06B)).plan
    config = EngineConfig(max_model_len=4096, **settings)
    assert batching_that_fits(config, BATCHING["cuda"], model, 2, gigabytes * 2**30).batching == decided

"""On CUDA the same positions give the same logits however they were computed, up to what bfloat16 loses."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque

import numpy as np
import pytest
import torch

from bench.harness.driver import Driver
from petiole.gpu_worker.models.families.registry import ARCHITECTURES
from petiole.gpu_worker.models.fast_paths import Support
from petiole.gpu_worker.models.loading import read_decoder
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.cuda import executor as cuda, graphs as decode_graphs
from petiole.gpu_worker.runtime.cuda.fused.split import pieces as split
from petiole.gpu_worker.runtime.cuda.supported import CAPTURED
from petiole.gpu_worker.runtime.interface import PENDING, VALUES
from petiole.gpu_worker.runtime.step.noise import gumbel, noise_keys
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support.agreement import MIDDLE, agree, same_but_for_near_ties
from tests.support.families import FAMILIES, NOT_ON_CUDA, WITH_STATES, write_adapter
from tests.support.quantised import FORMATS, layers_in, quantised
from tests.support.values import OWN, WithValues

WINDOWED = {"mistral", "qwen2-window", "gpt-oss"}
"""Their attention is a kernel of its own, which takes a minute to compile where it is not there yet."""
PAGES = [{"page_size": 1}, {"page_size": 16, "prefix_cache": "off"}]


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=[pytest.mark.slow] * (f in WINDOWED)) for f in sorted(FAMILIES)],
)
@pytest.mark.parametrize("pages", PAGES, ids=["page1", "page16"])
def test_prefill_chunks_prefix_and_decode_agree_with_transformers(family, pages, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    driver = Driver(open_runtime(folder, speculative_tokens=7, **pages))
    ids = tokens(40)

    whole = driver.sequence(ids, ALL)
    agree(outputs_of_all(driver, whole), reference(model, ids), model)

    chunked = driver.sequence(ids, ALL)
    for end in (7, 30):
        driver.prefill([chunked], [end])
    agree(outputs_of_all(driver, chunked), reference(model, ids)[30:], model)

    appended = driver.fork(chunked, [*ids[:32], *tokens(8, 1)], 32)
    agree(outputs_of_all(driver, appended), reference(model, appended.prompt)[32:], model)

    decodes_agree(driver, model, [tokens(n, n) for n in (1, 5, 18, 33, 40)])


def outputs_of_all(driver, sequence):
    """[n, vocab] log-probabilities at each of the prompt's positions that are not cached yet, from one pass."""
    ids = sequence.prompt[sequence.length :]
    return table(driver.finish_step(*driver.launch("verify", [sequence], [ids], [len(ids)])))


def decodes_agree(driver, model, prompts):
    """A prefill and four decodes of all prompts, together."""
    sequences = [driver.sequence(prompt, ALL) for prompt in prompts]
    steps = [table(driver.prefill(sequences)), *(table(driver.decode(sequences)) for _ in range(4))]
    expected = [reference(model, s.prompt + s.output[:-1])[-len(steps) :] for s in sequences]
    agree(np.concatenate(np.stack(steps, axis=1)), np.concatenate(expected), model)


@pytest.mark.parametrize("family", sorted(WITH_STATES.keys() - NOT_ON_CUDA))
@pytest.mark.parametrize("graphs", ["on", "off"])
def test_layers_with_a_state_agree_with_transformers(family, graphs, checkpoint, open_runtime):
    """Prompts in chunks beside decodes, and after snapshots."""
    folder, model = checkpoint(family)
    driver, ids = Driver(open_runtime(folder, cuda_graphs=graphs)), tokens(60)
    first, beside = driver.sequence(ids, ALL), driver.sequence(tokens(7, 5), ALL)
    for position in (1, 30, 59, 61):
        driver.keep(first, position)
    driver.prefill([beside])
    driver.prefill([first], [17])
    got = table(driver.finish_step(*driver.launch("mixed", [beside, first], [[-1], ids[17:]], [1, 1])))
    seen = [(beside.prompt + beside.output)[:8], ids]
    agree(got, np.array([reference(model, one)[-1] for one in seen]), model)
    driver.decode_many([beside, first], 3)
    known = first.prompt + first.output
    others = [driver.fork(first, known[:at] + tokens(5, seed=at), at) for at in first.snapshots]
    got = [table(driver.prefill([other]))[0] for other in others]
    agree(got, [reference(model, other.prompt)[-1] for other in others], model)


@pytest.mark.parametrize("heads", [16, 20])
@pytest.mark.parametrize("pages", PAGES, ids=["page1", "page16"])
def test_attention_over_latents_agrees_with_transformers(heads, pages, checkpoint, open_runtime):
    """Of DeepSeek-V2-Lite's sizes, and with the heads of GLM-4.7-Flash, which do not divide a block: prompts in
    chunks, captured decodes, and drafts."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": 1}
    folder, model = checkpoint("deepseek-v3", **sizes, **of_heads, first_k_dense_replace=1)
    decodes_agree(Driver(open_runtime(folder, **pages)), model, [tokens(n, n) for n in (240, 3, 129, 30, 1)])
    driver = Driver(open_runtime(folder, speculative_tokens=4, **pages))
    sequence = driver.sequence(tokens(60), ALL)
    driver.prefill([sequence], [23])
    agree(outputs_of_all(driver, sequence), reference(model, sequence.prompt)[23:], model)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(32, 8, 128), (16, 8, 128), (5, 1, 64), (8, 1, 128)], ids=str
)
def test_captured_decodes_of_other_shapes(heads, kv_heads, width, checkpoint, open_runtime):
    """Queries that share a head of keys in fours, or in fives, take another kernel than those in twos; from 128
    positions on a row is split."""
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": width}
    folder, model = checkpoint("qwen3", **shape)
    for pages in PAGES:
        decodes_agree(Driver(open_runtime(folder, **pages)), model, [tokens(n, n) for n in (240, 3, 129, 30, 1)])


@pytest.mark.parametrize("graphs", ["on", "off"])
@pytest.mark.parametrize("pages", PAGES, ids=["page1", "page16"])
def test_decodes_beside_a_chunk_agree_with_transformers(pages, graphs, checkpoint, open_runtime):
    """In captured steps for few rows and for many, and in launched ones. The padding's values are undefined."""
    folder, model = checkpoint("qwen3")
    settings = {"prefill_policy": "mixed", "max_num_seqs": 20, "cuda_graphs": graphs}
    driver = Driver(open_runtime(folder, **settings, **pages))
    decoding = [driver.sequence(tokens(3 + 2 * i, i), ALL) for i in range(12)]
    driver.prefill(decoding)
    for length, n in ((30, 5), (100, 12)):
        prompt, beside = driver.sequence(tokens(length, length), ALL), decoding[:n]
        inputs = [*([PENDING] for _ in beside), prompt.prompt]
        step = driver.launch("mixed", [*beside, prompt], inputs, [1] * (n + 1))
        got = table(driver.finish_step(*step))
        sequences = [*beside, prompt]
        agree(got, np.array([reference(model, s.prompt + s.output[:-1])[-1] for s in sequences]), model)


def test_a_captured_decode_that_fills_the_card(checkpoint, open_runtime):
    """With so many rows none is split among blocks, and nothing is merged."""
    shape = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    folder, model = checkpoint("qwen3", **shape)
    driver = Driver(open_runtime(folder, max_num_seqs=64, graph_batch_sizes=(64,)))
    decodes_agree(driver, model, [tokens(3 + 3 * n, n) for n in range(40)])


@pytest.mark.parametrize("pages", PAGES, ids=["page1", "page16"])
@pytest.mark.parametrize("heads", [16, 32])
def test_a_captured_decode_whose_rows_are_cut_along_their_keys(
    heads, pages, checkpoint, open_runtime, monkeypatch
):
    """Into at most four pieces. A verification of few drafts, too."""
    monkeypatch.setenv("PETIOLE_UNTIMED", "split")
    monkeypatch.setattr(split, "PIECE", split.TILE)
    shape = {"num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128}
    folder, model = checkpoint("qwen3", **shape)
    settings = {"max_num_seqs": 64, "graph_batch_sizes": (64,), "speculative_tokens": 2}
    driver = Driver(open_runtime(folder, **settings, **pages))
    decodes_agree(driver, model, [tokens(3 + 6 * n, n) for n in range(40)])
    sequence = driver.sequence(tokens(200), ALL)
    driver.prefill([sequence])
    history = [*sequence.prompt, *sequence.output, 7, 8]
    agree(table(driver.verify([sequence], [[7, 8]])), reference(model, history)[-3:], model)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_small_batches_by_fused_products(family, checkpoint, open_runtime, monkeypatch):
    """Taken although they may be slower here. Qwen2 has biases, Qwen3 norms of heads."""
    monkeypatch.setattr(decode_graphs, "MARGIN", float("-inf"))
    folder, model = checkpoint(family, hidden_size=256, intermediate_size=768)
    runtime = open_runtime(folder, max_num_seqs=20, graph_batch_sizes=(1, 4, 16, 20))
    assert runtime._executor.fused == {1: True, 4: True, 16: True}
    for n in (1, 3, 13, 20):
        decodes_agree(Driver(runtime), model, [tokens(3 + 7 * i, i) for i in range(n)])
    prompts = [tokens(n, n) for n in (3, 9, 30)]
    for together, prompt in zip(decoded(runtime, prompts), prompts, strict=True):
        same_but_for_near_ties(together, decoded(runtime, [prompt])[0])


@pytest.mark.parametrize("family", ["qwen3", "starcoder2", "phi2", "gemma2", "olmo2", "granite"])
def test_more_rows_and_more_families_by_products_in_shares(family, checkpoint, open_runtime, monkeypatch):
    """Which no card has timed; taken although they may be slower here."""
    monkeypatch.setenv("PETIOLE_UNTIMED", "rows")
    monkeypatch.setattr(decode_graphs, "MARGIN", float("-inf"))
    folder, model = checkpoint(family, hidden_size=256, intermediate_size=768)
    runtime = open_runtime(folder, max_num_seqs=64, graph_batch_sizes=(1, 16, 64))
    assert {1, 16, 64} <= {n for n, fused in runtime._executor.fused.items() if fused}
    for n in (1, 13, 40):
        decodes_agree(Driver(runtime), model, [tokens(3 + 3 * i, i) for i in range(n)])


def decoded(runtime, prompts):
    """For each prompt its tokens with all their log-probabilities. Each prompt has a prefill of its own: a product
    of more rows at once adds up in another order, as the head's does here for one row and for four."""
    driver = Driver(runtime)
    sequences = [driver.sequence(prompt, ALL) for prompt in prompts]
    steps = [np.concatenate([table(driver.prefill([sequence])) for sequence in sequences])]
    steps += [table(driver.decode(sequences)) for _ in range(40)]
    tables = np.stack(steps, axis=1)
    return [list(zip(s.output, rows, strict=True)) for s, rows in zip(sequences, tables, strict=True)]


def test_a_pool_that_32_bits_cannot_index(checkpoint, open_runtime):
    folder, model = checkpoint("qwen3")
    n_pages = 2**31 // (model.config.num_key_value_heads * model.config.head_dim) + 4096
    driver = Driver(open_runtime(folder, num_pages=n_pages))
    driver._free = deque(range(n_pages - 2048, n_pages))
    decodes_agree(driver, model, [tokens(n, n) for n in (30, 3, 18)])


def test_two_steps_in_flight_give_the_tokens_of_one(checkpoint, open_runtime):
    runtime = open_runtime(checkpoint("qwen3")[0])
    prompts = [tokens(n, n) for n in (3, 9, 30, 12, 5)]
    alone = Driver(runtime).generate(prompts, 60, depth=1)
    assert Driver(runtime).generate(prompts, 60, depth=2) == alone


@pytest.mark.parametrize("pages", PAGES, ids=["page1", "page16"])
def test_a_host_far_ahead_of_the_device_overwrites_nothing(pages, checkpoint, open_runtime):
    """Everything of a step is enqueued while the device still sleeps: pinned buffers, plans, pages, tokens."""
    runtime = open_runtime(checkpoint("qwen3")[0], **pages)
    prompts = [tokens(n, n) for n in (3, 9, 30, 12, 5)]
    sampling = SamplingParams(temperature=0.8, top_p=0.9)
    settings = {"seeds": range(5), "chunk": 8}
    alone = Driver(runtime).generate(prompts, 30, sampling, depth=1, **settings)
    launch_forward = runtime.launch_forward

    def launch_late(slot_id, batch):
        with torch.cuda.stream(runtime._stream.raw):
            torch.cuda._sleep(4_000_000)
        launch_forward(slot_id, batch)

    runtime.launch_forward = launch_late
    assert Driver(runtime).generate(prompts, 30, sampling, depth=2, **settings) == alone


def test_every_batch_size_between_and_above_the_captured_ones(checkpoint, open_runtime):
    folder, model = checkpoint("qwen3")
    runtime = open_runtime(folder, graph_batch_sizes=(2, 5))
    for n in range(1, 9):
        driver = Driver(runtime)
        sequences = [driver.sequence(tokens(4 + i, i), ALL) for i in range(n)]
        driver.prefill(sequences)
        got = table(driver.decode(sequences))
        agree(got, [reference(model, s.prompt + s.output[:-1])[-1] for s in sequences], model)


def test_decodes_without_graphs_give_the_same_logits(checkpoint, open_runtime):
    found = []
    for graphs in ("on", "off"):
        driver = Driver(open_runtime(checkpoint("qwen3")[0], cuda_graphs=graphs))
        sequences = [driver.sequence(tokens(n, n), ALL) for n in (3, 9, 30, 12, 5)]
        driver.prefill(sequences)
        found.append([table(driver.decode(sequences)) for _ in range(4)])
    error = relative_error(np.array(found[1]), np.array(found[0]))
    assert error < MIDDLE / 2


@pytest.mark.parametrize(
    "setting",
    [{"frequency_penalty": 0.3}, {"min_tokens": 5, "stop_token_ids": tuple(range(0, 320, 2))}],
    ids=["penalised", "min_tokens"],
)
def test_a_verify_accepts_what_decoding_would_have_drawn(setting, checkpoint, open_runtime):
    """By other kernels, so that what two candidates compete for may go to the other one: mostly it does not."""
    runtime = open_runtime(checkpoint("qwen3")[0], speculative_tokens=3)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, **setting)
    accepted = []
    for seed in range(8):
        plain = Driver(runtime).generate([tokens(9)], 8, sampling, seeds=[seed])[0]
        assert not set(plain[: sampling.min_tokens]).intersection(sampling.stop_token_ids)
        driver = Driver(runtime)
        sequence = driver.sequence(tokens(9), sampling, seed)
        driver.prefill([sequence])
        wrong = (plain[3] + 1) % 320
        (n,) = driver.verify([sequence], [[plain[1], plain[2], wrong]]).accepted.tolist()
        accepted.append(n if sequence.output == plain[: n + 1] else 0)
    assert accepted.count(3) > 4, accepted


def test_noise_is_the_same_on_both_devices():
    keys = torch.from_numpy(noise_keys(np.arange(9, dtype=np.uint64), np.arange(9)))
    ids = torch.arange(4096, dtype=torch.int32)
    assert torch.allclose(gumbel(keys, ids), gumbel(keys.cuda(), ids.cuda()).cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 5, 64])
def test_a_linear_map_in_eight_bits(n):
    from petiole.gpu_worker.models.weights.linear import Fp8Linear, quantize_fp8
    from petiole.gpu_worker.runtime.cuda.fused.layers import quantize_rows

    x = torch.randn(n, 512, device="cuda", dtype=torch.bfloat16)
    weight, bias = (
        torch.randn(768, 512, device="cuda") * 0.05,
        torch.randn(768, device="cuda", dtype=torch.bfloat16),
    )
    values, scale = quantize_fp8(weight)
    got = Fp8Linear(values, scale[None, :], quantize_rows, bias)(x)
    error = relative_error(got.float().cpu(), (x.float() @ weight.T + bias).cpu())
    assert error < 0.05


def test_adapters_share_a_captured_batch_with_rows_that_have_none(checkpoint, open_runtime, tmp_path):
    folder, base = checkpoint("qwen3")
    model = write_adapter(base, tmp_path, spread=0.2)
    runtime = open_runtime(folder, lora_slots=2, lora_max_rank=8)
    runtime.load_adapter(str(tmp_path), 2)
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(9), ALL, adapter_slot=slot) for slot in (0, 2, 1)]
    driver.prefill(sequences)
    got = table(driver.decode(sequences))
    models = (base, model, base)
    for m, s, row in zip(models, sequences, got, strict=True):
        agree(row[None], reference(m, s.prompt + s.output[:-1])[-1:], m)


@pytest.mark.parametrize(
    ("family", "most", "setting"),
    [
        ("qwen3", 0.15, {"weight_quantization": "fp8"}),
        ("qwen3", 0.3, {"weight_quantization": "int4", "head_quantization": "int4"}),
        ("mixtral", 0.3, {"weight_quantization": "fp8"}),
        ("mixtral", 0.3, {"weight_quantization": "int4"}),
        pytest.param("qwen3", 0.15, {"kv_dtype": "fp8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_options_of_fewer_bits_stay_close(family, most, setting, checkpoint, open_runtime):
    folder, model = checkpoint(family)
    runtime = open_runtime(folder, **setting)
    assert cuda.supports(runtime._decoder, CAPTURED, cuda.CAPTURED_PARTS).reason is None, "captured"
    driver = Driver(runtime)
    sequence = driver.sequence(tokens(30), ALL)
    driver.prefill([sequence])
    got = table(driver.decode([sequence]))
    error = relative_error(got, reference(model, sequence.prompt + sequence.output[:-1])[-1:])
    assert error < most


@pytest.mark.parametrize("name", ["ct mxfp4", "ct nvfp4", "ct w4 channels, zeros", "ct int8", "ct fp8"])
def test_quantised_checkpoints_are_captured(name, checkpoint, open_runtime, tmp_path):
    """A prompt whose weights are widened once, and steps of one row and of four."""
    found = quantised(*checkpoint("qwen3"), tmp_path / "model", layers_in(name), FORMATS[name][1])
    runtime = open_runtime(found.folder, graph_batch_sizes=(1, 4))
    assert cuda.supports(runtime._decoder, CAPTURED, cuda.CAPTURED_PARTS).reason is None, "captured"
    driver = Driver(runtime)
    long, alone = driver.sequence(tokens(200), ALL), driver.sequence(tokens(9, 2), ALL)
    agree(table(driver.prefill([long])), reference(found.model, long.prompt)[-1:], found.model)
    decodes_agree(driver, found.model, [tokens(n, n) for n in (1, 5, 18)])
    driver.prefill([alone])
    agree(table(driver.decode([alone])), reference(found.model, alone.prompt + alone.output[:1])[-1:], found.model)


def test_padding_takes_no_expert(checkpoint, open_runtime):
    """A step of three rows is captured for four."""
    runtime = open_runtime(checkpoint("mixtral")[0], graph_batch_sizes=(4,))
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(9, n)) for n in range(3)]
    driver.prefill(sequences)
    before = [layer.experts.taken.clone() for layer in runtime._decoder.layers]
    driver.decode(sequences)
    chosen = [layer.experts.router.chosen for layer in runtime._decoder.plan.layers]
    after = [layer.experts.taken for layer in runtime._decoder.layers]
    assert [int((b - a).sum()) for a, b in zip(before, after, strict=True)] == [3 * n for n in chosen]


def test_the_pool_takes_the_memory_it_is_given(checkpoint, open_runtime):
    runtime = open_runtime(checkpoint("qwen3")[0], num_pages=0, gpu_memory_utilization=0.5, max_num_seqs=4096)
    free, total = torch.cuda.mem_get_info()
    assert free >= 0.45 * total
    assert runtime.limits.n_pages > 100_000


def test_captured_graphs_compute_with_what_a_reload_brings(checkpoint, open_runtime, tmp_path):
    folder, model = checkpoint("qwen3")
    runtime = open_runtime(folder)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.embed_tokens.weight.neg_()
    other.to(torch.bfloat16).save_pretrained(tmp_path)
    place = runtime._decoder.embedding.data_ptr()
    for where, expected in ((tmp_path, other.float()), (folder, model)):
        runtime.prepare_reload(str(where))()
        driver = Driver(runtime)
        sequence = driver.sequence(tokens(12), ALL)
        driver.prefill([sequence])
        got = table(driver.decode([sequence]))
        agree(got, reference(expected, sequence.prompt + sequence.output[:-1])[-1:], expected)
    assert runtime._decoder.embedding.data_ptr() == place


@pytest.mark.parametrize("sizes", [(1, 4, 8), (1,)], ids=["captured", "eager"])
def test_values_beside_the_tokens_are_those_of_the_cpu(sizes, checkpoint, open_runtime, monkeypatch):
    """Every token is given, so that what is compared depends on the numbers alone. Each step reads what the one
    before it decoded, so that roundings add up; wrong numbers differ by as much as they change."""
    qwen3 = ARCHITECTURES["Qwen3ForCausalLM"]
    kind = dataclasses.replace(qwen3, read=lambda *found: WithValues(read_decoder(*found)))
    monkeypatch.setitem(ARCHITECTURES, "Qwen3ForCausalLM", kind)
    monkeypatch.setattr(cuda, "supports", lambda *_: Support(None))  # or nothing of it would be captured
    folder, found = checkpoint("qwen3")[0], []
    for device in ("cpu", "cuda"):
        driver = Driver(open_runtime(folder, device=device, graph_batch_sizes=sizes))
        given = [SamplingParams(temperature=0, allowed_token_ids=[kind]) for kind in (5, 6, 7)]
        sequences = [driver.sequence(tokens(n, n), one) for n, one in zip((3, 9, 5), given, strict=True)]
        outputs = [np.where(OWN, driver.prefill(sequences).side_outputs[VALUES], 0)]
        outputs += [np.where(OWN, driver.decode(sequences).side_outputs[VALUES], 0) for _ in range(6)]
        found.append(outputs)
    assert relative_error(np.array(found[1]), np.array(found[0])) < 10 * MIDDLE
    changes = np.abs(np.diff(found[0], axis=0)).max(axis=0)
    assert ((changes > 50) == OWN).all(), "from step to step"


def test_kv_that_was_copied_comes_back_bit_by_bit(checkpoint, open_runtime):
    folder, _ = checkpoint("qwen3")
    runtime = open_runtime(folder, kv_tier="any")
    copies, cache = runtime.kv_copies, runtime._memory.cache
    copies.make_ring(2, 8)
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
    before = [pool.cpu() for pool in (*cache.keys, *cache.values)]
    copy = copies.to_host(np.arange(20, 28))
    staged = copies.staging(8 * copies.position_bytes)
    np.asarray(staged)[:] = copy.wait()
    copies.from_host(np.arange(40, 43), staged, 2)
    runtime.synchronize()
    for pool, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(pool[40:43].cpu(), old[22:25])
        assert torch.equal(pool[:40].cpu(), old[:40])

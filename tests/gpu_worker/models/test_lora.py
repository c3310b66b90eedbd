"""Adapters of PEFT, named row by row in one batch, give what PEFT gives."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.harness.driver import Driver
from petiole.gpu_worker import ModelError, SamplingParams
from petiole.gpu_worker.exceptions import AdapterError
from petiole.gpu_worker.models.adapters.lora import AdaptedModel, AdapterBank, read_adapter
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.models.loading import LoadOptions, load_model
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.forward import native_decoder
from petiole.gpu_worker.runtime.memory.kv import new_kv_cache
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support.families import MIXTURES, WITH_LATENTS, by_family, write_adapter
from tests.support.moondream import PROMPT, write_adapter_of_moondream, write_model
from tests.support.plans import each_feed_forward, each_mixer

KINDS = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "everything": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": "all-linear"},
    "mlp": {"r": 2, "lora_alpha": 6, "target_modules": ["gate_proj", "down_proj"]},
}


@pytest.fixture(scope="session")
def adapters(checkpoint, tmp_path_factory):
    """{kind: (folder, PEFT's model)} over one checkpoint."""
    _, base = checkpoint("qwen3")
    made = {}
    for seed, (kind, settings) in enumerate(KINDS.items()):
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = (folder, write_adapter(base, folder, seed=seed, **settings))
    return made


def open_with_adapters(checkpoint, adapters, open_runtime, **settings):
    runtime = open_runtime(checkpoint("qwen3")[0], lora_slots=3, lora_max_rank=8, **settings)
    for slot, (folder, _) in enumerate(adapters.values(), start=1):
        runtime.load_adapter(str(folder), slot)
    return runtime


def test_rows_with_different_adapters_and_none_share_a_batch(checkpoint, adapters, open_runtime):
    driver = Driver(open_with_adapters(checkpoint, adapters, open_runtime))
    models = [checkpoint("qwen3")[1], *(model for _, model in adapters.values()), adapters["mlp"][1]]
    slots = [0, 1, 2, 3, 3]
    sequences = [driver.sequence(tokens(5 + 3 * i, i), ALL, adapter_slot=s) for i, s in enumerate(slots)]
    for step in (driver.prefill, driver.decode, driver.decode):
        output = step(sequences)
        expected = [
            reference(model, s.prompt + s.output[: len(s.output) - 1])[-1]
            for model, s in zip(models, sequences, strict=True)
        ]
        assert relative_error(table(output), np.array(expected)) < 1e-4


def test_a_chunked_prefill_with_an_adapter(checkpoint, adapters, open_runtime):
    driver = Driver(open_with_adapters(checkpoint, adapters, open_runtime))
    sequence = driver.sequence(tokens(20), ALL, adapter_slot=2)
    driver.prefill([sequence], [8])
    got = table(driver.prefill([sequence]))
    assert relative_error(got, reference(adapters["everything"][1], tokens(20))[-1:]) < 1e-4


def test_a_slot_forgets_the_adapter_that_was_in_it(checkpoint, adapters, open_runtime):
    runtime = open_with_adapters(checkpoint, adapters, open_runtime)
    runtime.load_adapter(str(adapters["mlp"][0]), 2)
    driver = Driver(runtime)
    got = table(driver.prefill([driver.sequence(tokens(9), ALL, adapter_slot=2)]))
    assert relative_error(got, reference(adapters["mlp"][1], tokens(9))[-1:]) < 1e-4


def test_an_adapter_that_does_not_fit_is_refused_with_one_line(checkpoint, adapters, open_runtime, tmp_path):
    runtime = open_with_adapters(checkpoint, adapters, open_runtime)

    def refused(adapter, slot=1):
        with pytest.raises(AdapterError) as caught:
            runtime.load_adapter(str(adapter), slot)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "adapter_config.json" in refused(tmp_path)
    assert "slot must be 1 to 3" in refused(adapters["mlp"][0], slot=4)
    settings = json.loads((adapters["mlp"][0] / "adapter_config.json").read_text())
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(settings | {"r": 64}))
    assert "rank must be 1 to 8" in refused(tmp_path)
    config.write_text(json.dumps(settings | {"use_dora": True}))
    assert "use_dora" in refused(tmp_path)
    config.write_text(json.dumps(settings))
    assert "missing" in refused(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x10")
    assert "truncated" in refused(tmp_path)


def test_an_engine_without_slots_says_so(checkpoint, adapters, open_runtime):
    with pytest.raises(AdapterError, match="lora_slots is 0"):
        open_runtime(checkpoint("qwen3")[0]).load_adapter(str(adapters["mlp"][0]), 1)


class Recorder(TorchDispatchMode):
    """Counts operations by name, and copies from the host to the device."""

    def __init__(self):
        super().__init__()
        self.calls, self.uploads = Counter(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls[function.overloadpacket.__name__] += 1
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        self.uploads += {t.device.type for t in tensors} == {"cpu", "meta"}
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_one_copy_to_the_device_and_two_operations_there(kind, checkpoint, adapters, open_runtime):
    model = AdaptedModel(find_model(checkpoint("qwen3")[0]).plan)
    adapter = read_adapter(kind, adapters[kind][0], model, 8, torch.bfloat16)
    bank = AdapterBank(model, 2, 8, torch.bfloat16, torch.device("meta"))
    with Recorder() as recorder:
        bank.put(adapter, 2)
    assert recorder.uploads == 1
    assert recorder.calls["_foreach_zero_"] == recorder.calls["_foreach_copy_"] == 1
    assert all(tensor.dtype == torch.bfloat16 for pair in adapter.weights.values() for tensor in pair)


ATTENTION = r".*\.self_attn\.(q|k|v|o)_proj"  # PEFT takes other names for those of experts
PRODUCTS = r".*\.(self_attn|mlp)\.(q|k|v|o|qkv|gate|up|gate_up|down)_proj"
LATENT = r".*\.self_attn\.(q_proj|q_a_proj|kv_a_proj_with_mqa|o_proj)"
NAMES = {
    "lfm2": r".*\.(self_attn\.(q|k|v|out)_proj|feed_forward\.w[123])",
    "gpt2": r".*\.(c_attn|c_proj|c_fc)",
    "nemotron-h": r".*\.mixer\.(q|k|v|o|up|down)_proj",
    **dict.fromkeys(sorted(WITH_LATENTS), LATENT),
    "nemotron-h-moe": r".*\.(shared_experts\.|mixer\.)(q|k|v|o|up|down)_proj",
}


@pytest.mark.parametrize("module", ["q_b_proj", "kv_b_proj"])
def test_products_inside_the_space_of_latents_are_refused_by_name(module, checkpoint, open_runtime, tmp_path):
    folder, base = checkpoint("deepseek-v3")
    write_adapter(base, tmp_path, r=4, target_modules=[module])
    runtime = open_runtime(folder, lora_slots=1, lora_max_rank=4)
    with pytest.raises(
        AdapterError, match=rf"{module}.* fits nothing in this model .known: q_a_proj, kv_a_proj_with_mqa, o_proj"
    ):
        runtime.load_adapter(str(tmp_path), 1)


@pytest.mark.parametrize("family", by_family())
def test_every_family_takes_adapters_on_attention_and_mlp(family, checkpoint, open_runtime, tmp_path):
    folder, base = checkpoint(family)
    targets = NAMES.get(family, ATTENTION if family in MIXTURES else PRODUCTS)
    adapted = write_adapter(base, tmp_path, r=4, lora_alpha=8, target_modules=targets)
    runtime = open_runtime(folder, lora_slots=1, lora_max_rank=4)
    runtime.load_adapter(str(tmp_path), 1)
    driver = Driver(runtime)
    plain, mine = (driver.sequence(tokens(12), ALL, adapter_slot=slot) for slot in (0, 1))
    driver.prefill([plain, mine], [5, 5])
    for step in (driver.prefill, driver.decode):
        got = table(step([plain, mine]))
        expected = [
            reference(model, one.prompt + one.output[: len(one.output) - 1])[-1]
            for model, one in ((base, plain), (adapted, mine))
        ]
        assert relative_error(got, np.array(expected)) < 1e-4
    assert relative_error(expected[0], expected[1]) > 1e-2


def test_an_adapter_that_changes_experts_is_refused_by_name(checkpoint, tmp_path):
    folder, base = checkpoint("mixtral")
    write_adapter(base, tmp_path, r=4, target_modules=["q_proj"])
    weights = tmp_path / "adapter_model.safetensors"
    renamed = {
        key.replace("self_attn.q_proj", "block_sparse_moe.experts.1.w1"): tensor
        for key, tensor in load_file(weights).items()
    }
    save_file(renamed, weights)
    model = find_model(folder)
    with pytest.raises(AdapterError, match=r"experts\.1\.w1.* changes experts, which adapters cannot \(known: q_"):
        read_adapter("mine", tmp_path, AdaptedModel(model.plan, model.names), 8)


@pytest.mark.parametrize(
    ("patterns", "refused"),
    [({r".*\.gate_up_proj": 8}, False), ({"q_proj": 8}, True), ({r".*\.(q|k)_proj": 8}, True), ({}, False)],
)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_ranks_of_single_modules_are_refused_if_the_adapter_has_such_modules(
    key, patterns, refused, checkpoint, tmp_path
):
    folder, base = checkpoint("qwen3")
    write_adapter(base, tmp_path, r=4, target_modules=["q_proj"])
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {key: patterns}))
    model = AdaptedModel(find_model(folder).plan)
    if refused:
        with pytest.raises(AdapterError, match=f"{key} is not supported"):
            read_adapter("mine", tmp_path, model, 8)
    else:
        assert read_adapter("mine", tmp_path, model, 8).rank == 4


def test_moondream_takes_adapters_on_its_fused_products(tmp_path, open_runtime):
    write_adapter_of_moondream(tmp_path / "adapter", tmp_path / "merged")
    plain = write_model(tmp_path)
    prompt, found = [0, *PROMPT, 9, 8, 7], {}
    for name, model, slot in (("adapted", plain, 1), ("plain", plain, 0), ("merged", tmp_path / "merged", 0)):
        runtime = open_runtime(model, lora_slots=1, lora_max_rank=4)
        if slot:
            runtime.load_adapter(str(tmp_path / "adapter"), slot)
        driver = Driver(runtime)
        sequence = driver.sequence(prompt, SamplingParams(temperature=0.0, logprobs=512), adapter_slot=slot)
        driver.prefill([sequence], [4])
        output = driver.prefill([sequence])
        found[name] = output.top_logprobs[0][np.argsort(output.top_ids[0])]
    assert relative_error(found["adapted"], found["merged"]) < 1e-4
    assert relative_error(found["plain"], found["merged"]) > 0.1


CHANGES = {
    "another inner size": lambda plan: each_feed_forward(plan, inner=48),
    "other heads": lambda plan: each_mixer(plan, heads=2),
    "other heads of keys": lambda plan: each_mixer(plan, kv_heads=4),
    "another width": lambda plan: dataclasses.replace(plan, hidden_size=32),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("n", [1, 40], ids=["decode", "prefill"])
@pytest.mark.skipif(load_library() is None, reason="no C compiler")
def test_compiled_code_refuses_adapters_of_other_sizes_and_writes_nothing(change, n, checkpoint):
    folder, _ = checkpoint("qwen3")
    model = find_model(folder)
    plan = model.plan
    decoder = load_model(folder, model, LoadOptions(torch.device("cpu"), torch.float32, 65))
    cache = new_kv_cache(
        plan, n_pages=65, page_size=1, rows=2, max_model_len=64, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.table[0] = torch.arange(1, 65)
    bank = AdapterBank(AdaptedModel(CHANGES[change](plan)), 1, 4, torch.float32, torch.device("cpu"))
    native = native_decoder(decoder, cache, bank)
    step = torch.arange(n) + 5, torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.arange(n)
    plain = native.forward(0, *step).clone()
    before = [one.clone() for one in cache.keys]
    with pytest.raises(ModelError, match="must have the sizes of the model's linear layers"):
        native.forward(0, *step, np.ones(n, np.int32))
    assert all(map(torch.equal, cache.keys, before))
    assert torch.equal(native.forward(0, *step), plain)

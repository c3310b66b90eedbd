"""A checkpoint is found, checked and read; what is wrong with it is said in one line."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.driver import Driver
from petiole.gpu_worker import Engine, EngineConfig, Request
from petiole.gpu_worker.engine.loading import warm_up
from petiole.gpu_worker.exceptions import EngineError, ModelError
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.models.checkpoint.identity import fingerprint
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.device.device import DeviceError
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support.families import build_model


@pytest.fixture
def folder(checkpoint, tmp_path):
    """A copy of a checkpoint to spoil."""
    return shutil.copytree(checkpoint("qwen3")[0], tmp_path / "model")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(open_runtime, folder, **settings):
    with pytest.raises(ModelError) as caught:
        open_runtime(folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_missing_folder(open_runtime, tmp_path):
    assert "does not exist" in refused(open_runtime, tmp_path / "nowhere")


def test_a_hub_id_that_the_hub_does_not_give(open_runtime, monkeypatch):
    def no_hub(*_, **__):
        raise OSError("no connection\nand a second line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", no_hub)
    message = refused(open_runtime, "somebody/something", revision="v2")
    assert "somebody/something@v2" in message
    assert "no connection" in message


def test_a_hub_id_is_resolved_with_its_revision(monkeypatch, tmp_path):
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **more: asked.update(more, name=name) or str(tmp_path)
    )
    assert resolve_model("somebody/something", "v2") == tmp_path
    assert (asked["name"], asked["revision"]) == ("somebody/something", "v2")


def test_an_empty_folder(open_runtime, tmp_path):
    assert "config.json" in refused(open_runtime, tmp_path)


def test_an_unknown_architecture_is_refused_with_the_nearest_known_one(open_runtime, folder):
    edit(folder, architectures=["PhantomForCausalLM"])
    message = refused(open_runtime, folder)
    assert "architecture PhantomForCausalLM is not supported, the nearest that is: " in message
    assert message.endswith("ForCausalLM; docs/models.md has all")
    assert len(message.removeprefix(str(folder))) <= 300


def test_formats_of_weights_that_are_not_read_are_refused_by_name(open_runtime, folder):
    edit(folder, quantization_config={"quant_method": "phantom"})
    assert "quant_method must be one of compressed-tensors, fp8," in refused(open_runtime, folder)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("model-q4.gguf", b"GGUF", "model-q4.gguf is truncated: 4 bytes end within its header"),
        ("model-q4.gguf", b"GGML", "model-q4.gguf is not a GGUF file"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid", "is a Git-LFS pointer"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\noid", "run `git lfs pull` in"),
    ],
)
def test_a_format_that_is_not_read_is_named(open_runtime, tmp_path, file, content, said):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(content)
    message = refused(open_runtime, tmp_path)
    assert said in message
    assert str(tmp_path) in message


def test_a_file_is_no_folder(open_runtime, tmp_path):
    (tmp_path / "m.bin").write_bytes(b"GGUF")
    assert "m.bin is a file: PETIOLE_MODEL must be a folder" in refused(open_runtime, tmp_path / "m.bin")


def test_an_unknown_rope_type(open_runtime, folder):
    edit(folder, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    assert "got 'spiral'" in refused(open_runtime, folder)


def test_a_missing_field_has_the_default_of_its_class(open_runtime, folder):
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "embed_tokens.weight must have shape [151936, 64], got [320, 64]" in refused(open_runtime, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "got chunked_attention"),
        ({"layer_types": ["full_attention"]}, "for 3 layers, got 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide 4 heads, got 3"),
        ({"num_attention_heads": "four"}, "num_attention_heads must be a whole number from 1 to .*, got 'four'"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number from 1 to 16777216, got 'many'"),
        ({"vocab_size": -1}, "vocab_size must be .*, got -1"),
        ({"hidden_size": 2**40}, "hidden_size must be .* to 1048576, got 1099511627776"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be .* to 10000, got 1000000000"),
        ({"num_key_value_heads": -2}, "num_key_value_heads must be .*, got -2"),
        ({"head_dim": 31}, "head_dim must be even, .* got 31"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings must be .* got 1000000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number .* got nan"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}},
            "rope_theta must be .* got inf",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1e9}}, "scaled context must be at most 16777216"),
        ({"eos_token_id": 2**31}, "config.json: eos_token_id must be .* to 16777215, got 2147483648"),
        ({"eos_token_id": [2, -1]}, "eos_token_id must be .* got -1"),
        ({"architectures": 5}, "architecture 5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"all layers, got .'full_attention'",
        ),
        ({"rope_parameters": {"rope_type": "linear", "factor": None}}, "lacks 'factor'"),
    ],
    ids=str,
)
def test_a_configuration_that_would_give_other_logits_is_refused(changes, message, open_runtime, folder):
    edit(folder, **changes)
    assert re.search(message, refused(open_runtime, folder))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_that_want_a_scale_are_refused(dtype, open_runtime, folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {name: weights[name].to(dtype)}, path)
    assert f"tensor {name}_scale is missing: the checkpoint has {name}" in refused(open_runtime, folder)


@pytest.mark.parametrize("head", ["the embedding again", "one of its own"])
def test_a_head_beside_a_tied_embedding_is_what_transformers_makes_of_it(head, open_runtime, checkpoint, tmp_path):
    model = copy.deepcopy(checkpoint("qwen3")[1])
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    own = weights["model.embed_tokens.weight"].clone()
    if head == "one of its own":
        own = own.flip(0).contiguous()
        model.lm_head.weight = torch.nn.Parameter(own)
    save_file(weights | {"lm_head.weight": own}, path)
    runtime = open_runtime(tmp_path)
    assert relative_error(table(logits_of(runtime)), reference(model, tokens(9))[-1:]) < 1e-4
    shared = runtime._decoder.head.weight.data_ptr() == runtime._decoder.embedding.data_ptr()
    assert shared == (head == "the embedding again") or not isinstance(runtime._decoder.head, DenseLinear)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_configuration_without_a_type_has_that_of_the_weights(dtype, open_runtime, checkpoint, tmp_path):
    model = copy.deepcopy(checkpoint("qwen3")[1]).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    edit(tmp_path, dtype=None, torch_dtype=None)
    assert open_runtime(tmp_path, dtype="auto")._decoder.dtype == getattr(torch, dtype)


def test_a_missing_head_is_not_the_embedding(open_runtime, folder):
    edit(folder, tie_word_embeddings=False)
    assert "no tensor lm_head.weight" in refused(open_runtime, folder)


def test_a_whole_file_goes_before_an_index_of_shards(open_runtime, folder):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    logits_of(open_runtime(folder))


def test_yarn_reaches_as_far_as_it_stretches(open_runtime, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("qwen2-yarn")[0], tmp_path / "model")
    edit(folder, max_position_embeddings=64)
    assert open_runtime(folder).limits.max_model_len == 256


@pytest.mark.parametrize(
    ("more", "longest"),
    [({}, 160), ({"original_max_position_embeddings": 48}, 120), ({"original_max_position_embeddings": 8}, 64)],
    ids=["named before", "named behind", "shorter"],
)
def test_linear_scaling_permits_as_much_as_it_stretches(more, longest, open_runtime, tmp_path):
    """The default stays what the configuration names."""
    rope = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5, **more}
    model = build_model("llama2", max_position_embeddings=64, rope_parameters=rope)
    model.save_pretrained(tmp_path)
    edit(tmp_path, rope_parameters=rope)
    assert open_runtime(tmp_path).limits.max_model_len == 64
    assert f"must be at most {longest}" in refused(open_runtime, tmp_path, max_model_len=longest + 1)
    runtime = open_runtime(tmp_path, max_model_len=longest)
    assert runtime.limits.max_model_len == longest
    driver, ids = Driver(runtime), tokens(longest - 2)
    sequence = driver.sequence(ids, ALL)
    driver.prefill([sequence], [longest - 20])
    got = [table(driver.prefill([sequence])), table(driver.decode([sequence]))]
    expected = reference(model, ids + sequence.output[:1])[-2:]
    assert relative_error(np.concatenate(got), expected) < 1e-4


def strip_prefix(folder):
    path = folder / "model.safetensors"
    weights = {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}
    save_file(weights, path)


@pytest.mark.parametrize("family", ["qwen3", "llama2", "llama-biases"])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_tensors_may_lack_their_prefix(family, quantization, open_runtime, checkpoint, tmp_path):
    """Of a tied head, of one of its own, and with biases; a model with the prefix can replace one without."""
    folder, _ = checkpoint(family)
    bare = shutil.copytree(folder, tmp_path / "bare")
    strip_prefix(bare)
    with_prefix, without = (open_runtime(f, weight_quantization=quantization) for f in (folder, bare))
    expected = table(logits_of(with_prefix))
    assert np.array_equal(table(logits_of(without)), expected)
    without.prepare_reload(str(folder))()
    assert np.array_equal(table(logits_of(without)), expected)
    assert fingerprint(bare) != fingerprint(folder)


def test_without_the_prefix_too_what_is_missing_is_refused_by_its_name(open_runtime, checkpoint, tmp_path):
    bare = shutil.copytree(checkpoint("llama2")[0], tmp_path / "bare")
    strip_prefix(bare)
    weights = load_file(bare / "model.safetensors")
    for missing in ("lm_head.weight", "layers.1.mlp.up_proj.weight", "norm.weight", "embed_tokens.weight"):
        save_file({n: w for n, w in weights.items() if n != missing}, bare / "model.safetensors")
        assert f"has no tensor {'model.' * (missing == 'embed_tokens.weight')}{missing}" in refused(
            open_runtime, bare
        )


@pytest.mark.parametrize("keep", [0, 5, 100, -1000])
def test_truncated_weights(open_runtime, folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    message = refused(open_runtime, folder)
    assert "truncated" in message or "cannot be read" in message


def header_of(path):
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_header(path, text, data):
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header[NORM].update(shape=[64.0]), r"model.norm.weight'.*shape must be .* got \[64.0\]"),
        (lambda header: header[NORM].update(shape=[-64]), r"shape must be .* got \[-64\]"),
        (lambda header: header[NORM].update(shape=[1] * 10**5), r"shape must be at most 8 whole numbers"),
        (lambda header: header[NORM].update(data_offsets=[256, 0]), r"data_offsets must be two .* got \[256, 0\]"),
        (lambda header: header[NORM].update(data_offsets=[0, 2**70]), "data_offsets must be two whole numbers"),
        (
            lambda header: header[NORM].update(
                data_offsets=header["model.layers.0.input_layernorm.weight"]["data_offsets"]
            ),
            "data_offsets of .* overlap by",
        ),
        (lambda header: header.update({NORM: 5}), "model.norm.weight"),
    ],
)
def test_a_header_that_cannot_be_is_refused_by_its_tensor(change, message, open_runtime, folder):
    header, data = header_of(folder / "model.safetensors")
    change(header)
    write_header(folder / "model.safetensors", json.dumps(header).encode(), data)
    refusal = refused(open_runtime, folder)
    assert "model.safetensors has a damaged header" in refusal
    assert re.search(message, refusal)
    assert len(refusal) < 600


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_json_that_is_nested_without_end_is_refused(name, open_runtime, folder):
    deep = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    if name == "model.safetensors":
        write_header(folder / name, deep, b"")
    else:
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(deep)
    message = refused(open_runtime, folder)
    assert f"{folder / name}" in message
    assert "nested too deep" in message


def test_an_index_names_files_of_its_folder_alone(open_runtime, folder):
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    index = {"weight_map": {NORM: "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "weight_map must be inside the model's folder" in refused(open_runtime, folder)


def test_a_size_that_only_the_configuration_claims_is_refused_before_memory_is_asked_for(
    open_runtime, folder, monkeypatch
):
    edit(folder, intermediate_size=2**21, hidden_size=2**20)
    monkeypatch.setattr(torch, "empty", _never_so_large(torch.empty))
    assert "model.embed_tokens.weight must have shape" in refused(open_runtime, folder)


def _never_so_large(empty):
    def checked(shape, **options):
        assert math.prod(shape) < 2**28 or options["device"].type == "meta", shape
        return empty(shape, **options)

    return checked


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_that_are_no_numbers_are_refused(value, quantization, open_runtime, folder):
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    save_file(weights, path)
    message = refused(open_runtime, folder, weight_quantization=quantization)
    assert "model.layers.1.mlp.down_proj.weight must have finite numbers" in message


def test_weights_whose_logits_are_no_numbers_are_refused(open_runtime, folder):
    """Each of them is finite, and what is computed from them is not."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, tensor in weights.items():
        if "proj" in name:
            tensor.copy_(torch.where(tensor > 0, 1e30, -1e30))
    save_file(weights, path)
    runtime = open_runtime(folder)
    with pytest.raises(ModelError, match="its logits must be finite numbers, got"):
        warm_up(runtime)


def test_no_weights(open_runtime, folder):
    (folder / "model.safetensors").unlink()
    assert "neither" in refused(open_runtime, folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pickle" in refused(open_runtime, folder)


def test_weights_of_another_shape(open_runtime, folder):
    edit(folder, intermediate_size=128)
    assert "must have shape" in refused(open_runtime, folder)


def test_a_missing_tensor(open_runtime, folder):
    edit(folder, num_hidden_layers=4, layer_types=None)
    assert "no tensor model.layers.3" in refused(open_runtime, folder)


def test_a_missing_shard(open_runtime, checkpoint, tmp_path):
    checkpoint("qwen3")[1].save_pretrained(tmp_path, max_shard_size="100KB")
    next(tmp_path.glob("model-00002*")).unlink()
    assert "is missing" in refused(open_runtime, tmp_path)


def test_shards_read_like_one_file_and_have_its_fingerprint(open_runtime, checkpoint, tmp_path):
    folder, model = checkpoint("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    driver = Driver(open_runtime(tmp_path))
    got = table(driver.prefill([driver.sequence(tokens(9), ALL)]))
    assert relative_error(got, reference(model, tokens(9))[-1:]) < 1e-4
    assert fingerprint(tmp_path) == fingerprint(folder)


def test_other_weights_have_another_fingerprint(checkpoint, tmp_path):
    folder, model = checkpoint("qwen3")
    with torch.no_grad():
        model.model.norm.weight[0] += 1
        model.save_pretrained(tmp_path)
        model.model.norm.weight[0] -= 1
    assert fingerprint(tmp_path) != fingerprint(folder)


def test_a_model_of_another_shape_cannot_replace_a_running_one(open_runtime, checkpoint):
    runtime = open_runtime(checkpoint("qwen3")[0])
    with pytest.raises(ModelError, match="another shape"):
        runtime.prepare_reload(str(checkpoint("llama2")[0]))()


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_reload_serves_the_new_weights_from_where_the_old_ones_lay(
    quantization, open_runtime, checkpoint, tmp_path
):
    folder, model = checkpoint("qwen3")
    runtime = open_runtime(folder, weight_quantization=quantization)
    before, places = runtime.limits.fingerprint, addresses(runtime._decoder)
    logits_of(runtime)
    old = weakref.ref(runtime._executor)
    with torch.no_grad():
        model.model.embed_tokens.weight.neg_()
        expected = reference(model, tokens(9))[-1:]
        model.save_pretrained(tmp_path)
        model.model.embed_tokens.weight.neg_()
    signs = []
    runtime.prepare_reload(str(tmp_path))(lambda: signs.append(True))
    assert len(signs) >= model.config.num_hidden_layers, "it shows progress while it reads"
    assert old() is None, "its graphs and buffers are given back"
    got = table(logits_of(runtime))
    assert relative_error(got, expected) < (1e-4 if quantization == "none" else 0.05)
    assert runtime.limits.fingerprint != before
    assert addresses(runtime._decoder) == places
    fresh = open_runtime(tmp_path, weight_quantization=quantization)
    assert np.array_equal(table(logits_of(fresh)), got)


def logits_of(runtime):
    driver = Driver(runtime)
    return driver.prefill([driver.sequence(tokens(9), ALL)])


def addresses(decoder):
    layer = decoder.layers[-1]
    return [
        t.data_ptr()
        for t in (decoder.embedding, decoder.tables[0], layer.mixer.qkv.weight, layer.feed_forward.down.weight)
    ]


@pytest.mark.parametrize("damage", ["a tensor is missing", "a tensor has another shape", "the file is truncated"])
def test_a_damaged_checkpoint_leaves_the_old_weights_serving(damage, open_runtime, checkpoint, folder):
    runtime = open_runtime(checkpoint("qwen3")[0])
    before = table(logits_of(runtime))
    path = folder / "model.safetensors"
    if damage == "the file is truncated":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        weights = load_file(path)
        last = weights.pop("model.norm.weight")
        if damage == "a tensor has another shape":
            weights["model.norm.weight"] = last[:-1].clone()
        save_file(weights, path)
    with pytest.raises(ModelError):
        runtime.prepare_reload(str(folder))()
    assert np.array_equal(table(logits_of(runtime)), before)


def test_a_reload_that_breaks_half_way_fails_what_comes_next(open_runtime, checkpoint, monkeypatch):
    folder = checkpoint("qwen3")[0]
    runtime = open_runtime(folder)

    def breaks(*found):
        raise OSError("the disk is gone")

    monkeypatch.setattr(runtime._reader, "read", breaks)
    with pytest.raises(OSError, match="disk"):
        runtime.prepare_reload(str(folder))()
    with pytest.raises(DeviceError, match="weights were lost"):
        logits_of(runtime)


def test_an_engine_that_has_failed_may_be_shut_down_at_once(open_runtime, checkpoint, monkeypatch):
    runtime = open_runtime(checkpoint("qwen3")[0])
    engine = Engine(runtime.config, runtime=runtime)
    engine.on_fatal = lambda error: engine.shutdown()
    engine.start()
    monkeypatch.setattr(runtime, "_executor", None)
    with pytest.raises(EngineError, match="the engine has failed"):
        engine.submit(Request(prompt=[1, 2, 3])).result(timeout=30)
    engine._thread.join(timeout=30)
    assert not engine._thread.is_alive()


@pytest.mark.parametrize("family", ["qwen3", "llama2", "llama-biases"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_weights_stay_close(family, dtype, open_runtime, checkpoint):
    folder, model = checkpoint(family)
    runtime = open_runtime(folder, dtype=dtype, weight_quantization="int8")
    assert runtime._decoder.head.weight.dtype == torch.int8
    driver = Driver(runtime)
    got = table(driver.prefill([driver.sequence(tokens(20), ALL)]))
    assert relative_error(got, reference(model, tokens(20))[-1:]) < 0.05


def test_float16_weights(open_runtime, checkpoint):
    folder, model = checkpoint("qwen3")
    driver = Driver(open_runtime(folder, dtype="float16"))
    got = table(driver.prefill([driver.sequence(tokens(20), ALL)]))
    assert relative_error(got, reference(model, tokens(20))[-1:]) < 2e-2


def test_limits_come_from_the_checkpoint_and_the_settings(open_runtime, checkpoint):
    limits = open_runtime(checkpoint("qwen3")[0], max_num_seqs=5, num_pages=99, max_model_len=100).limits
    assert (limits.max_batch_size, limits.n_pages, limits.max_model_len, limits.vocab_size) == (6, 99, 100, 320)
    assert limits.eos_token_ids == {2}


def test_more_context_than_the_model_has_is_refused(open_runtime, checkpoint):
    assert "must be at most 256" in refused(open_runtime, checkpoint("qwen3")[0], max_model_len=257)


_PEAK = """
import resource, sys
import torch
from petiole.gpu_worker.models.loading import LoadOptions
from petiole.gpu_worker.models.loading import load_model
from petiole.gpu_worker.models.families.registry import find_model
from pathlib import Path
folder = Path(sys.argv[1])
found = find_model(folder)
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
torch.zeros(1).bfloat16() @ torch.zeros(1, 1).bfloat16()
before = peak()
options = LoadOptions(torch.device("cpu"), torch.bfloat16, 64)
decoder = load_model(folder, found, options)
print(peak() - before)
"""


def test_what_the_memory_cannot_hold_is_refused_in_a_line(monkeypatch):
    monkeypatch.setattr("petiole.gpu_worker.runtime.cpu.platform.host_memory_left", lambda: 10**18)
    with pytest.raises(ModelError, match=r"^it does not fit into memory: .*can't allocate memory.* \d{12,} bytes"):
        Engine(EngineConfig(device="cpu", num_pages=2**31 - 1))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_never_holds_the_weights_twice(tmp_path):
    """At most 1.15 times the weights in peak host memory, the mapped file's pages included."""
    from safetensors.torch import save_file

    hidden, inner, vocab, layers = 1024, 4096, 4096, 4
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        at = f"model.layers.{i}."
        weights |= {at + n + ".weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        weights |= {at + f"self_attn.{n}_proj.weight": (hidden, hidden) for n in "qkvo"}
        weights |= {at + f"mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        weights[at + "mlp.down_proj.weight"] = (hidden, inner)
    tensors = {n: torch.ones(shape, dtype=torch.bfloat16) for n, shape in weights.items()}
    size = sum(t.nbytes for t in tensors.values())
    save_file(tensors, tmp_path / "model.safetensors")
    out = subprocess.run([sys.executable, "-c", _PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(out.stdout) <= 1.15 * size, f"{int(out.stdout) / size:.2f} times the weights"

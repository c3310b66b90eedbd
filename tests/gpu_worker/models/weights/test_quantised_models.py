"""Whole models from quantised checkpoints compute what transformers computes with the dequantised weights."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.driver import Driver
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.identity import fingerprint
from petiole.gpu_worker.models.weights.description import form_name
from petiole.gpu_worker.models.weights.linear import DenseLinear, JoinedLinear
from petiole.gpu_worker.models.weights.quantized import CodedLinear
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support.families import build_model, write_adapter
from tests.support.quantised import FORMATS, Choose, Quantised, layers_in, quantised


@pytest.fixture
def quantise(checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> Callable[..., Quantised]:
    """quantise(family, format of each layer, config) -> the checkpoint, and its model."""

    def get(family: str, choose: Choose, config: dict[str, Any]) -> Quantised:
        return quantised(*checkpoint(family), tmp_path / family, choose, config)

    return get


def check(open_runtime: Any, found: Quantised) -> Any:
    """The runtime, whose logits are those of the model of transformers."""
    runtime = open_runtime(found.folder)
    driver = Driver(runtime)
    sequence = driver.sequence(tokens(40), ALL)
    driver.prefill([sequence], [33])
    assert relative_error(table(driver.prefill([sequence])), reference(found.model, tokens(40))[-1:]) < 1e-4
    return runtime


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("family", ["qwen3", "llama2"])
def test_logits_are_those_of_the_dequantised_model(
    open_runtime: Any, quantise: Any, caplog: pytest.LogCaptureFixture, family: str, name: str
) -> None:
    with caplog.at_level(logging.INFO, "petiole"):
        found = quantise(family, layers_in(name), FORMATS[name][1])
        runtime = check(open_runtime, found)
    assert "quantised layers: 21 in " in caplog.text
    layer = runtime._decoder.layers[0]
    linears = layer.mixer.qkv, layer.mixer.out, layer.feed_forward.gate_up, layer.feed_forward.down
    assert [type(linear) for linear in linears] == [CodedLinear] * 4
    assert type(runtime._decoder.head) is DenseLinear
    assert runtime.limits.computing.weight_format.split(", ") == [
        form_name(layer.mixer.qkv.weight.form),
        "float32",
    ]
    weights = sum(file.stat().st_size for file in found.folder.glob("*.safetensors"))
    assert 0.6 < runtime.limits.computing.weight_bytes / weights < 1.6


@pytest.mark.parametrize("name", ["gptq 4 v1", "ct nvfp4", "fp8 blocks"])
def test_a_quantised_head(open_runtime: Any, quantise: Any, name: str) -> None:
    """Tied in config.json or not."""
    for family in ("qwen3", "llama2"):
        found = quantise(family, lambda _: name, FORMATS[name][1])
        assert type(check(open_runtime, found)._decoder.head) is CodedLinear


@pytest.mark.parametrize("name", ["gptq 4 v1", "ct nvfp4", "fp8 blocks"])
def test_products_with_latents_are_widened(open_runtime: Any, tmp_path: Path, name: str) -> None:
    model = build_model("deepseek-v3", kv_lora_rank=64, q_lora_rank=64, v_head_dim=32, qk_rope_head_dim=16)
    model.save_pretrained(plain := tmp_path / "plain")
    runtime = check(
        open_runtime,
        quantised(plain, model, tmp_path / name, lambda at: name if "attn" in at else None, FORMATS[name][1]),
    )
    mixer = runtime._decoder.layers[0].mixer
    assert [type(one) for one in (mixer.qkv, mixer.latent.queries, mixer.latent.keys)] == [
        CodedLinear,
        CodedLinear,
        DenseLinear,
    ]


def test_layers_of_several_formats(open_runtime: Any, quantise: Any) -> None:
    """Queries and keys of one product differ, values and a whole layer are plain, one product has a part of floats
    beside integers of eight bits."""
    formats = {"q_proj": "ct w4 groups", "k_proj": "ct w4 channels, zeros", "v_proj": None, "up_proj": "ct int8"}

    def choose(name: str) -> str | None:
        head_or_last = name.startswith(("lm_head", "model.layers.2"))
        return None if head_or_last else formats.get(name.rpartition(".")[2], "ct nvfp4")

    config = {"quant_method": "compressed-tensors", "ignore": ["re:.*nonsense"]}
    runtime = check(open_runtime, quantise("qwen2", choose, config))
    first, last = runtime._decoder.layers[0], runtime._decoder.layers[-1]
    assert [type(part) for part in first.mixer.qkv.parts] == [CodedLinear, CodedLinear, DenseLinear]
    assert type(first.feed_forward.gate_up) is JoinedLinear
    assert type(last.mixer.qkv) is DenseLinear


def test_integers_of_several_forms_are_one_product(open_runtime: Any, quantise: Any) -> None:
    """Of four and eight bits, with groups and without, with zeros and without, in eight bits."""
    formats = {
        "q_proj": "ct w4 groups",
        "k_proj": "ct w4 channels, zeros",
        "v_proj": "ct int8",
        "up_proj": "ct w8 groups, zeros",
    }

    def choose(name: str) -> str | None:
        return None if name.startswith("lm_head") else formats.get(name.rpartition(".")[2], "ct w4 groups, zeros")

    runtime = check(open_runtime, quantise("llama2", choose, {"quant_method": "compressed-tensors"}))
    first = runtime._decoder.layers[0]
    for linear in (first.mixer.qkv, first.feed_forward.gate_up):
        assert type(linear) is CodedLinear
        assert linear.weight.form.bits == 8


def test_floats_of_several_forms_are_one_product_that_compiled_code_computes(
    open_runtime: Any, cpu_path: str, quantise: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Of four and eight bits, with a scale for a tensor, by channel and by group, beside integers of four bits."""
    formats = {
        "q_proj": "ct nvfp4",
        "k_proj": "ct fp8",
        "v_proj": "ct w4 groups, zeros",
        "gate_proj": "ct fp8 static",
        "up_proj": "ct mxfp4",
    }

    def choose(name: str) -> str | None:
        return None if name.startswith("lm_head") else formats.get(name.rpartition(".")[2], "ct nvfp4")

    found = quantise("llama2", choose, {"quant_method": "compressed-tensors"})
    with caplog.at_level(logging.INFO, "petiole"):
        runtime = check(open_runtime, found)
    assert ("compiled code computes all" in caplog.text) == (cpu_path == "native")
    first = runtime._decoder.layers[0]
    for linear in (first.mixer.qkv, first.feed_forward.gate_up):
        assert type(linear) is CodedLinear
        assert linear.weight.form.codes == torch.float8_e4m3fn


def test_products_of_several_layers_keep_the_scale_of_each(open_runtime: Any, quantise: Any) -> None:
    runtime = check(open_runtime, quantise("llama2", layers_in("ct nvfp4"), FORMATS["ct nvfp4"][1]))
    multiplier = runtime._decoder.layers[0].mixer.qkv.weight.multiplier
    assert len(multiplier.unique()) == 3


def test_fingerprints_differ_by_format(quantise: Any, checkpoint: Any, tmp_path: Path) -> None:
    prints = {fingerprint(checkpoint("qwen3")[0])}
    for name in ("gptq 4 v1", "gptq 4 v2, zeros", "awq", "ct w4 groups", "ct nvfp4"):
        found = quantise("qwen3", layers_in(name), FORMATS[name][1])
        prints.add(fingerprint(found.folder))
        shutil.rmtree(found.folder)
    assert len(prints) == 6


def test_a_checkpoint_that_is_quantised_is_not_quantised_again(open_runtime: Any, quantise: Any) -> None:
    found = quantise("qwen3", layers_in("awq"), FORMATS["awq"][1])
    with pytest.raises(ModelError, match=r"^weight_quantization: must be none .* got int8$"):
        open_runtime(found.folder, weight_quantization="int8")


def test_a_quantised_configuration_of_plain_weights_is_refused(open_runtime: Any, quantise: Any) -> None:
    found = quantise("qwen3", lambda _: None, FORMATS["awq"][1])
    with pytest.raises(ModelError, match="quant_method must be absent beside plain weights, got awq"):
        open_runtime(found.folder)


def test_what_is_wrong_is_said_before_memory_is_taken(
    open_runtime: Any, quantise: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = quantise("llama2", layers_in("awq"), FORMATS["awq"][1])
    path = found.folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.down_proj.scales"][0, 0] = float("nan")
    save_file(tensors, str(path))

    def taken(*_: object) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr("petiole.gpu_worker.models.weights.quantized.Coded.put", taken)
    with pytest.raises(ModelError, match=r": tensor model\.layers\.2\.mlp\.down_proj\.scales must have finite"):
        open_runtime(found.folder)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="is truncated"):
        open_runtime(found.folder)


# ------------------------------------------------------------ adapters


def both(folder: Path, base: Any, open_runtime: Any, tmp_path: Path, **settings: Any) -> None:
    """A row with an adapter and one without compute what PEFT computes over `base`, and `base` alone."""
    adapted = write_adapter(base, tmp_path / "adapter", r=4, lora_alpha=8, target_modules="all-linear")
    runtime = open_runtime(folder, lora_slots=1, lora_max_rank=4, **settings)
    runtime.load_adapter(str(tmp_path / "adapter"), 1)
    driver = Driver(runtime)
    rows = [driver.sequence(tokens(12), ALL, adapter_slot=slot) for slot in (1, 0)]
    driver.prefill(rows, [5, 5])
    for step in (driver.prefill, driver.decode):
        got = table(step(rows))
        expected = [
            reference(model, row.prompt + row.output[: len(row.output) - 1])[-1]
            for model, row in zip((adapted, base), rows, strict=True)
        ]
        assert relative_error(got, np.array(expected)) < 1e-4
    assert relative_error(expected[0], expected[1]) > 1e-2


@pytest.mark.parametrize("name", ["ct w4 groups, zeros", "ct int8", "ct nvfp4", "gptq 4 v1", "awq", "fp8 blocks"])
def test_adapters_stand_beside_quantised_weights(
    open_runtime: Any, quantise: Any, tmp_path: Path, name: str
) -> None:
    found = quantise("qwen2", layers_in(name), FORMATS[name][1])
    both(found.folder, found.model, open_runtime, tmp_path)


# ------------------------------------------------------------ reloads


def first_logits(runtime: Any) -> Any:
    driver = Driver(runtime)
    return table(driver.prefill([driver.sequence(tokens(9), ALL)]))


def renamed(found: Quantised, to: Path) -> Quantised:
    return Quantised(found.folder.rename(to), found.model)


@pytest.mark.parametrize("new", ["gptq 4 v2, zeros", "awq"])
def test_a_reload_may_change_the_format_if_it_keeps_the_form(
    open_runtime: Any, quantise: Any, tmp_path: Path, new: str
) -> None:
    """Codes lie in memory alike, whoever packed them in the file."""
    old = renamed(
        quantise("llama2", layers_in("gptq 4 v1, zeros"), FORMATS["gptq 4 v1, zeros"][1]), tmp_path / "old"
    )
    runtime = open_runtime(old.folder)
    before = runtime.limits.fingerprint
    found = quantise("llama2", layers_in(new), FORMATS[new][1])
    runtime.prepare_reload(str(found.folder))()
    assert runtime.limits.fingerprint != before
    assert relative_error(first_logits(runtime), reference(found.model, tokens(9))[-1:]) < 1e-4


def test_a_reload_between_plain_and_quantised_weights_is_refused_and_the_old_ones_go_on(
    open_runtime: Any, quantise: Any, checkpoint: Any, tmp_path: Path
) -> None:
    """Their memory differs, and graphs and kernels know its addresses."""
    plain, _ = checkpoint("llama2")
    formats = ("awq", "ct nvfp4", "ct int8")
    quantised = [
        renamed(quantise("llama2", layers_in(name), FORMATS[name][1]), tmp_path / name.replace(" ", "-")).folder
        for name in formats
    ]
    for served in (plain, quantised[0]):
        runtime = open_runtime(served)
        before = first_logits(runtime)
        for other in {plain, *quantised} - {served}:
            with pytest.raises(ModelError, match=r"another shape or type than .*; start a new engine for it$"):
                runtime.prepare_reload(str(other))
            assert np.array_equal(first_logits(runtime), before)


def test_a_reload_of_quantised_weights_where_weights_are_quantised_here_is_refused(
    open_runtime: Any, quantise: Any, checkpoint: Any
) -> None:
    runtime = open_runtime(checkpoint("llama2")[0], weight_quantization="int4")
    before = first_logits(runtime)
    found = quantise("llama2", layers_in("ct w4 groups"), FORMATS["ct w4 groups"][1])
    with pytest.raises(ModelError, match=r"^weight_quantization: must be none .* got int4$"):
        runtime.prepare_reload(str(found.folder))
    assert np.array_equal(first_logits(runtime), before)

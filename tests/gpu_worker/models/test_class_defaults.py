"""What config.json leaves out is what transformers fills in. The oracle: transformers' own configuration of the
same file, written out in full."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.harness.driver import Driver
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families.registry import ARCHITECTURES, model_of
from petiole.gpu_worker.models.plan import ModelPlan
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support.families import EVERY_FAMILY, SHAPE, build_model, configuration_of

transformers = pytest.importorskip("transformers")
class_defaults = pytest.importorskip("tests.support.class_defaults")

OF_ALL_MODELS = {"architectures", "transformers_version", "model_type", "dtype"}
OLD_ROTATIONS: list[dict[str, Any]] = [
    {"rope_theta": 12_345.0},
    {"rope_theta": 12_345.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 512},
    {"rope_local_base_freq": 1_234.0, "global_rope_theta": 77_777.0, "local_rope_theta": 5_555.0},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
]


def written_out(config_class: Any, raw: dict[str, Any]) -> dict[str, Any] | None:
    """The file as transformers would write it; None if transformers refuses it."""
    try:
        config = config_class.from_dict(json.loads(json.dumps(raw)))
    except Exception:
        return None
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    found["architectures"] = raw["architectures"]
    return found


def plan_or_refusal(raw: dict[str, Any]) -> ModelPlan | str:
    """The type of weights aside: transformers writes its own."""
    try:
        return replace(model_of(raw).plan, dtype="")
    except ModelError as error:
        return str(error).partition(", got")[0]


def compare(config_class: Any, raw: dict[str, Any], what: object) -> None:
    full = written_out(config_class, raw)
    if full is None:
        return
    mine, theirs = plan_or_refusal(raw), plan_or_refusal(full)
    if isinstance(mine, str) and ("must be by kind of layer" in mine or "rope_scaling must be null" in mine):
        return  # transformers ignores it, or fails later
    assert mine == theirs, what


def config_of(family: str) -> tuple[Any, dict[str, Any]]:
    config = configuration_of(family)
    raw = json.loads(config.to_json_string(use_diff=False))
    raw["architectures"] = [f"{EVERY_FAMILY[family][0]}ForCausalLM"]
    return type(config), raw


def test_the_table_is_that_of_transformers() -> None:
    assert class_defaults.FILE.read_text() == class_defaults.written(), "python -m tests.support.class_defaults"


@pytest.mark.parametrize("family", sorted(EVERY_FAMILY))
def test_each_key_left_out_has_the_default_of_its_class(family: str) -> None:
    config_class, raw = config_of(family)
    for key in raw.keys() - OF_ALL_MODELS:
        compare(config_class, {name: value for name, value in raw.items() if name != key}, key)
    compare(config_class, {"architectures": raw["architectures"]}, "all")
    rope = raw.get("rope_parameters") or {}
    for key in rope:
        compare(config_class, {**raw, "rope_parameters": {k: v for k, v in rope.items() if k != key}}, key)


@pytest.mark.parametrize("family", sorted(EVERY_FAMILY))
@pytest.mark.parametrize("named", OLD_ROTATIONS, ids=lambda named: "-".join(named))
def test_rotations_in_old_spellings(family: str, named: dict[str, Any]) -> None:
    config_class, raw = config_of(family)
    if family in ("phi3", "phi4-mini") and "scal" in str(named):
        pytest.skip("Phi-3 knows longrope alone")
    raw.pop("rope_parameters", None)
    compare(config_class, raw | named, named)


@pytest.mark.parametrize("architecture", sorted(class_defaults.table()["architectures"]))
def test_a_configuration_without_keys_is_that_of_its_class(architecture: str) -> None:
    config_class = getattr(transformers, architecture).config_class
    compare(config_class, {"architectures": [architecture]}, architecture)
    if "text_config" in config_class.sub_configs_defaults:
        compare(config_class, {"architectures": [architecture], "text_config": {"num_hidden_layers": 2}}, "nested")


GEMMA_3 = {  # as published: text_config leaves most out
    "4b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    "12b": {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}


@pytest.mark.parametrize("size", GEMMA_3)
def test_gemma_3_as_published(size: str) -> None:
    more = {
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "text_config": GEMMA_3[size] | more,
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
        "torch_dtype": "bfloat16",
    }
    compare(transformers.Gemma3Config, raw, size)
    plan = model_of(raw).plan
    local, full = plan.layers[0].attention, plan.layers[5].attention
    assert (local.window, full.window, plan.vocab_size, plan.tied_head) == (1024, 0, 262_208, True)
    assert local.rotary is not None
    assert full.rotary is not None
    assert (local.rotary.theta, full.rotary.theta, full.rotary.factor) == (1e4, 1e6, 8.0)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
        ("Qwen3MoeForCausalLM", {"max_window_layers": 1, "layer_types": ["sliding_attention"] * 3}),
        ("Qwen3ForCausalLM", {"mlp_bias": True}),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 20.0}),
        ("Qwen2ForCausalLM", {"attention_bias": True, "original_max_position_embeddings": 16}),
        ("MistralForCausalLM", {"attention_bias": True, "use_sliding_window": False}),
    ],
)
def test_keys_that_the_class_does_not_read_change_nothing(architecture: str, changes: dict[str, Any]) -> None:
    raw = {"architectures": [architecture], **SHAPE}
    assert model_of(raw | changes).plan == model_of(raw).plan


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma4ForCausalLM", {"attention_bias": True}, "attention_bias must be false .*, got true"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention must .* 'all'"),
        (
            "LlamaForCausalLM",
            {"per_layer_config": {"1": {"intermediate_size": 8}}},
            r"per_layer_config must be empty, got \['intermediate_size'\]",
        ),
        (
            "Gemma4ForCausalLM",
            {"per_layer_config": {"1": {"sliding_window": 8, "head_dim": 16}}},
            "per_layer_config must be head_dim or num_key_value_heads, got .'sliding_window'",
        ),
        (
            "Olmo3ForCausalLM",
            {"rope_parameters": {"rope_theta": 1.0}},
            "must be by kind of layer .* got .'rope_theta'",
        ),
        ("LlamaForCausalLM", {"rope_scaling": 8}, "rope_scaling must be an object, got 8"),
        (
            "Gemma4ForCausalLM",
            {"rope_parameters": {"full_attention": {}}},
            "lacks 'rope_parameters.sliding_attention'",
        ),
    ],
)
def test_keys_that_change_results_and_are_not_computed_are_refused(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_of({"architectures": [architecture], **SHAPE, **changes})


def test_every_family_goes_through_the_table() -> None:
    """Those that transformers has. Others say all that they need."""
    known = class_defaults.table()["architectures"]
    assert {name for name in ARCHITECTURES if hasattr(transformers, name)} == set(known)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("gemma3", {"attn_logit_softcapping": 2.0}),
        ("smollm3", {"rope_parameters": None, "no_rope_layers": None}),
        ("olmo3", {"rope_parameters": None, "layer_types": None}),
        ("gemma4", {"rope_parameters": None, "layer_types": None}),
        ("gpt-oss", {"rope_parameters": None, "layer_types": None}),
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path, open_runtime: Callable[..., Any]
) -> None:
    """Of files with these keys; null: left out."""
    model = build_model(family, **changes)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in raw.items() if changes.get(key, 0) is not None})
    )
    driver, ids = Driver(open_runtime(tmp_path, speculative_tokens=7)), tokens(30)
    sequence = driver.sequence(ids, ALL)
    got = table(driver.finish_step(*driver.launch("verify", [sequence], [ids], [len(ids)])))
    assert relative_error(got, reference(model, ids)) < 1e-4

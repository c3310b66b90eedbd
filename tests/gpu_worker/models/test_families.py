"""Models of text inside models of text and images, and what a family refuses. `test_logits` compares all families
with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.driver import Driver
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families.registry import ARCHITECTURES, model_of
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.support.families import EVERY_FAMILY, LATENT, SHAPE, WITH_STATES, drawn

transformers = pytest.importorskip("transformers")

VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("Gemma3", "gemma3", VISION),
    "mistral-small": ("Mistral3", "mistral", VISION | {"head_dim": 16}),
    "ministral3": ("Mistral3", "ministral3", VISION | {"head_dim": 16}),
    "smolvlm": ("SmolVLM", "llama3", VISION),
    "qwen3-vl": ("Qwen3VL", "qwen3", VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
    "qwen2.5-vl": ("Qwen2_5_VL", "qwen2", VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        "qwen3-moe-raw",
        VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64},
    ),
    "qwen3.5": ("Qwen3_5", "qwen3.5", VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 64}),
}


def wrapped(name: str) -> Any:
    """A model of text and images around the family's configuration of text."""
    kind, text, vision = WRAPPERS[name]
    settings = SHAPE | EVERY_FAMILY[text][1]
    if kind == "Mistral3":
        settings |= {"model_type": text}
    if kind == "Qwen2_5_VL":
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    if kind in ("Qwen3VL", "Qwen3VLMoe"):
        vision = {**vision, "deepstack_visual_indexes": [0]}
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    more = {"mm_tokens_per_image": 4, "boi_token_index": 4, "eoi_token_index": 5} if kind == "Gemma3" else {}
    made = getattr(transformers, f"{kind}Config")
    config = made(text_config=settings, vision_config=vision, image_token_id=3, **more)
    config._attn_implementation = "eager"
    return drawn(getattr(transformers, f"{kind}ForConditionalGeneration")(config), name)


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_text_part_of_a_model_of_images_is_served(
    name: str, tmp_path: Path, open_runtime: Callable[..., Any]
) -> None:
    model = wrapped(name)
    model.save_pretrained(tmp_path)
    outputs = {"max_num_seqs": 30} if name in WITH_STATES else {"speculative_tokens": 7}
    driver = Driver(open_runtime(tmp_path, **outputs))
    ids = tokens(30)
    sequence = driver.sequence(ids, ALL)
    got = table(driver.finish_step(*driver.launch("verify", [sequence], [ids], [len(ids)])))
    assert relative_error(got, reference(model, ids)) < 1e-4


def test_the_log_names_what_is_left_out(
    tmp_path: Path, open_runtime: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    wrapped("qwen3.5").save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    more = {"mtp.fc.weight": torch.zeros(2, 2), "mtp.norm.weight": torch.zeros(2)}
    save_file({**stored, **more}, tmp_path / "model.safetensors")
    with caplog.at_level("INFO", "petiole"):
        open_runtime(tmp_path)
    said = "this checkpoint is served, without mtp.* (2 tensors)"
    assert caplog.text.count(said) == 1


def test_cross_attention_is_refused_by_name() -> None:
    text = SHAPE | {"cross_attention_layers": [1]}
    raw = {"architectures": ["MllamaForConditionalGeneration"], "text_config": text}
    with pytest.raises(ModelError, match=r"cross_attention_layers must be \[\]: .*, got \[1\]"):
        model_of(raw)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma4ForCausalLM", {"enable_moe_block": True}, "num_experts must be a whole number .*, got None"),
        ("MixtralForCausalLM", {"num_local_experts": 2, "num_experts_per_tok": 3}, "must be at most 2 .*, got 3"),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 0},
            "num_local_experts must be a whole number from 1 .*, got 0",
        ),
        (
            "Glm4MoeForCausalLM",
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 3},
            "3 groups, of which 1 count, must divide 8 experts",
        ),
        (
            "DeepseekV2ForCausalLM",
            LATENT | {"topk_method": "noaux_tc"},
            "topk_method must be greedy or .*'noaux_tc'",
        ),
        ("DeepseekV2ForCausalLM", LATENT | {"norm_topk_prob": True}, "norm_topk_prob must be false .*got True"),
        ("DeepseekV2ForCausalLM", LATENT | {"use_mla": False}, "use_mla must be true .*got False"),
        (
            "DeepseekV2ForCausalLM",
            LATENT | {"scoring_func": "sigmoid"},
            "scoring_func must be softmax .*'sigmoid'",
        ),
        (
            "DeepseekV3ForCausalLM",
            LATENT | {"scoring_func": "softmax"},
            "scoring_func must be sigmoid .*'softmax'",
        ),
        ("DeepseekV3ForCausalLM", LATENT | {"topk_method": "greedy"}, "topk_method must be noaux_tc .*'greedy'"),
        ("DeepseekV3ForCausalLM", LATENT | {"moe_layer_freq": 2}, "moe_layer_freq must be 1 .*got 2"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        ("DeepseekV3ForCausalLM", LATENT | {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, .* got 7"),
        (
            "DeepseekV3ForCausalLM",
            LATENT | {"q_lora_rank": None, "attention_bias": True},
            "attention_bias must be false where q_lora_rank is null, got true",
        ),
        ("Glm4MoeLiteForCausalLM", LATENT | {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be .* 3 layers"),
        ("Gemma4ForCausalLM", {"num_kv_shared_layers": 3}, "num_kv_shared_layers leaves no .* for layer 0, got 3"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ("Gemma3ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation must be gelu_tanh or .*'relu'"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers must be a list of 3 entries, got .1"),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "mistral4"}}, "got 'mistral4'"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_of({"architectures": [architecture], **SHAPE, **changes})


def test_the_factors_of_long_contexts_are_chosen_once_by_the_served_length(
    checkpoint: Callable[..., Any], tmp_path: Path, open_runtime: Callable[..., Any]
) -> None:
    """On either side of the limit they are those of transformers, which chooses by the length of the sequence."""
    folder, _ = checkpoint("phi4-mini")
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    raw = json.loads((folder / "config.json").read_text())
    raw["rope_parameters"]["original_max_position_embeddings"] = raw["original_max_position_embeddings"] = 32
    raw["rope_parameters"].pop("factor", None)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(raw))
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    prints = set()
    for longest, n in ((32, 30), (256, 40)):
        runtime = open_runtime(tmp_path, max_model_len=longest)
        driver = Driver(runtime)
        sequence = driver.sequence(tokens(n), ALL)
        driver.prefill([sequence], [9])
        assert relative_error(table(driver.prefill([sequence])), reference(other, tokens(n))[-1:]) < 1e-4
        prints.add(runtime.limits.fingerprint)
    assert len(prints) == 2, "keys of one are not keys of the other"


def test_formats_of_weights_that_are_not_read_are_refused_in_the_text_part_too() -> None:
    method = {"quant_method": "bitsandbytes"}
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": SHAPE,
        "quantization_config": method,
    }
    with pytest.raises(ModelError, match="the format bitsandbytes is not read: take the plain checkpoint"):
        model_of(raw)


def test_no_two_families_have_an_architecture() -> None:
    families = {id(one): one for one in ARCHITECTURES.values()}.values()
    every = [name for family in families for name in family.architectures]
    assert len(every) == len(set(every)) == len(ARCHITECTURES)

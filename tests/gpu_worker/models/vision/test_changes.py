"""Weights that change under pictures: adapters, reloads; and weights that are kept in fewer bits."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from petiole.gpu_worker import Engine
from tests.gpu_worker.models.vision.test_seeing import PROMPTS, asked, error
from tests.support.seeing import seeing_model, write_seeing

OpenEngine = Callable[..., tuple[Engine, Any]]
_AT = "model.language_model.layers.{}.{}"


def write_adapter(folder: Path, model: Any, rank: int = 4) -> Any:
    """An adapter on the first and the third layer, and the model with its weights merged in."""
    merged, generator, tensors = copy.deepcopy(model), torch.Generator().manual_seed(5), {}
    for layer in (0, 2):
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            at = _AT.format(layer, name)
            weight = merged.get_parameter(f"{at}.weight")
            shapes = ((rank, weight.shape[1]), (weight.shape[0], rank))
            a, b = (0.2 * torch.randn(shape, generator=generator) for shape in shapes)
            tensors |= {f"base_model.model.{at}.lora_A.weight": a, f"base_model.model.{at}.lora_B.weight": b}
            weight.data += 2 * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": 2 * rank}))
    return merged


def test_an_adapter_beside_deep_features(open_engine: OpenEngine, tmp_path: Path) -> None:
    """Layers are computed in parts, between which features are added: an adapter's maps are those of its layer."""
    engine, model = open_engine(lora_slots=1, lora_max_rank=4)
    merged = write_adapter(tmp_path / "adapter", model)
    for parts in PROMPTS[:3]:
        plain, adapted = engine.generate([asked(parts), asked(parts, adapter=str(tmp_path / "adapter"))])
        assert error(model, parts, plain) < 1e-4
        assert error(merged, parts, adapted) < 1e-4
        assert error(model, parts, adapted) > 1e-3


def test_a_reload_brings_other_eyes(open_engine: OpenEngine, tmp_path: Path) -> None:
    engine, model = open_engine()
    assert error(model, PROMPTS[2], engine.generate([asked(PROMPTS[2])])[0]) < 1e-4
    other = seeing_model("qwen3-vl")
    with torch.no_grad():
        for weight in other.model.visual.parameters():
            weight.mul_(1.1)
    write_seeing(tmp_path, "qwen3-vl", other)
    engine.reload(str(tmp_path))
    result = engine.generate([asked(PROMPTS[2])])[0]
    assert error(other, PROMPTS[2], result) < 1e-4
    assert error(model, PROMPTS[2], result) > 1e-3


def test_a_folder_of_weights_alone_is_read_with_the_served_tokens(
    open_engine: OpenEngine, folders: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(folders("mistral3")[0], weights, ignore=shutil.ignore_patterns("tokenizer*"))
    engine, _ = open_engine("mistral3")
    assert engine.facts()["images"]
    for _ in range(2):
        engine.reload(str(weights))
        assert engine.facts()["images"]


def test_bfloat16_and_int8(open_engine: OpenEngine) -> None:
    for settings, most in (({"dtype": "bfloat16"}, 0.05), ({"weight_quantization": "int8"}, 0.1)):
        engine, model = open_engine(**settings)
        assert error(model, PROMPTS[0], engine.generate([asked(PROMPTS[0])])[0]) < most


def test_features_of_a_picture_keep_no_others(open_engine: OpenEngine) -> None:
    """A view of a step's features would keep the memory of all its pictures, which nobody counts."""
    engine, _ = open_engine("qwen3-vl")
    tower = engine.runtime._decoder.vision  # type: ignore[attr-defined]
    pixels = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    with torch.inference_mode():
        found = tower.encode([(pixels, (1, 1))] * 3)
    assert [one.untyped_storage().nbytes() for one in found] == [one.nbytes for one in found]

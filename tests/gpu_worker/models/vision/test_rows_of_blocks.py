"""Mistral's pictures: their sizes, pixels and tokens are those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from petiole.contract.requests.images import View
from petiole.gpu_worker import Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families import towers
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.row_pictures import RowPictures, row_pictures
from petiole.gpu_worker.models.vision.tower import Tower
from tests.support.seeing import _MORE, SEEING, drawn_picture, row_pixels

transformers = pytest.importorskip("transformers")

DESCRIBED = {**json.loads(row_pixels().to_json_string()), "patch_size": 8}


def tower_config(whole: dict[str, Any] | None = None, **changes: Any) -> TowerConfig:
    kind, text, vision = SEEING["mistral3"]
    raw = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {**vision, **changes},
        **_MORE[kind],
        **(whole or {}),
    }
    return towers.pixtral(raw, model_of(raw).plan)


@settings(max_examples=1000)
@given(st.integers(1, 9000), st.integers(1, 9000))
def test_sizes(height: int, width: int) -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    pictures = RowPictures(14, 2, edge=1540)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidRequest, match="at most 200 times as long"):
            pictures.layout(width, height, "image", 4096)
        return
    nothing = np.broadcast_to(np.uint8(0), (3, height, width))
    expected = get_resize_output_image_size(nothing, 1540, 28, "channels_first")
    layout = pictures.layout(width, height, "image", 4096)
    assert layout.size == expected[::-1]
    rows, columns = (side // 28 for side in expected)
    assert layout.n_positions == rows * (columns + 1) <= pictures.max_positions == 3080


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400))
def test_a_picture_of_too_many_tokens_is_made_smaller(height: int, width: int, most: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    pictures = RowPictures(14, 2, edge=1540)
    layout = pictures.layout(width, height, "image", most)
    assert layout.n_positions <= max(most, 2)
    assert layout.size is not None
    assert not any(side % 28 for side in layout.size)


@settings(max_examples=30, deadline=None)
@given(st.integers(5, 300), st.integers(5, 300), st.integers(0, 5))
def test_pixels(width: int, height: int, seed: int) -> None:
    picture, config = drawn_picture(width, height, seed), tower_config()
    expected = row_pixels()(images=[picture], return_tensors="pt")["pixel_values"][0]
    pictures = row_pictures(config, DESCRIBED)
    layout = pictures.layout(width, height, "image", 4096)
    prepared = pictures.prepared(picture, 0, layout)
    pixels = torch.from_numpy(prepared.pixels)
    tower = Tower(config, *[None] * 5, values=torch.from_numpy(pictures.values()))  # type: ignore[arg-type]
    grid, (rows, columns) = tower.grid(pixels), tower.axes([tower.grid(pixels)])
    values = torch.empty_like(tower._values_of(pixels))
    values[rows * grid.columns + columns] = tower._values_of(pixels)
    whole = values.view(grid.rows, grid.columns, 3, 8, 8).permute(2, 0, 3, 1, 4).reshape(expected.shape)
    assert torch.equal(whole, expected)
    assert prepared.n_encoded == grid.n


def test_how_many_pixels_is_not_for_the_request_to_say() -> None:
    with pytest.raises(InvalidRequest, match="this model sets it itself, got 9000"):
        RowPictures(14, 2, edge=1540).layout(100, 100, "image", 4096, View(max_pixels=9000))


def test_the_tower_says_how_large_pictures_are_where_no_file_does() -> None:
    config = tower_config(image_size=1540)
    assert row_pictures(config, {}).edge == 1540
    assert row_pictures(config, {"do_resize": True}).edge == 1024, "as transformers' class has it"
    assert row_pictures(config, DESCRIBED).edge == 160


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch_size": 16}, "patch_size must be 8, as in config.json, got 16"),
        ({"size": {"height": 5}}, "size.longest_edge must be a number of pixels from 16"),
        ({"size": 7}, "size.longest_edge must be a number of pixels from 16"),
        ({"image_processor_type": "CLIPImageProcessor"}, "must be PixtralImageProcessor"),
        ({"spatial_merge_size": 1}, "spatial_merge_size must be 2"),
        ({"do_resize": False}, "do_resize must be true"),
    ],
)
def test_pictures_that_are_made_ready_in_another_way_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        row_pictures(tower_config(), DESCRIBED | changes)


@pytest.mark.parametrize(
    ("whole", "changes", "said"),
    [
        ({"vision_feature_layer": -2}, {}, "vision_feature_layer must be -1"),
        ({"image_token_id": 512}, {}, "image_token_id must be a whole number from 0 to 511"),
        ({"projector_hidden_act": "silu"}, {}, "projector_hidden_act must be gelu"),
        ({}, {"num_attention_heads": 5}, "must divide 48"),
        ({}, {"hidden_act": "relu"}, "hidden_act must be gelu"),
    ],
)
def test_towers_of_another_form_are_refused(whole: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        tower_config(whole, **changes)


def in_eight_bits(folder: Path, part: str) -> None:
    """Products whose names have `part` become FP8, as compressed-tensors stores them."""
    from safetensors.torch import load_file, save_file

    stored = load_file(folder / "model.safetensors")
    for name in [name for name, one in stored.items() if part in name and one.ndim == 2]:
        scale = stored[name].abs().amax(1, keepdim=True) / 448
        stored |= {name: (stored[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(stored, folder / "model.safetensors")
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    changed(folder, quantization_config=method | {"config_groups": {"all": group}})


def without_token(folder: Path, text: str) -> None:
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace(text, text.lower()))


def changed(folder: Path, **more: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: in_eight_bits(folder, "vision_tower"), "plain weights, not quantised ones"),
        (lambda folder: in_eight_bits(folder, "multi_modal_projector"), "merging_layer"),
        (lambda folder: in_eight_bits(folder, "merging_layer"), "merging_layer"),
        (lambda folder: changed(folder, vision_feature_layer=-2), "vision_feature_layer must be -1"),
        (lambda folder: without_token(folder, "[IMG_BREAK]"), "must have the token '[IMG_BREAK]'"),
    ],
)
def test_text_is_served_beside_a_tower_of_another_form(
    change: Callable[[Path], None],
    said: str,
    folders: Callable[[str], tuple[Path, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "changed"
    for one in (plain, folder):
        shutil.copytree(folders("mistral3")[0], one)
        in_eight_bits(one, "mlp.down_proj")  # of the text
    change(folder)
    request = Request(prompt=[5, 6, 7], sampling=SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    outputs = []
    for one, sees in ((folder, False), (plain, True)):
        caplog.clear()
        config = EngineConfig(model=str(one), device="cpu", dtype="float32", max_model_len=128)
        with caplog.at_level("INFO"), Engine(config) as engine:
            assert bool(engine.facts()["images"]) == sees
            outputs.append(engine.generate([request])[0].token_ids)
        refused = [line for line in caplog.messages if line.startswith("pictures are refused: ")]
        assert len(refused) == (not sees)
        assert sees or said in refused[0]
    assert outputs[0] == outputs[1]

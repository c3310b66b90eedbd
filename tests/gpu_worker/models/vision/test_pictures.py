"""Sizes and pixels are those of transformers' processor without torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from petiole.contract.requests.images import View
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.families.towers import qwen2_5_vl, qwen3_5, qwen3_vl
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.pictures import Area, GridPictures, grid_pictures, resized
from petiole.gpu_worker.models.vision.tower import Grid, Tower
from petiole.gpu_worker.request.prepared_images import RequestImage, rotary_positions
from petiole.gpu_worker.runtime.building import platform_of
from petiole.gpu_worker.runtime.device.opening import open_device
from petiole.gpu_worker.runtime.model_files import ModelInfo, ModelReader
from tests.support.seeing import SEEING, drawn_picture, pixels_of_transformers, seeing_model, write_seeing

transformers = pytest.importorskip("transformers")


def found_in(folder: Path) -> ModelInfo:
    return ModelReader(EngineConfig(device="cpu"), None, platform_of(open_device("cpu"))).find(str(folder))


def tower_config(name: str = "qwen3-vl", **changes: Any) -> TowerConfig:
    kind, text, vision = SEEING[name]
    of = {"Qwen3VL": qwen3_vl, "Qwen3_5": qwen3_5, "Qwen2_5_VL": qwen2_5_vl}[kind]
    raw = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {**vision, **changes},
        "image_token_id": 3,
    }
    return of(raw, model_of(raw).plan)


@settings(max_examples=1000)
@given(
    st.integers(1, 9000),
    st.integers(1, 9000),
    st.sampled_from([28, 32]),
    st.sampled_from([(3136, 10**6), (65536, 2**24)]),
)
def test_sizes(height: int, width: int, side: int, limits: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    if max(height, width) <= 200 * min(height, width):
        assert resized(height, width, side, Area(*limits)) == smart_resize(height, width, side, *limits)


@given(st.integers(30, 4000), st.integers(30, 4000), st.integers(150_000, 200_704), st.sampled_from([14, 16]))
def test_a_view_with_little_between_its_limits_is_kept_to_the_greater_one(
    height: int, width: int, least: int, patch: int
) -> None:
    pictures = GridPictures(patch, 2, least=3136, most=2**24)
    if max(height, width) > 50 * min(height, width):
        return
    layout = pictures.layout(width, height, "image", 4096, View(min_pixels=least, max_pixels=200_704))
    assert layout.size is not None
    wide, high = layout.size
    assert wide * high <= 200_704
    assert (wide + pictures.side) * (high + pictures.side) > least


@settings(max_examples=40, deadline=None)
@given(st.integers(20, 300), st.integers(20, 300), st.integers(0, 5))
def test_pixels(width: int, height: int, seed: int) -> None:
    processor = pixels_of_transformers()
    pictures = grid_pictures(tower_config(), json.loads(processor.to_json_string()))
    picture = drawn_picture(width, height, seed)
    expected = processor(images=[picture], return_tensors="pt")
    layout = pictures.layout(width, height, "image", 10**6)
    prepared = pictures.prepared(picture, 0, layout)
    tower = Tower(tower_config(), *[None] * 5, values=torch.from_numpy(pictures.values()))  # type: ignore[arg-type]
    assert torch.equal(tower._values_of(torch.from_numpy(prepared.pixels)), expected["pixel_values"])
    grid = tower.grid(torch.from_numpy(prepared.pixels))
    assert expected["image_grid_thw"].tolist() == [[1, grid.rows, grid.columns]]
    assert prepared.n_patches == grid.n == 4 * layout.n_positions


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"size": {"shortest_edge": 2048, "longest_edge": 65536}},
        {"min_pixels": 65536},
        {"max_pixels": 8192},
        {"min_pixels": 2048, "size": {"longest_edge": 65536}},
        {"max_pixels": 65536, "size": {"shortest_edge": 2048, "longest_edge": 4096}},
    ],
)
def test_what_is_not_said_is_as_in_transformers(said: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=16, **said)
    found = grid_pictures(tower_config(), {"patch_size": 16, **said})
    assert (found.least, found.most) == (processor.size["shortest_edge"], processor.size["longest_edge"])
    assert (list(found.mean), list(found.std)) == (list(processor.image_mean), list(processor.image_std))


@pytest.mark.parametrize("both", [False, True])
def test_the_part_of_a_processor_comes_before_a_file_of_its_own(tmp_path: Path, both: bool) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write_seeing(tmp_path, "qwen2.5-vl")
    own = tmp_path / "preprocessor_config.json"
    part = json.loads(own.read_text())
    before = found_in(tmp_path).fingerprint
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": part}))
    if both:
        own.write_text(json.dumps(part | {"image_mean": [0.1, 0.1, 0.1]}))
    else:
        own.unlink()
    found = found_in(tmp_path)
    assert found.model.pictures is not None
    pictures, theirs = (
        grid_pictures(tower_config("qwen2.5-vl"), found.model.pictures),
        Qwen2VLImageProcessorPil.from_pretrained(tmp_path),
    )
    assert list(pictures.mean) == list(theirs.image_mean) == [0.5, 0.4, 0.3]
    assert pictures.least == theirs.size["shortest_edge"] == 1024
    assert found.fingerprint == before
    changed = {"image_processor": part | {"image_mean": [0.1, 0.1, 0.1]}}
    (tmp_path / "processor_config.json").write_text(json.dumps(changed))
    assert found_in(tmp_path).fingerprint != before


def test_a_thin_picture_has_no_more_positions_than_the_limit() -> None:
    pictures = GridPictures(16, 2, least=1024)
    with pytest.raises(InvalidRequest, match="at most 4 positions, got 15 for 2000 x 10") as caught:
        pictures.layout(2000, 10, "images[0]", 4)
    assert caught.value.field == "images[0]"
    assert pictures.layout(2000, 10, "images[0]", 1000).n_positions <= 1000


@pytest.mark.parametrize("shape", [(2, 2), (6, 10), (10, 6), (2, 14), (12, 4)])
def test_positions_of_the_text_behind(shape: tuple[int, int]) -> None:
    """The rotary positions of transformers, for two pictures with text around them."""
    model = seeing_model("qwen3-vl")
    grid = torch.tensor([[1, *shape], [1, 4, 4]])
    n = shape[0] * shape[1] // 4
    kinds = torch.tensor([[0, 0, *[1] * n, 0, *[1] * 4, 0, 0]])
    expected, _ = model.model.get_rope_index(torch.zeros_like(kinds), kinds, grid)
    pictures = GridPictures(16, 2, least=1024)
    sizes = [(16 * shape[1], 16 * shape[0]), (64, 64)]
    layouts = [pictures.layout(*size, "image", 10**6) for size in sizes]
    assert [layout.n_positions for layout in layouts] == [n, 4]
    images = {
        at: RequestImage(k, one.n_positions, one.rotary)
        for k, (at, one) in enumerate(zip((2, 3 + n), layouts, strict=True))
    }
    found = rotary_positions(kinds.shape[1], images)
    assert found is not None
    assert np.array_equal(found, expected[:, 0].numpy())


def test_windows_are_those_of_transformers() -> None:
    from transformers.vision_utils import get_vision_window_index

    config = tower_config("qwen2.5-vl")
    tower = Tower(config, *[None] * 5, values=torch.zeros(3, 256))  # type: ignore[arg-type]
    grids = [Grid(6, 10), Grid(4, 4), Grid(2, 14)]
    found = tower._by_windows(grids)
    assert found is not None
    thw = torch.tensor([[1, grid.rows, grid.columns] for grid in grids])
    index, ends = get_vision_window_index(thw, 2, 64, 16)
    assert torch.equal(found.patches, (index[:, None] * 4 + torch.arange(4)).flatten())
    assert np.array_equal(np.cumsum(found.spans[0]), ends[1:].numpy())
    assert found.spans[1] == [grid.n for grid in grids]
    assert torch.equal(found.back, torch.argsort(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize must be true, got False"),
        ({"do_center_crop": True}, "do_center_crop must be false, got True"),
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type must be Qwen2VL.*got 'ViT"),
        ({"size": {"height": 448, "width": 448}}, "size must have shortest_edge and longest_edge, got"),
        ({"size": {"longest_edge": 2048}}, "size must have shortest_edge and longest_edge, got"),
        ({"patch_size": 14}, "patch_size must be 16, .*got 14"),
        ({"size": {"shortest_edge": 5000, "longest_edge": 2000}}, "size.shortest_edge must be at most 2000"),
        ({"max_pixels": 100}, "size.longest_edge must be a number of pixels from 1024"),
        ({"image_mean": [0.5]}, "image_mean must be three numbers"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std must be above 0"),
        ({"resample": 9}, "resample must be a number of Pillow's"),
        ({"rescale_factor": 2}, "rescale_factor must be above 0"),
    ],
)
def test_pictures_made_ready_otherwise_are_refused(changes: dict[str, Any], message: str) -> None:
    known = json.loads(pixels_of_transformers().to_json_string())
    with pytest.raises(ModelError, match=f"preprocessor_config.json: {message}"):
        grid_pictures(tower_config(), known | changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3-vl", {"num_heads": 7}, "num_heads must divide 48"),
        ("qwen3-vl", {"num_heads": 8}, "heads of a multiple of 4, got 8"),
        ("qwen3-vl", {"out_hidden_size": 63}, "out_hidden_size must be 64, got 63"),
        ("qwen3-vl", {"num_position_embeddings": 50}, "must be a square, got 50"),
        ("qwen3-vl", {"deepstack_visual_indexes": [0, 4]}, "numbers of layers, 0 to 3, in order"),
        ("qwen3-vl", {"deepstack_visual_indexes": [0, 1, 2, 3]}, "fewer than the 4 layers of text, got 4"),
        ("qwen3-vl", {"hidden_act": "relu"}, "hidden_act must be gelu_tanh or gelu or silu"),
        ("qwen3-vl", {"in_channels": 4}, "in_channels must be a whole number from 3 to 3, got 4"),
        ("qwen3-vl", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be axial, got 'yarn'"),
        ("qwen2.5-vl", {"window_size": 16}, "window_size must be at least 32, got 16"),
        ("qwen2.5-vl", {"fullatt_block_indexes": [3, 1]}, "fullatt_block_indexes must be numbers of layers"),
    ],
)
def test_towers_that_are_not_computed_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tower_config(name, **changes)

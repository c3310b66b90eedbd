"""SmolVLM's pictures: their tiles, pixels and tokens are those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from petiole.contract.requests.images import View
from petiole.gpu_worker import InvalidRequest
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.named_tokens import NamedTokens
from petiole.gpu_worker.models.families import towers
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.vision import reading
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.tile_pictures import tile_pictures
from petiole.gpu_worker.models.vision.tower import NearestTable, Tower
from petiole.gpu_worker.models.vision.writing import RowEnds, Tiles, row_ends, smol_tiles
from tests.support.seeing import _MORE, MARKS, PAD, SEEING, drawn_picture, smol_ids, tile_pixels, tokenizer

transformers = pytest.importorskip("transformers")

DESCRIBED: dict[str, Any] = json.loads(tile_pixels().to_json_string())


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> NamedTokens:
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer().save(str(folder / "tokenizer.json"))
    return NamedTokens(folder)


def tower_config(writing: Tiles, **changes: Any) -> TowerConfig:
    kind, text, vision = SEEING["smolvlm"]
    raw = {
        "architectures": [f"{kind}ForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision | changes,
        **_MORE[kind],
    }
    return replace(towers.smolvlm(raw, model_of(raw).plan), writing=writing)


def whole_ids(found: list[int]) -> list[int]:
    return [token for one in found for token in ([one] if one >= 0 else [PAD] * -one)]


@pytest.mark.parametrize("tiling", [(1, 1), (1, 2), (2, 1), (3, 2), (3, 3)])
def test_tokens_are_those_of_transformers(tokens: NamedTokens, tiling: tuple[int, int]) -> None:
    rows, columns = tiling
    tiles = [(3, 3)] * (1 + (rows * columns if rows * columns > 1 else 0))
    expected = smol_ids(*tiling) if rows * columns > 1 else smol_ids(0, 0)
    assert whole_ids(smol_tiles(tokens).of(tiles, tiling)) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 300), st.integers(5, 300), st.integers(0, 5))
def test_pixels_and_tiles(tokens: NamedTokens, width: int, height: int, seed: int) -> None:
    picture, config = drawn_picture(width, height, seed), tower_config(smol_tiles(tokens))
    made = tile_pixels()(images=[[picture]], return_row_col_info=True, return_tensors="pt")
    pictures = tile_pictures(config, DESCRIBED)
    layout = pictures.layout(width, height, "image", 4096)
    prepared = pictures.prepared(picture, 0, layout)
    ((rows,),), ((columns,),) = made["rows"], made["cols"]
    assert prepared.tiling == (max(1, rows), max(1, columns))
    tower = Tower(config, *[None] * 5, values=torch.from_numpy(pictures.values()))  # type: ignore[arg-type]
    expected = made["pixel_values"][0]
    assert len(prepared.pixels) == len(expected)
    for tile, of_tile in zip(torch.from_numpy(prepared.pixels), expected, strict=True):
        grid, (down, across) = tower.grid(tile[None]), tower.axes([tower.grid(tile[None])])
        values = torch.empty_like(tower._values_of(tile[None]))
        values[down * grid.columns + across] = tower._values_of(tile[None])
        whole = values.view(grid.rows, grid.columns, 3, 8, 8).permute(2, 0, 3, 1, 4).reshape(of_tile.shape)
        assert torch.equal(whole, of_tile)
    assert layout.n_positions == len(smol_ids(rows, columns))
    assert prepared.n_encoded == 36 * len(expected)
    assert layout.n_positions <= pictures.max_positions


def test_a_tile_may_have_pixels_over(tokens: NamedTokens) -> None:
    """As SmolVLM2-2.2B's: 384 are 27 patches of 14, and 6 pixels that the convolution leaves out."""
    picture, processor = drawn_picture(100, 70), tile_pixels(50)
    made = processor(images=[[picture]], return_tensors="pt")["pixel_values"][0]
    config = tower_config(smol_tiles(tokens), image_size=50)
    pictures = tile_pictures(config, json.loads(processor.to_json_string()))
    layout = pictures.layout(100, 70, "image", 4096)
    prepared = pictures.prepared(picture, 0, layout)
    assert prepared.pixels.shape == (len(made), 48, 48, 3)
    values, found = torch.from_numpy(pictures.values()), torch.from_numpy(prepared.pixels).long()
    for colour in range(3):
        assert torch.equal(values[colour][found[..., colour]], made[:, colour, :48, :48])
    assert layout.n_positions == len(smol_ids(*prepared.tiling))
    assert prepared.n_encoded == 36 * len(made)


@pytest.mark.parametrize("most", [12, 40, 80, 114])
def test_a_picture_of_too_many_tokens_has_fewer_tiles(tokens: NamedTokens, most: int) -> None:
    pictures = tile_pictures(tower_config(smol_tiles(tokens)), DESCRIBED)
    for size in [(100, 100), (300, 20), (20, 300), (120, 70)]:
        layout = pictures.layout(*size, "image", most)
        assert layout.n_positions <= most
        prepared = pictures.prepared(drawn_picture(*size), 0, layout)
        assert prepared.n_positions == layout.n_positions
    with pytest.raises(InvalidRequest, match="must be a picture of at most 11 positions, got 12"):
        pictures.layout(100, 100, "image", 11)


def test_how_many_pixels_is_not_for_the_request_to_say(tokens: NamedTokens) -> None:
    pictures = tile_pictures(tower_config(smol_tiles(tokens)), DESCRIBED)
    with pytest.raises(InvalidRequest, match="this model sets it itself, got 9000"):
        pictures.layout(100, 100, "image", 4096, View(max_pixels=9000))


@pytest.mark.parametrize("side", [3, 6, 13, 27, 32])
def test_positions_are_those_of_transformers(side: int) -> None:
    """Whose bounds are rounded: an entry may be that before."""
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings

    config = SmolVLMVisionConfig(hidden_size=4, image_size=8 * side, patch_size=8)
    theirs = SmolVLMVisionEmbeddings(config)
    with torch.no_grad():
        theirs.patch_embedding.weight.zero_()
        assert theirs.patch_embedding.bias is not None
        theirs.patch_embedding.bias.zero_()
        mask = torch.ones(1, side, side, dtype=torch.bool)
        expected = theirs(torch.zeros(1, 3, 8 * side, 8 * side), mask)[0]
    found = NearestTable(theirs.position_embedding.weight.detach(), side).of(side, side)
    assert torch.equal(found.flatten(0, 1), expected)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_image_size": {"longest_edge": 64}}, "max_image_size.longest_edge must be 48, as in config.json"),
        ({"max_image_size": 5}, "max_image_size must have a longest_edge"),
        ({"size": {"longest_edge": 40}}, "size.longest_edge must be a number of pixels from 48"),
        ({"size": {"longest_edge": 200}}, "size.longest_edge must be at most 144, for which there are tokens"),
        ({"do_image_splitting": False}, "do_image_splitting must be true"),
        ({"image_processor_type": "CLIPImageProcessor"}, "must be SmolVLMImageProcessor"),
    ],
)
def test_pictures_that_are_made_ready_in_another_way_are_refused(
    tokens: NamedTokens, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        tile_pictures(tower_config(smol_tiles(tokens)), DESCRIBED | changes)


def test_a_scale_that_leaves_patches_over_is_refused(tokens: NamedTokens) -> None:
    with pytest.raises(ModelError, match="scale_factor must divide 5"):
        tower_config(smol_tiles(tokens), image_size=40)


def test_tokens_are_found_by_their_texts(tokens: NamedTokens, tmp_path: Path) -> None:
    ids = {mark: tokenizer().token_to_id(mark) for mark in MARKS}
    assert row_ends(tokens) == RowEnds(ids["[IMG_BREAK]"], ids["[IMG_END]"])
    assert tokens.find("<no such token>") is None
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "processor_config.json").write_text('{"image_break_token": "<|video_pad|>"}')
    assert row_ends(NamedTokens(tmp_path)).between == ids["<|video_pad|>"]
    (tmp_path / "processor_config.json").write_text('{"image_end_token": "[END OF IMAGE]"}')
    with pytest.raises(ModelError, match=r"tokenizer.json: must have the token '\[END OF IMAGE\]'"):
        row_ends(NamedTokens(tmp_path))
    (tmp_path / "processor_config.json").write_text('{"image_end_token": 7}')
    with pytest.raises(ModelError, match="must have the token 7"):
        row_ends(NamedTokens(tmp_path))
    entries = {
        "900": {"content": "[IMG_BREAK]"},
        "x": {"content": "[IMG_END]"},
        "3": 5,
        "9" * 5000: {"content": "y"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    (tmp_path / "processor_config.json").unlink()
    assert row_ends(NamedTokens(tmp_path)) == RowEnds(900, ids["[IMG_END]"])
    with pytest.raises(ModelError, match="inside pictures must be below 900, the tokens of the text, got 900"):
        reading._written(row_ends(NamedTokens(tmp_path)), 900)
    assert np.unique(smol_tiles(tokens).tokens).size == len(smol_tiles(tokens).tokens)


def test_tokens_are_found_in_a_list_of_pieces_and_in_a_large_file(tmp_path: Path) -> None:
    file, pieces = tmp_path / "tokenizer.json", [["<unk>", 0.0], [], 5, ["[IMG_BREAK]", -1.5], ["[IMG_END]", 0]]
    file.write_text(json.dumps({"model": {"type": "Unigram", "vocab": pieces}}))
    assert row_ends(NamedTokens(tmp_path)) == RowEnds(3, 4)
    file.write_text(file.read_text() + " " * 2**25)
    assert row_ends(NamedTokens(tmp_path)) == RowEnds(3, 4)

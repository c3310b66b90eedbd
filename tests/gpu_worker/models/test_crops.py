"""Crops: how a picture is tiled, and that each crop is the part of the resized picture that it should be."""

import numpy as np
import pytest
from PIL import Image

from petiole.gpu_worker.models.moondream.crops import CropGeometry, cropped, tiling_of

FULL, SMALL = CropGeometry(), CropGeometry(patch=14, grid=9, margin=2, max_crops=4)


@pytest.mark.parametrize(
    ("width", "height", "tiling"),
    [
        (800, 600, (2, 4)),
        (640, 480, (2, 4)),
        (1024, 1024, (3, 3)),
        (310, 500, (1, 1)),
        (1, 1, (1, 1)),
        (10_000, 400, (1, 12)),
        (400, 10_000, (12, 1)),
        (5000, 5000, (3, 3)),
    ],
)
def test_tilings_of_the_full_geometry(width: int, height: int, tiling: tuple[int, int]) -> None:
    assert tiling_of(height, width, FULL) == tiling


def test_no_tiling_has_more_crops_than_allowed() -> None:
    for geometry in (FULL, SMALL):
        for width in range(1, 3000, 173):
            for height in range(1, 3000, 211):
                rows, columns = tiling_of(height, width, geometry)
                assert rows >= 1
                assert columns >= 1
                assert rows * columns <= geometry.max_crops


@pytest.mark.parametrize("geometry", [FULL, SMALL], ids=["full", "small"])
@pytest.mark.parametrize("size", [(640, 480), (90, 400), (7, 3)])
def test_crops_overlap_by_two_margins(geometry: CropGeometry, size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), np.uint8)
    picture = Image.fromarray(pixels)
    crops = cropped(picture, geometry)
    rows, columns = crops.tiling
    local = crops.pixels[1:].reshape(rows, columns, geometry.size, geometry.size, 3)
    overlap = geometry.margins
    for i in range(rows):
        for j in range(columns - 1):
            assert (local[i, j, :, -overlap:] == local[i, j + 1, :, :overlap]).all()
    for i in range(rows - 1):
        assert (local[i, 0, -overlap:] == local[i + 1, 0, :overlap]).all()
    if crops.tiling == (1, 1):
        assert (crops.pixels[0] == crops.pixels[1]).all()
    whole = picture.resize((geometry.size, geometry.size), Image.Resampling.LANCZOS)
    assert (crops.pixels[0] == np.asarray(whole)).all()

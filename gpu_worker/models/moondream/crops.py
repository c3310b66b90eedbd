"""From a picture to crops: the whole picture at the encoder's size, and overlapping parts of it in more detail.

    the picture, resized to rows x columns windows and a margin around them; each crop is a window with its margins

        |margin|  window  |  window  |margin|
        [------ crop ------]
                   [------ crop ------]

Neighbouring crops overlap by two margins. `joined` (see `encoder`) drops the margins at inner edges again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

UInt8Array = npt.NDArray[np.uint8]
Tiling = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CropGeometry:
    """patch: pixels; grid and margin: patches per side of a crop, and of its overlap; max_crops: local crops."""

    patch: int = 14
    grid: int = 27
    margin: int = 4
    max_crops: int = 12

    @property
    def size(self) -> int:
        """Pixels per side of a crop."""
        return self.patch * self.grid

    @property
    def window(self) -> int:
        """Pixels per side of a crop without its margins."""
        return self.patch * (self.grid - 2 * self.margin)

    @property
    def margins(self) -> int:
        """Pixels of the margins of both sides."""
        return 2 * self.patch * self.margin


@dataclass(frozen=True, slots=True)
class Crops:
    """pixels: uint8 [1 + rows * columns, size, size, 3], the whole picture first. tiling: (rows, columns)."""

    pixels: UInt8Array
    tiling: Tiling


def tiling_of(height: int, width: int, geometry: CropGeometry) -> Tiling:
    """Rows and columns of local crops for a picture of `height` x `width` pixels.

    The numbers are those of the reference implementation, but never make more than `max_crops` crops. The
    reference exceeds that for pictures that are very wide or very high."""
    window, most = geometry.window, geometry.max_crops
    height, width = height - geometry.margins, width - geometry.margins
    if height <= window or width <= window:
        return 1, 1
    rows, columns = math.ceil(height / window), math.ceil(width / window)
    if rows * columns > most:
        share = math.sqrt(most / (rows * columns))
        rows, columns = max(1, math.floor(rows * share)), max(1, math.floor(columns * share))
        return min(rows, most // columns) or 1, min(columns, most // rows) or 1
    rows = max(rows, math.floor(math.sqrt(most * height / width)))
    columns = max(columns, math.floor(math.sqrt(most * width / height)))
    if rows * columns > most:
        if columns > rows:
            columns = most // rows
        else:
            rows = most // columns
    return max(1, rows), max(1, columns)


def cropped(picture: Image.Image, geometry: CropGeometry) -> Crops:
    """The crops of an RGB picture."""
    from PIL.Image import Resampling

    rows, columns = tiling_of(picture.height, picture.width, geometry)
    size, window = geometry.size, geometry.window
    pixels = np.zeros((1 + rows * columns, size, size, 3), np.uint8)
    pixels[0] = np.asarray(picture.resize((size, size), Resampling.LANCZOS))
    target = columns * window + geometry.margins, rows * window + geometry.margins
    whole = np.asarray(picture.resize(target, Resampling.LANCZOS))
    for i in range(rows):
        for j in range(columns):
            pixels[1 + i * columns + j] = whole[i * window : i * window + size, j * window : j * window + size]
    return Crops(pixels, (rows, columns))

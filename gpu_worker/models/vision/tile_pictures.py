"""Pictures as SmolVLM takes them: enlarged or made smaller until the longer side has so many pixels, then cut into
square tiles, behind which the whole picture comes as one more:

    1000 x 650  ->  2048 x 1332  ->  2048 x 1536   sides of whole tiles of 512, each resized by itself
                ->  4 x 3 tiles, and the whole at 512 x 512

The pixels are those of transformers' processor without torchvision, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.gpu_worker.exceptions import require
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.pictures import (
    ResizedPictures,
    check_kind,
    check_switches,
    check_unequal,
    must,
    numbers_of_colours,
)
from petiole.gpu_worker.models.vision.writing import Writing
from petiole.gpu_worker.request.prepared_images import ImageLayout, PreparedImage

if TYPE_CHECKING:
    from PIL import Image

_MOST_EDGE = 4096
"""Pixels: transformers makes larger pictures smaller."""
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TilePictures(ResizedPictures):
    """tile: pixels of a tile's side. edge: of the longer side; one of a tile's: pictures are not cut. writing: see
    `TowerConfig`."""

    tile: int
    edge: int
    writing: Writing

    @property
    def most_tiles(self) -> int:
        """The most tiles along a side."""
        return -(-self.edge // self.tile)

    @property
    def max_positions(self) -> int:
        return self._positions(self.most_tiles, self.most_tiles)

    @property
    def longest(self) -> int:
        return self.tile // self.patch

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        view.check_of_one_size(field)
        check_unequal(width, height, field)
        least = self._positions(1, 1)
        require(
            least <= most, field, f"must be a picture of at most {most} positions", f"{least}, the fewest here"
        )
        edges = (min(self.edge, tiles * self.tile) for tiles in range(self.most_tiles, 0, -1))
        sizes = (self._tiled(width, height, edge) for edge in edges)
        found = ((self._positions(*self._tiling(size)), size) for size in sizes)
        n, size = next((n, size) for n, size in found if n <= most)
        return ImageLayout(n, size=size)

    def prepared(self, picture: Image.Image, content_hash: int, layout: ImageLayout) -> PreparedImage:
        assert layout.size is not None
        first = self._scaled(*picture.size, min(self.edge, max(layout.size)))
        whole = picture.resize(first, self.resample).resize(layout.size, self.resample)
        rows, columns = tiling = self._tiling(layout.size)
        pixels = np.array(whole.resize((self.tile, self.tile), self.resample))[None]
        if rows * columns > 1:
            cut = np.array(whole).reshape(rows, self.tile, columns, self.tile, 3).swapaxes(1, 2)
            pixels = np.concatenate([cut.reshape(-1, self.tile, self.tile, 3), pixels])
        side = self.longest * self.patch  # of whole patches: the tower leaves out what is over
        pixels = np.ascontiguousarray(pixels[:, :side, :side])
        patches = len(pixels) * self.longest**2
        return PreparedImage(content_hash, layout.n_positions, pixels, tiling, n_patches=patches)

    def _tiling(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns."""
        return size[1] // self.tile, size[0] // self.tile

    def _positions(self, rows: int, columns: int) -> int:
        side = self.tile // self.side
        tiles = [(side, side)] * (1 + (rows * columns if rows * columns > 1 else 0))
        return sum(max(1, -one) for one in self.writing.of(tiles, (rows, columns)))

    def _tiled(self, width: int, height: int, edge: int) -> tuple[int, int]:
        """The width and the height, of whole tiles, of a picture whose longer side has `edge` pixels before."""
        tile, (wide, high) = self.tile, self._scaled(width, height, edge)
        ratio = wide / high
        if wide >= high:
            wide = -(-wide // tile) * tile
            return wide, -(-int(wide / ratio) // tile) * tile
        high = -(-high // tile) * tile
        return -(-int(high * ratio) // tile) * tile, high

    @staticmethod
    def _scaled(width: int, height: int, edge: int) -> tuple[int, int]:
        """The longer side becomes `edge`, the other one even."""
        ratio = width / height
        short = int(edge / ratio) if width >= height else int(edge * ratio)
        short = max(1, short + short % 2)
        return (edge, short) if width >= height else (short, edge)


def tile_pictures(tower: TowerConfig, given: Mapping[str, Any]) -> TilePictures:
    """As `grid_pictures`."""
    check_kind(given, "SmolVLMImageProcessor")
    check_switches(given, do_resize=True, do_rescale=True, do_normalize=True)
    tile = _edge(given, "max_image_size", 364)
    side = tower.table * tower.patch
    limit = f"be {side}, as in config.json, or up to {tower.patch - 1} more"
    must(tile // tower.patch == tower.table, "max_image_size.longest_edge", limit, tile)
    edge = _edge(given, "size", 4 * 364)
    must(
        tile <= edge <= _MOST_EDGE, "size.longest_edge", f"be a number of pixels from {tile} to {_MOST_EDGE}", edge
    )
    splits = given.get("do_image_splitting", True)
    must(splits is True, "do_image_splitting", "be true", splits)
    assert tower.writing is not None
    colours = numbers_of_colours(given, _HALF, _HALF, resample=1)
    found = TilePictures(tower.patch, tower.merge, *colours, tile=tile, edge=edge, writing=tower.writing)
    most = len(getattr(tower.writing, "places", ()))
    must(
        found.most_tiles <= most,
        "size.longest_edge",
        f"be at most {most * tile}, for which there are tokens",
        edge,
    )
    return found


def _edge(given: Mapping[str, Any], key: str, default: int) -> Any:
    size = given.get(key, {"longest_edge": default})
    must(isinstance(size, Mapping) and type(size.get("longest_edge")) is int, key, "have a longest_edge", size)
    return size["longest_edge"]

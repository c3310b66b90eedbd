"""Pictures as Mistral's models take them: the longer side within a limit, both rounded up to whole blocks. Behind
each row of blocks stands a token of text, whose embedding counts among the picture's features:

    [IMG] [IMG] [IMG_BREAK]
    [IMG] [IMG] [IMG_END]

The pixels are those of transformers' processor without torchvision, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.pictures import (
    CLIP_MEAN,
    CLIP_STD,
    ResizedPictures,
    check_kind,
    check_switches,
    check_unequal,
    must,
    numbers_of_colours,
)
from petiole.gpu_worker.request.prepared_images import ImageLayout

_MOST_EDGE = 2**14
"""Pixels: far above every model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPictures(ResizedPictures):
    """edge: the most pixels of the longer side."""

    edge: int

    @property
    def max_positions(self) -> int:
        blocks = -(-self.edge // self.side)
        return blocks * (blocks + 1)

    @property
    def longest(self) -> int:
        return -(-self.edge // self.side) * self.merge

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        view.check_of_one_size(field)
        check_unequal(width, height, field)
        edge, (rows, columns) = self.edge, self._blocks(width, height, self.edge)
        while rows * (columns + 1) > most and rows * columns > 1:
            edge = (max(rows, columns) - 1) * self.side
            rows, columns = self._blocks(width, height, edge)
        return ImageLayout(rows * (columns + 1), size=(columns * self.side, rows * self.side))

    def _blocks(self, width: int, height: int, edge: int) -> tuple[int, int]:
        """Rows and columns of a picture whose longer side has at most `edge` pixels."""
        ratio = max(height / edge, width / edge, 1.0)
        high, wide = (max(1, int(side / ratio)) if ratio > 1 else side for side in (height, width))
        return (high - 1) // self.side + 1, (wide - 1) // self.side + 1


def row_pictures(tower: TowerConfig, given: Mapping[str, Any]) -> RowPictures:
    """As `grid_pictures`."""
    check_kind(given, "PixtralImageProcessor")
    patch = given.get("patch_size", tower.patch)
    known = (tower.patch, {"height": tower.patch, "width": tower.patch})
    must(patch in known, "patch_size", f"be {tower.patch}, as in config.json", patch)
    merge = given.get("spatial_merge_size", tower.merge)
    must(merge == tower.merge, "spatial_merge_size", f"be {tower.merge}, as in config.json", merge)
    check_switches(given, do_resize=True, do_rescale=True, do_normalize=True)
    size = given.get("size", {"longest_edge": 1024 if given else tower.edge})
    edge: Any = size.get("longest_edge") if isinstance(size, Mapping) else None
    limit = f"be a number of pixels from {tower.block} to {_MOST_EDGE}"
    must(type(edge) is int and tower.block <= edge <= _MOST_EDGE, "size.longest_edge", limit, edge)
    colours = numbers_of_colours(given, CLIP_MEAN, CLIP_STD, resample=3)
    return RowPictures(tower.patch, tower.merge, *colours, edge=edge)

"""Pictures as Gemma's models take them: Gemma 3 all at one size, Gemma 4 as many blocks as a budget allows. Their
positions are those of text. The pixels are those of transformers' processors without torchvision, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.pictures import (
    ResizedPictures,
    check_kind,
    check_sides,
    check_switches,
    must,
    numbers_of_colours,
)
from petiole.gpu_worker.request.prepared_images import ImageLayout

BUDGETS = (70, 140, 280, 560, 1120)
"""Positions of a picture that Gemma 4 has learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SquarePictures(ResizedPictures):
    """blocks: of a side."""

    blocks: int

    @property
    def max_positions(self) -> int:
        return self.blocks**2

    @property
    def longest(self) -> int:
        return self.blocks * self.merge

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        view.check_of_one_size(field)
        return ImageLayout(self.blocks**2, size=(self.blocks * self.side,) * 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPictures(ResizedPictures):
    """budget: positions of a picture, at most; small pictures grow, too."""

    budget: int

    @property
    def max_positions(self) -> int:
        return self.budget

    @property
    def longest(self) -> int:
        return self.budget * self.merge

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        """Sides are rounded down to whole blocks."""
        view.check_of_one_size(field)
        budget = max((one for one in BUDGETS if one <= min(most, self.budget)), default=min(most, self.budget))
        by = math.sqrt(budget * self.side**2 / (width * height))
        rows, columns = (math.floor(by * one / self.side) for one in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, budget)
        elif columns == 0:
            rows, columns = min(height // width, budget), 1
        return ImageLayout(rows * columns, size=(columns * self.side, rows * self.side))

    def values(self) -> npt.NDArray[np.float32]:
        """From -1 to 1."""
        zero_to_one = ResizedPictures.values(self)
        found: npt.NDArray[np.float32] = 2 * (zero_to_one - np.float32(0.5))
        return found


def square_pictures(tower: TowerConfig, given: Mapping[str, Any]) -> SquarePictures:
    """As `grid_pictures`; the size that no file says is the tower's."""
    check_kind(given, "Gemma3ImageProcessor")
    check_switches(given, do_resize=True, do_rescale=True, do_normalize=True, do_pan_and_scan=False)
    pixels = tower.table * tower.patch
    known = {"height": pixels, "width": pixels}
    size = given.get("size", known)
    must(size == known, "size", f"be {pixels} x {pixels}, as in config.json", size)
    colours = numbers_of_colours(given, (0.5,) * 3, (0.5,) * 3, resample=2)
    return SquarePictures(tower.patch, tower.merge, *colours, blocks=tower.table // tower.merge)


def budget_pictures(tower: TowerConfig, given: Mapping[str, Any]) -> BudgetPictures:
    """As `grid_pictures`."""
    check_kind(given, "Gemma4ImageProcessor")
    check_sides(given, patch_size=(tower.patch, 16), pooling_kernel_size=(tower.merge, 3))
    check_switches(given, do_resize=True, do_rescale=True)
    budget = given.get("max_soft_tokens", 280)
    must(budget in BUDGETS, "max_soft_tokens", f"be one of {', '.join(map(str, BUDGETS))}", budget)
    must(budget * tower.merge <= tower.table, "max_soft_tokens", f"fit into {tower.table} positions", budget)
    normal = given.get("do_normalize", False)
    must(isinstance(normal, bool), "do_normalize", "be true or false", normal)
    plain = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    known = given if normal else {**given, **plain}
    colours = numbers_of_colours(known, plain["image_mean"], plain["image_std"], resample=3)
    return BudgetPictures(tower.patch, tower.merge, *colours, budget=budget)

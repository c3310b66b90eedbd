"""From a picture's size to its layout, and from a picture to its pixels, as Qwen's models take it.

    1000 x 650  ->  992 x 640          both sides multiples of a block's, the area within limits
                ->  31 x 20 blocks     a position each, row by row
                    axis 0  0 0 0 ...          time
                    axis 1  0 0 0 ... 1 1 1    row
                    axis 2  0 1 2 ... 0 1 2    column

Text behind it goes on after the greatest number. The pixels are those of transformers' processor without
torchvision, bit by bit."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.gpu_worker.exceptions import ModelError, require
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.request.prepared_images import ImageLayout, PreparedImage

if TYPE_CHECKING:
    from PIL import Image

MOST_UNEQUAL = 200
"""How many times as long as the other a side may be."""
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_LEAST, _MOST, _LARGEST = 56 * 56, 28 * 28 * 1280, 2**28
"""Pixels of a picture in transformers' class, where no file says how many; and a limit far above every model."""
_EDGES = ("shortest_edge", "longest_edge")


@dataclass(frozen=True, slots=True)
class ResizedPictures(ABC):
    """Pictures that are resized whole. patch, merge: see `TowerConfig`. mean, std: of the numbers from 0 to 1 that
    stand for a colour's bytes, by colour. resample: of Pillow."""

    patch: int
    merge: int
    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    scale: float = 1 / 255
    resample: int = 3

    @property
    @abstractmethod
    def max_positions(self) -> int: ...

    @property
    @abstractmethod
    def longest(self) -> int:
        """The most patches of a side."""

    @property
    def side(self) -> int:
        """Pixels of the side of a block."""
        return self.patch * self.merge

    @abstractmethod
    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        """See `Pictures`."""

    def prepared(self, picture: Image.Image, content_hash: int, layout: ImageLayout) -> PreparedImage:
        assert layout.size is not None
        pixels = np.array(picture.resize(layout.size, self.resample))[None]
        patches = layout.size[0] * layout.size[1] // self.patch**2
        return PreparedImage(content_hash, layout.n_positions, pixels, rotary=layout.rotary, n_patches=patches)

    def values(self) -> npt.NDArray[np.float32]:
        """[3, 256]: what stands for each byte of each colour."""
        scaled = (np.arange(256).astype(np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(one, np.float32)[:, None] for one in (self.mean, self.std))
        found: npt.NDArray[np.float32] = (scaled - mean) / std
        return found


@dataclass(frozen=True, slots=True)
class GridPictures(ResizedPictures):
    """As Qwen's models take them. least, most: pixels of a resized picture."""

    least: int = _LEAST
    most: int = _MOST

    @property
    def max_positions(self) -> int:
        return self.most // self.side**2

    @property
    def longest(self) -> int:
        return int((self.max_positions * self.merge**2 * MOST_UNEQUAL) ** 0.5) + self.merge

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        least, area = self._area(field, most, view)
        return self._layout(width, height, field, Area(least, area), area)

    def layout_of_frames(
        self, width: int, height: int, field: str, most: int, view: View, *, n: int, at_once: int
    ) -> ImageLayout:
        """The same for each of `n` frames, where the limits are those of all frames together. at_once: frames of
        an image."""
        counted, side = round(n / at_once) * at_once, self.side
        if min(width, height) < side:
            grown = max(side / height, side / width)
            width, height = int(width * grown), int(height * grown)
        least, area = self._area(field, most, view)
        largest = min(self.most, area * min(n, counted))
        smallest = self.least if view.min_pixels is None else least * counted
        return self._layout(
            width, height, field, Area(min(smallest, largest), largest, n, counted), most * side**2
        )

    def _layout(self, width: int, height: int, field: str, area: Area, most: int) -> ImageLayout:
        """most: pixels of a picture."""
        check_unequal(width, height, field)
        side = self.side
        rows, columns = _blocks(resized(height, width, side, area), side)
        fitting = most // side**2
        if rows * columns > fitting:  # which grew by more than there is room for
            largest = _blocks(_within(height, width, side, Area(0, most)), side)
            rows, columns = min((rows, columns), largest, key=math.prod)
        limit = f"must be a picture of at most {fitting} positions"
        require(rows * columns <= fitting, field, limit, f"{rows * columns} for {width} x {height}")
        rotary = np.zeros((3, rows * columns), np.int32)
        rotary[1], rotary[2] = np.divmod(np.arange(rows * columns), columns)
        return ImageLayout(rows * columns, rotary, (columns * side, rows * side))

    def _area(self, field: str, most: int, view: View) -> tuple[int, int]:
        """The least and the most pixels of a picture. most: positions."""
        block = self.side**2
        area = min(self.most, most * block)
        if view.max_pixels is not None:
            limit = f"must be at least {block}, the pixels of a token"
            require(view.max_pixels >= block, f"{field}.max_pixels", limit, view.max_pixels)
            area = min(area, view.max_pixels)
        if view.min_pixels is None:
            return min(self.least, area), area
        limit = f"must be at most {area}, the most pixels of this picture here"
        require(view.min_pixels <= area, f"{field}.min_pixels", limit, view.min_pixels)
        return view.min_pixels, area


def check_unequal(width: int, height: int, field: str) -> None:
    """Raises InvalidRequest."""
    limit = f"must have sides of which one is at most {MOST_UNEQUAL} times as long as the other"
    require(max(width, height) <= MOST_UNEQUAL * min(width, height), field, limit, f"{width} x {height}")


@dataclass(frozen=True, slots=True)
class Area:
    """The least and the most pixels: of a picture, or of `n` frames together, which are compared as `counted`."""

    least: int
    most: int
    n: int = 1
    counted: int = 1


def resized(height: int, width: int, side: int, area: Area) -> tuple[int, int]:
    """The height and width of a picture whose sides become multiples of `side`, and its area as it must be."""
    high, wide = round(height / side) * side, round(width / side) * side
    if area.counted * high * wide > area.most:
        return _within(height, width, side, area)
    if area.counted * high * wide < area.least:
        grown = math.sqrt(area.least / (area.n * height * width))
        high, wide = math.ceil(height * grown / side) * side, math.ceil(width * grown / side) * side
    return high, wide


def _within(height: int, width: int, side: int, area: Area) -> tuple[int, int]:
    """The same of a picture whose area becomes the most, then its sides are rounded down."""
    shrunk = math.sqrt(area.n * height * width / area.most)
    high, wide = (max(side, math.floor(one / shrunk / side) * side) for one in (height, width))
    return high, wide


def _blocks(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Rows and columns."""
    return size[0] // side, size[1] // side


def grid_pictures(tower: TowerConfig, given: Mapping[str, Any]) -> GridPictures:
    """given: what the model's files say of them; what they do not say is as the class in transformers has it.
    Raises ModelError for pictures that are made ready in another way."""
    check_kind(given, "Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
    check_sides(given, patch_size=(tower.patch, 14), merge_size=(tower.merge, 2))
    check_switches(given, do_resize=True, do_rescale=True, do_normalize=True)
    least, most = _limits(given)
    for key, value in zip(_EDGES, (least, most), strict=True):
        known = type(value) is int and (
            tower.block**2 <= value <= _LARGEST or (key == "shortest_edge" and value > 0)
        )
        must(known, f"size.{key}", f"be a number of pixels from {tower.block**2} to {_LARGEST}", value)
    must(least <= most, "size.shortest_edge", f"be at most {most}, the longest_edge", least)
    colours = numbers_of_colours(given, CLIP_MEAN, CLIP_STD, resample=3)
    return GridPictures(tower.patch, tower.merge, *colours, least=least, most=most)


def check_kind(given: Mapping[str, Any], kind: str, *others: str) -> None:
    """The class in transformers that makes pictures ready."""
    found = given.get("image_processor_type", kind)
    must(found in (kind, f"{kind}Fast", f"{kind}Pil", *others), "image_processor_type", f"be {kind}", found)


def check_sides(given: Mapping[str, Any], **known: tuple[int, int]) -> None:
    """By key: what it must be, and what it is where no file says it."""
    for key, (known_side, default) in known.items():
        found = given.get(key, default)
        must(found == known_side, key, f"be {known_side}, as in config.json", found)


def check_switches(given: Mapping[str, Any], **known: bool) -> None:
    """By key: what it must be, and is where no file says it."""
    for key, value in {**known, "do_center_crop": False}.items():
        found = given.get(key, value)
        must((found or False) is value, key, f"be {str(value).lower()}", found)


def numbers_of_colours(
    given: Mapping[str, Any], mean: Sequence[float], std: Sequence[float], resample: int
) -> tuple[tuple[float, ...], tuple[float, ...], float, int]:
    """Mean, standard deviation, scale and resampling, or these defaults: see `ResizedPictures`."""
    found_mean, found_std = _colours(given, "image_mean", mean), _colours(given, "image_std", std)
    must(min(found_std) > 0, "image_std", "be above 0", list(found_std))
    scale, way = given.get("rescale_factor", 1 / 255), given.get("resample", resample)
    must(isinstance(scale, float) and 0 < scale <= 1, "rescale_factor", "be above 0 and at most 1", scale)
    must(type(way) is int and 0 <= way <= 5, "resample", "be a number of Pillow's, 0 to 5", way)
    return found_mean, found_std, scale, way


def _limits(given: Mapping[str, Any]) -> tuple[Any, Any]:
    """The least and the most pixels: `min_pixels` and `max_pixels` come before `size`, which has both, or neither
    if it is missing."""
    size = given.get("size")
    must(isinstance(size, Mapping | None), "size", "be an object", size)
    size = dict(zip(_EDGES, (_LEAST, _MOST), strict=True)) if size is None else dict(size)
    size |= {
        edge: given[key]
        for edge, key in zip(_EDGES, ("min_pixels", "max_pixels"), strict=True)
        if given.get(key) is not None
    }
    known = all(size.get(edge) is not None for edge in _EDGES)
    must(known, "size", f"have {' and '.join(_EDGES)}", list(size))
    return tuple(size[edge] for edge in _EDGES)


def _colours(given: Mapping[str, Any], key: str, default: Sequence[float]) -> tuple[float, ...]:
    found = given.get(key, default)
    known = isinstance(found, list | tuple) and len(found) == 3 and all(type(one) in (int, float) for one in found)
    must(known and all(abs(one) <= 1000 for one in found), key, "be three numbers", found)
    return tuple(map(float, found))


def must(known: bool, key: str, limit: str, value: object) -> None:
    """Raises ModelError, naming the key of a file, the limit and the value."""
    if not known:
        raise ModelError(
            f"processor_config.json or preprocessor_config.json: {key} must {limit}, got {shown(value)}"
        )

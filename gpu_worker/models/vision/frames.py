"""Videos as families take them. Sizes and texts are those of transformers' processors.

Qwen3-VL, Qwen3.5   <0.3 seconds> image <1.3 seconds> image   an image is two frames; the time is text
Qwen2.5-VL          image image                               an image is two frames; the time is a position
Gemma 4             00:00 image 00:01 image                   an image is a frame"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from petiole.contract.requests.images import View
from petiole.gpu_worker.exceptions import require
from petiole.gpu_worker.models.vision.dimensions import TowerConfig
from petiole.gpu_worker.models.vision.gemma_pictures import budget_pictures
from petiole.gpu_worker.models.vision.pictures import GridPictures, ResizedPictures, grid_pictures, must
from petiole.gpu_worker.request.prepared_images import ImageLayout, UInt8Array
from petiole.gpu_worker.request.videos import Frames, Moment, Room

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class ResizedVideos(ABC):
    """Implements `Videos`: frames are resized as pictures are. mark: as there. frames: of an image."""

    pictures: ResizedPictures
    mark: int
    frames: int

    @property
    def placeholder(self) -> int:
        return self.mark

    @property
    def resample(self) -> int:
        return self.pictures.resample

    def pixels(self, frame: Image.Image, layout: ImageLayout) -> UInt8Array:
        pixels: UInt8Array = self.pictures.prepared(frame, 0, layout).pixels[0]
        return pixels

    def n_patches(self, layout: ImageLayout) -> int:
        return layout.n_positions * self.pictures.merge**2

    @abstractmethod
    def moments(self, frames: Frames, field: str, room: Room, view: View) -> Sequence[Moment]: ...

    def groups(self, n: int) -> list[tuple[int, ...]]:
        """The numbers of `n` frames, image by image. The last frame is taken again if there are too few."""
        return [tuple(min(k + i, n - 1) for i in range(self.frames)) for k in range(0, n, self.frames)]


@dataclass(frozen=True, slots=True)
class TimedVideos(ResizedVideos):
    """As Qwen3-VL takes them: the limits of pixels are those of all frames together. around: the tokens before and
    behind an image."""

    pictures: GridPictures
    around: tuple[int, int]

    def moments(self, frames: Frames, field: str, room: Room, view: View) -> Sequence[Moment]:
        groups, (begin, end) = self.groups(len(frames.times)), self.around
        most = most_of(len(groups), room, field)
        layout = self.pictures.layout_of_frames(
            *frames.size, field, most, view, n=len(frames.times), at_once=self.frames
        )
        times = [(frames.times[group[0]] + frames.times[group[-1]]) / 2 for group in groups]
        return [
            Moment(group, layout, (f"<{at:.1f} seconds>", begin, self.placeholder, end))
            for group, at in zip(groups, times, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PlacedVideos(ResizedVideos):
    """As Qwen2.5-VL takes them: the first axis of positions is time. per_second: positions of a second."""

    per_second: float

    def moments(self, frames: Frames, field: str, room: Room, view: View) -> Sequence[Moment]:
        groups = self.groups(len(frames.times))
        most = most_of(len(groups), room, field)
        layout = self.pictures.layout(*frames.size, field, most, view)
        assert layout.rotary is not None
        found, ahead, side = list[Moment](), 0, int(layout.rotary.max()) + 1
        for k, group in enumerate(groups):
            at = int(np.float32(k) * (np.float32(self.per_second) * np.float32(self.frames / frames.rate)))
            rotary = layout.rotary + np.array([[at], [0], [0]], np.int32) - ahead  # all begin where the first does
            ahead = max(ahead, at + 1, side)
            found.append(Moment(group, replace(layout, rotary=rotary), (self.placeholder,)))
        return found


@dataclass(frozen=True, slots=True)
class ClockVideos(ResizedVideos):
    """As Gemma 4 takes them: minutes and seconds before each frame. around: the tokens before and behind it."""

    around: tuple[int, int]

    def moments(self, frames: Frames, field: str, room: Room, view: View) -> Sequence[Moment]:
        groups, (begin, end) = self.groups(len(frames.times)), self.around
        layout = self.pictures.layout(*frames.size, field, most_of(len(groups), room, field), view)
        clock = [f"{int(at // 60):02d}:{int(at % 60):02d} " for at in frames.times]
        return [
            Moment((k,), layout, (f"{' ' * (k > 0)}{clock[k]}", begin, self.placeholder, end)) for (k,) in groups
        ]


def most_of(n: int, room: Room, field: str) -> int:
    """The most positions of each of `n` images. Raises InvalidRequest."""
    require(n <= room.video, field, f"must be a video of at most {room.video} positions", f"{n} images")
    return min(room.image, room.video // n)


def no_videos(tower: TowerConfig, pictures: ResizedPictures, given: Mapping[str, Any]) -> None:
    """Of a family whose models take none."""


def clock_videos(tower: TowerConfig, pictures: ResizedPictures, given: Mapping[str, Any]) -> ResizedVideos | None:
    """As `grid_videos`."""
    if tower.video is None or tower.video.around is None:
        return None
    described = {"max_soft_tokens": 70, **given.get("video_processor", {})}
    own = budget_pictures(tower, described)
    _check_colours(own, pictures)
    return ClockVideos(own, tower.video.mark, tower.frames, tower.video.around)


def grid_videos(tower: TowerConfig, pictures: ResizedPictures, given: Mapping[str, Any]) -> ResizedVideos | None:
    """given: see `grid_pictures`; of videos under `video_processor`. None for a model without videos. Raises
    ModelError."""
    if tower.video is None:
        return None
    described = given.get("video_processor", given)
    described = {key: value for key, value in described.items() if key != "image_processor_type"}
    own = grid_pictures(tower, described)
    _check_colours(own, pictures)
    patch = described.get("temporal_patch_size", 2)
    must(patch == tower.frames, "temporal_patch_size", f"be {tower.frames}, as in config.json", patch)
    if tower.video.around is not None:
        return TimedVideos(own, tower.video.mark, tower.frames, tower.video.around)
    return PlacedVideos(own, tower.video.mark, tower.frames, tower.video.per_second)


def _check_colours(own: ResizedPictures, pictures: ResizedPictures) -> None:
    """The tower has one table of what stands for colours."""
    for name in ("mean", "std", "scale"):
        value, known = getattr(own, name), getattr(pictures, name)
        must(value == known, f"video_processor's {name}", f"be {known}, as of pictures", value)

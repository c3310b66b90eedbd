"""Videos as the engine knows them: some frames, of which one or a few become an image, with text between them.

    file    ------------------------------------------------      18 s at 30 frames a second
    frames  |    |    |    |    |    |    |    |    |    |        of which some are taken, each with its time
    images  [---------][---------][---------][---------]...       here of two frames each
    text    <0.3 seconds> image <1.3 seconds> image ...

Behind that a video is its images: they are encoded, cached and cut by chunks one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from petiole.contract.requests.images import View
from petiole.gpu_worker.request.prepared_images import ImageLayout, UInt8Array

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of a video that are seen. times: of each, in seconds from the video's beginning. rate: how many
    there are to a second. size: (width, height), as they are turned."""

    times: tuple[float, ...]
    rate: float
    size: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Moment:
    """Frames that become one image. numbers: of the frames. written: what stands in the text for it, of tokens and
    text, with one placeholder."""

    numbers: tuple[int, ...]
    layout: ImageLayout
    written: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Room:
    """The most positions: of an image, and of a video."""

    image: int
    video: int


class Videos(Protocol):
    """Turns videos into what a model encodes. Thread-safe; no tensors."""

    @property
    def mark(self) -> int:
        """The token that a chat template writes for a video."""
        ...

    @property
    def placeholder(self) -> int:
        """The token that stands for one of its images."""
        ...

    @property
    def resample(self) -> int:
        """How frames are resized, of Pillow's ways."""
        ...

    def moments(self, frames: Frames, field: str, room: Room, view: View) -> Sequence[Moment]:
        """What the frames become. Raises InvalidRequest, naming `field`, for what the model does not take."""
        ...

    def pixels(self, frame: Image.Image, layout: ImageLayout) -> UInt8Array:
        """uint8 [height, width, 3] of an RGB picture."""
        ...

    def n_patches(self, layout: ImageLayout) -> int: ...

"""From the frames of a video, or from its file, to images and to what is written for them.

A list's frames are files of pictures, all of one size. Of a file as many frames are taken as `fps` asks, at equal
distances from the first to the last one, as transformers takes them. Its pixels are decoded only if a step needs
those of one of its images, and then those of all are.

A child reads a file (`pip install 'petiole[video]'`), within limits of time and memory. Its packets are counted
and one frame is decoded when the request is prepared. So most damage is known then."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field as given
from functools import partial
from importlib.util import find_spec
from queue import LifoQueue
from typing import Any

import numpy as np

from petiole.contract.requests.images import USUAL_FPS, View
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.children import Child, ChildEnded, _video
from petiole.gpu_worker.children._video import CPU_S, MEMORY_BYTES, READABLE
from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.preparation.images import checked_size, content_hash_of, decoded_of_size
from petiole.gpu_worker.request.prepared_images import (
    ImageLayout,
    ImageLimits,
    PreparedImage,
    RequestImage,
    UInt8Array,
)
from petiole.gpu_worker.request.videos import Frames, Room, Videos

CHILDREN = 2
_children: LifoQueue[Child] = LifoQueue()
for _ in range(CHILDREN):
    _children.put(Child(_video.__file__))


@dataclass(frozen=True, slots=True)
class Film:
    """n: frames; rate: how many there are to a second; coded, size: (width, height), before they are turned and
    after."""

    data: bytes
    field: str
    n: int
    rate: float
    coded: tuple[int, int]
    size: tuple[int, int]

    def pixels(self, numbers: Sequence[int], size: tuple[int, int], resample: int) -> UInt8Array:
        """uint8 [frames, height, width, 3] of the frames of these ascending numbers. size: (width, height) to
        which they are resized; resample: of Pillow. Raises InvalidRequest."""
        wanted = {"numbers": list(numbers), "coded": self.coded, "size": self.size}
        found = _asked(self.data, self.field, {**wanted, "to": size, "resample": resample})
        return np.frombuffer(found, np.uint8).reshape(len(numbers), size[1], size[0], 3)


def opened(data: bytes, field: str, most_pixels: int) -> Film:
    """A file whose packets are counted, and whose first frame is decoded. Raises InvalidRequest."""
    lacking = "must be a list of frames: this worker lacks petiole[video]"
    require(find_spec("av") is not None, field, lacking, "a file")
    found = _asked(data, field, {"most_pixels": most_pixels})
    return Film(data, field, found["n"], found["rate"], tuple(found["coded"]), tuple(found["size"]))


def _asked(data: bytes, field: str, question: dict[str, Any]) -> Any:
    child = _children.get()
    try:
        found = child.ask(json.dumps(question).encode() + b"\n" + data)
    except ChildEnded:
        limit = f"{READABLE} within {CPU_S:g} s of processor time and {MEMORY_BYTES} bytes of memory"
        raise InvalidRequest(field, limit, f"{len(data)} bytes that take more") from None
    finally:
        _children.put(child)
    if isinstance(found, dict) and "refused" in found:
        raise InvalidRequest(field, *found["refused"])
    return found


LEAST_FRAMES = 4
"""Of a file that has so many."""


@dataclass(frozen=True, slots=True)
class VideoInputs:
    """The images of a video, and what stands in the text for it, of tokens and text."""

    images: list[RequestImage]
    written: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class VideoReader:
    """Reads the videos of requests for one model. Each method raises InvalidRequest, here or in the images' `cut`;
    `field` names the part of a message."""

    videos: Videos
    limits: ImageLimits
    config: EngineConfig

    def of_frames(self, files: Sequence[bytes], field: str, view: View) -> VideoInputs:
        """files: of pictures."""
        view.check(field, video=True)
        most, fps = self.config.video_frames, view.fps or USUAL_FPS
        require(2 <= len(files) <= most, f"{field}.video", f"must have 2 to {most} frames", len(files))
        self._check_length(len(files) / fps, field)
        names = [f"{field}.video[{k}]" for k in range(len(files))]
        sizes = [checked_size(data, name, self.config) for data, name in zip(files, names, strict=True)]
        for name, size in zip(names, sizes, strict=True):
            require(size == sizes[0], name, f"must be as large as the first frame, {sizes[0]}", size)
        frames = Frames(tuple(k / fps for k in range(len(files))), fps, sizes[0])

        def pixels(layout: ImageLayout) -> Iterable[UInt8Array]:
            pictures = (decoded_of_size(data, name, sizes[0]) for data, name in zip(files, names, strict=True))
            return (self.videos.pixels(picture, layout) for picture in pictures)

        return self._inputs(frames, [content_hash_of(data) for data in files], field, view, pixels)

    def of_file(self, data: bytes, field: str, view: View) -> VideoInputs:
        view.check(field, video=True)
        most = self.config.video_max_bytes
        require(0 < len(data) <= most, field, f"must have 1 to {most} bytes", f"{len(data)} bytes")
        film = opened(data, field, self.config.image_max_pixels)
        self._check_length(film.n / film.rate, field)
        wanted = int(film.n / film.rate * (view.fps or USUAL_FPS))
        n = min(max(wanted, LEAST_FRAMES), self.config.video_frames, film.n)
        require(n >= 2, field, "must have at least 2 frames", film.n)
        taken = np.linspace(0, film.n - 1, n).round().astype(int).tolist()
        frames = Frames(tuple(k / film.rate for k in taken), n / film.n * film.rate, film.size)
        whole = content_hash_of(data)

        def pixels(layout: ImageLayout) -> Iterable[UInt8Array]:
            assert layout.size is not None
            return film.pixels(taken, layout.size, self.videos.resample)

        return self._inputs(frames, [(whole, k) for k in taken], field, view, pixels)

    def _check_length(self, seconds: float, field: str) -> None:
        most = self.config.video_seconds
        require(seconds <= most, field, f"must be at most {most} s long", f"{seconds:.1f} s")

    def _inputs(
        self,
        frames: Frames,
        hashes: Sequence[object],
        field: str,
        view: View,
        frame_pixels: Callable[[ImageLayout], Iterable[UInt8Array]],
    ) -> VideoInputs:
        """hashes: of the frames. frame_pixels: of all of them, in order."""
        room = Room(min(self.config.image_tokens, self.limits.max_positions), self.config.video_tokens)
        moments = self.videos.moments(frames, field, room, view)
        total = sum(moment.layout.n_positions for moment in moments)
        limit = f"must be a video of at most {room.video} positions"
        require(total <= room.video, field, limit, f"{total} for {len(frames.times)} frames")
        pixels = _Pixels(partial(frame_pixels, moments[0].layout))
        images = []
        for moment in moments:
            layout = moment.layout
            placed = b"" if layout.rotary is None else layout.rotary.tobytes()
            text = f"{[hashes[k] for k in moment.numbers]} {layout.size}".encode()
            key = int.from_bytes(hashlib.sha256(text + placed).digest()[:16], "big")
            cut = partial(self._cut, key, layout, partial(pixels.take, moment.numbers))
            images.append(RequestImage(key, layout.n_positions, layout.rotary, cut, size=layout.size, video=True))
        return VideoInputs(images, tuple(one for moment in moments for one in moment.written))

    def _cut(self, key: int, layout: ImageLayout, take: Callable[[], UInt8Array]) -> PreparedImage:
        patches = self.videos.n_patches(layout)
        return PreparedImage(key, layout.n_positions, take(), rotary=layout.rotary, n_patches=patches)


@dataclass(slots=True, eq=False)
class _Pixels:
    """The pixels of all frames, made when one is needed; each is kept until it is taken. Thread-safe."""

    pixels: Callable[[], Iterable[UInt8Array]]
    made: dict[int, UInt8Array] = given(default_factory=dict)
    mutex: threading.Lock = given(default_factory=threading.Lock)

    def take(self, numbers: Sequence[int]) -> UInt8Array:
        """uint8 [frames, height, width, 3]."""
        with self.mutex:
            if not self.made.keys() >= set(numbers):
                self.made = dict(enumerate(self.pixels()))
            own: Mapping[int, UInt8Array] = {k: self.made.pop(k) for k in set(numbers)}
        return np.stack([own[k] for k in numbers])

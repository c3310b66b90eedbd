"""Images as the engine knows them: their pixels, how many positions they take, and which positions see each other.

    tokens     BOS  [ - - - image - - - ]  question ...
    positions   0    1                 n    n+1
    region     [-------------------------]            with a lead of 1: BOS sees the image, and the image BOS

The model's processor decides what a picture becomes: from its size, as it is turned, follows a *layout*, and from
its file and its layout the pixels that are encoded. Where the positions of an image see each other, they are a
*region*, which is computed in one step: no chunk of a prefill ends inside it. A causal image may be cut by chunks.
What is cached never ends inside an image."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from petiole.gpu_worker.exceptions import require

UInt8Array = npt.NDArray[np.uint8]
Int32Array = npt.NDArray[np.int32]

IMAGE = -2
"""Stands for a position of an image among token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageLayout:
    """What a picture of some size becomes. n_positions: how many positions it takes. rotary: int32 [axes,
    n_positions], rotary positions from 0 on, for a model where they differ from KV indices. size: (width, height)
    to which the picture is resized; None if its pixels follow from its file alone."""

    n_positions: int
    rotary: Int32Array | None = None
    size: tuple[int, int] | None = None

    def key(self, file_hash: int) -> int:
        """128 bits that identify the pixels made of a file. One file becomes different pixels under different
        limits, and as many positions may be rows and columns of several shapes."""
        if self.size is None:
            return file_hash
        return int.from_bytes(hashlib.sha256(f"{file_hash} {self.size}".encode()).digest()[:16], "big")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PreparedImage:
    """The pixels of an image.

    content_hash: 128 bits that identify them; n_positions: how many positions the image takes.
    pixels: uint8 [crops or frames, height, width, 3]; tiling: rows and columns of the crops after the first.
    rotary: see `ImageLayout`. n_patches: of an image that is not cut; 0: its crops are counted.
    """

    content_hash: int
    n_positions: int
    pixels: UInt8Array
    tiling: tuple[int, int] = (1, 1)
    rotary: Int32Array | None = None
    n_patches: int = 0

    @property
    def n_encoded(self) -> int:
        """What it takes of an encode step: see `ImageLimits`."""
        return self.n_patches or len(self.pixels)


@dataclass(slots=True, eq=False)
class RequestImage:
    """An image of a request. It becomes pixels shortly before a step needs them, and again after each preemption.

    `cut` decodes it, and cuts or resizes it, on a preparation thread, or raises InvalidRequest; None if the
    request came with pixels. `prepared`: the pixels while they are at hand. `size`: see `ImageLayout`. `video`:
    whether it is part of one, which may take minutes to decode."""

    content_hash: int
    n_positions: int
    rotary: Int32Array | None = None
    cut: Callable[[], PreparedImage] | None = None
    prepared: PreparedImage | None = None
    size: tuple[int, int] | None = None
    video: bool = False

    @staticmethod
    def of(image: PreparedImage) -> RequestImage:
        size = image.pixels.shape[2], image.pixels.shape[1]
        return RequestImage(image.content_hash, image.n_positions, image.rotary, None, image, size)

    def forget(self) -> None:
        """Drop the crops, once the device has their embeddings."""
        if self.cut is not None:
            self.prepared = None


@dataclass(frozen=True, slots=True)
class ImagePlace:
    """The place of the request's image number `index` in a prompt of tokens."""

    index: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """Positions [begin, end). `bidirectional`: all of them see each other."""

    begin: int
    end: int
    bidirectional: bool


@dataclass(frozen=True, slots=True)
class Written:
    """How a picture stands in text. mark: the token that a chat template writes for it. parts: what stands in its
    place before the text becomes tokens, of tokens and text."""

    mark: int
    parts: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The images that a model takes.

    max_images: in one prompt; max_positions: of one image; max_crops: in one encode step, or patches of images
    that are not cut; one with more patches has a step of its own. patches: of a position of these; 0: images are
    cut. bidirectional: whether the positions of an image
    see each other. lead: how many positions before an image belong to its region. The KV of these positions
    depends on the image, so the image stands at position `lead` and is part of the KV's namespace.
    placeholder: the token that stands for an image among tokens, which the chat template writes; None: the model's
    processor says where images stand. written: what the chat template writes, if it is not the placeholder
    alone. boxes: what the width and the height of an image are in the boxes that the
    model writes; 0: the pixels of the resized image; None: it has not learnt any."""

    max_images: int
    max_positions: int
    max_crops: int
    bidirectional: bool
    lead: int = 0
    placeholder: int | None = None
    patches: int = 0
    written: Written | None = None
    boxes: int | None = None

    @property
    def max_region(self) -> int:
        """0: images are causal, and may be cut."""
        return self.lead + self.max_positions if self.bidirectional or self.lead else 0

    def too_small(self, sizes: Mapping[str, int]) -> tuple[str, int] | None:
        """The first of these settings that does not hold a whole region, and the least value that would. sizes:
        how many positions each allows, by name."""
        for name, size in sizes.items():
            least = self.max_region + 2 * (name == "max_model_len")  # a token of the question, one of the answer
            if size < least:
                return name, least
        return None

    def regions(self, images: Mapping[int, RequestImage]) -> tuple[Region, ...]:
        """The regions of images, which are given by the position where each begins."""
        found = (Region(at - self.lead, at + one.n_positions, self.bidirectional) for at, one in images.items())
        return tuple(found) if self.max_region else ()


def whole_regions(regions: tuple[Region, ...], position: int, room: int) -> int:
    """The largest number of positions from `position` on, at most `room`, whose end lies in no region. 0 if the
    region at `position` has more than `room`."""
    end = position + room
    for region in regions:
        if region.begin < end < region.end:
            end = max(region.begin, position)
    return end - position


def rotary_positions(n_prompt: int, images: Mapping[int, RequestImage]) -> Int32Array | None:
    """int32 [axes, n_prompt], or None if they are the KV indices. A text token takes one position on all axes, and
    the next position is after the farthest one so far."""
    axes = max((0 if image.rotary is None else len(image.rotary) for image in images.values()), default=0)
    if not axes:
        return None
    positions, ahead, at = np.empty((axes, n_prompt), np.int32), 0, 0
    for begin, image in sorted(images.items()):
        ahead += begin - at
        positions[:, at:begin] = np.arange(ahead - (begin - at), ahead)
        at = begin + image.n_positions
        own = np.arange(image.n_positions)[None] if image.rotary is None else image.rotary
        positions[:, begin:at] = ahead + own
        ahead += int(own.max()) + 1
    positions[:, at:] = np.arange(ahead, ahead + n_prompt - at)
    return positions


def check_images(images: Mapping[int, RequestImage], n_given: int, limits: ImageLimits | None) -> None:
    """Check the images of a prompt against the model's limits. `images`: by the position where each begins;
    `n_given`: the number of images in the request. Raises InvalidRequest."""
    if limits is None:
        require(n_given == 0, "images", "this model takes none", n_given)
        return
    most = limits.max_images
    require(n_given <= most, "images", f"this model takes at most {most} in a prompt", n_given)
    require(len(images) == n_given, "images", "each must have one place in the prompt", f"{len(images)} places")
    for k, (begin, image) in enumerate(images.items()):
        n = image.n_positions
        high = limits.max_positions
        require(1 <= n <= high, f"images[{k}]", f"must have 1 to {high} positions", n)
        if image.prepared is not None and not image.prepared.n_patches:
            crops, most = len(image.prepared.pixels), limits.max_crops
            require(1 <= crops <= most, f"images[{k}]", f"must have 1 to {most} crops", crops)
        if limits.lead:
            where = f"must be behind the first {limits.lead} tokens of the prompt"
            require(begin == limits.lead, f"images[{k}]", where, f"behind {begin}")
